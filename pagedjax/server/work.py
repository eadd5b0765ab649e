"""The answers to one request: what is prepared off the event loop, and how their tokens come together again."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator

from pagedjax.async_engine import AsyncEngine
from pagedjax.engine import TokenDelta
from pagedjax.errors import EngineError
from pagedjax.llm import LLM
from pagedjax.request import SamplingParams
from pagedjax.server.errors import ApiError
from pagedjax.server.metrics import Metrics
from pagedjax.server.prompts import Prompt
from pagedjax.text import AnswerText


@dataclasses.dataclass(frozen=True)
class Work:
    """Checked prompts with the parameters of their answers; choice ``i * params.n + j`` is sample `j` of prompt `i`.

    Attributes:
      texts: of each choice, as it grows.
    """

    prompts: list[Prompt]
    params: SamplingParams
    texts: list[AnswerText]
    cache_salt: str
    priority: int

    @property
    def num_prompt_tokens(self) -> int:
        """Of all prompts, each counted once."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    def prompt_of(self, choice: int) -> Prompt:
        """What a choice answers."""
        return self.prompts[choice // self.params.n]


def prepare(
    llm: LLM, prompts: list[Prompt], params: SamplingParams, *, max_tokens: int | None, cache_salt: str | None, priority: int | None
) -> Work:
    """Check everything, so that no answer fails after the first byte was sent. For a worker thread: its cost grows with the prompts.

    Args:
      max_tokens: as the client asked, to refuse what does not fit; ``None`` takes the room there is.

    Raises:
      RequestError, ApiError: an unusable prompt or parameter.
    """
    for prompt in prompts:
        length, most = len(prompt.token_ids), llm.max_model_len
        if length >= most or (max_tokens is not None and length + max_tokens > most):
            asked = "" if max_tokens is None else f" and max_tokens is {max_tokens}"
            raise ApiError(
                400,
                f"{prompt.name} has {length} tokens{asked}; this model's maximum context length is {most} tokens of both",
                param="messages" if prompt.name == "the conversation" else "prompt",
                code="context_length_exceeded",
            )
        llm.engine.check_request(prompt.token_ids, params, name=prompt.name)
    texts = [
        AnswerText(
            llm.tokenizer.stream(skip_special_tokens=params.skip_special_tokens, context=prompt.token_ids),
            params.stop,
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )
        for prompt in prompts
        for _ in range(params.n)
    ]
    return Work(prompts, params, texts, cache_salt or "", priority or 0)


async def deltas(front: AsyncEngine, work: Work, metrics: Metrics) -> AsyncGenerator[tuple[int, TokenDelta], None]:
    """What each step gave to which choice. Closing it aborts what has not ended.

    Raises:
      EngineError: a step failed, or the engine has stopped.
    """
    if len(work.texts) == 1:
        async with contextlib.aclosing(_one(front, work, 0, metrics)) as several:
            async for delta in several:
                yield 0, delta
        return
    queue: asyncio.Queue[tuple[int, TokenDelta | EngineError]] = asyncio.Queue()

    async def read(choice: int) -> None:
        try:
            async with contextlib.aclosing(_one(front, work, choice, metrics)) as several:
                async for delta in several:
                    queue.put_nowait((choice, delta))
        except EngineError as error:
            queue.put_nowait((choice, error))

    readers = [asyncio.ensure_future(read(choice)) for choice in range(len(work.texts))]
    try:
        left = len(readers)
        while left:
            choice, got = await queue.get()
            if isinstance(got, EngineError):
                raise got
            yield choice, got
            left -= got.finish_reason is not None
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


async def _one(front: AsyncEngine, work: Work, choice: int, metrics: Metrics) -> AsyncGenerator[TokenDelta, None]:
    started = time.perf_counter()
    first: float | None = None
    count, reason = 0, "abort"
    answer = front.generate(
        work.prompt_of(choice).token_ids,
        work.params,
        priority=work.priority,
        cache_salt=work.cache_salt,
        sample_index=choice % work.params.n,
        text=work.texts[choice],
    )
    try:
        async with contextlib.aclosing(answer) as several:
            async for delta in several:
                if first is None and delta.token_ids:
                    first = time.perf_counter()
                count += len(delta.token_ids)
                if delta.finish_reason is not None:
                    reason = delta.finish_reason
                yield delta
    except EngineError:
        reason = "error"
        raise
    finally:
        metrics.answered(reason, started, first, time.perf_counter(), count)
