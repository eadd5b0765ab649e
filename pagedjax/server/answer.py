"""What both kinds of completion share: one choice as it grows, the usage, and how an answer is given whole or as events."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable
from typing import Any

from fastapi import Request, Response
from starlette.responses import JSONResponse

from pagedjax.engine import TokenDelta
from pagedjax.errors import EngineError, PagedjaxError
from pagedjax.request import TokenLogprobs
from pagedjax.server.errors import of_exception
from pagedjax.server.schemas import ChatRequest, CompletionRequest
from pagedjax.server.service import Service, new_id
from pagedjax.server.streaming import DONE, ClientGoneError, EventStream, event, until_gone
from pagedjax.server.work import Work, deltas

logger = logging.getLogger("pagedjax.server")


@dataclasses.dataclass
class Choice:
    """One answer so far."""

    pieces: list[str] = dataclasses.field(default_factory=list)
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0

    def take(self, delta: TokenDelta) -> None:
        """What a step gave."""
        if delta.finish_reason == "abort":
            raise EngineError("the answer was ended before its time")
        self.pieces.append(delta.text or "")
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or ()
        self.prompt_logprobs = delta.prompt_logprobs or self.prompt_logprobs
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        self.num_cached_tokens = delta.num_cached_tokens or 0


class Answer(ABC):
    """The answer to one request; a subclass knows the form.

    Args:
      service: what runs it.
      body: what was asked.
      work: the same, prepared.
    """

    prefix: str  # of ids
    whole_object: str
    chunk_object: str

    def __init__(self, service: Service, body: ChatRequest | CompletionRequest, work: Work) -> None:
        self.service, self.work = service, work
        self.choices = [Choice() for _ in work.texts]
        self._id, self._created, self._model = new_id(self.prefix), int(time.time()), service.model(body.model)
        self._shows_usage = body.stream_options is not None and body.stream_options.include_usage

    @abstractmethod
    def choice(self, index: int, choice: Choice) -> dict[str, Any]:
        """A whole choice."""

    @abstractmethod
    def chunks(self, index: int, delta: TokenDelta, is_first: bool) -> list[dict[str, Any]]:
        """What a step's tokens add to a choice, in perhaps several chunks; the reason comes with the last one."""

    def extra(self) -> dict[str, Any]:
        """Further fields of a whole answer."""
        return {}

    @property
    def num_shown_tokens(self) -> int:
        """New tokens that the client is told of."""
        return sum(len(choice.token_ids) for choice in self.choices)

    def usage(self) -> dict[str, Any]:
        """Tokens read and written; a prompt of several answers counts once."""
        read, written = self.work.num_prompt_tokens, self.num_shown_tokens
        cached = sum(choice.num_cached_tokens for choice in self.choices[:: self.work.params.n])
        return {
            "prompt_tokens": read,
            "completion_tokens": written,
            "total_tokens": read + written,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    async def whole(self) -> dict[str, Any]:
        """All of it.

        Raises:
          EngineError: a step failed, or the engine has stopped.
        """
        async with contextlib.aclosing(deltas(self.service.front, self.work, self.service.metrics)) as several:
            async for index, delta in several:
                self.choices[index].take(delta)
        choices = [self.choice(index, choice) for index, choice in enumerate(self.choices)]
        return self._frame(self.whole_object) | {"choices": choices, "usage": self.usage()} | self.extra()

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The same piece by piece, a chunk a step, then the usage where asked for, then ``[DONE]``. A failure is an event too."""
        frame = self._frame(self.chunk_object)
        if self._shows_usage:
            frame["usage"] = None
        try:
            async with contextlib.aclosing(deltas(self.service.front, self.work, self.service.metrics)) as several:
                async for index, delta in several:
                    choice = self.choices[index]
                    is_first = not choice.token_ids and not choice.pieces
                    choice.take(delta)
                    chunks = self.chunks(index, delta, is_first)
                    if chunks:
                        yield b"".join(event(frame | {"choices": [chunk]}) for chunk in chunks)
            if self._shows_usage:
                yield event(frame | {"choices": [], "usage": self.usage()})
        except PagedjaxError as error:
            yield event(of_exception(error).body())
        except Exception as error:
            logger.exception("an answer failed in mid-stream")
            yield event(of_exception(error).body())
        yield DONE

    def _frame(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}


async def respond(
    request: Request,
    service: Service,
    body: ChatRequest | CompletionRequest,
    num_answers: int,
    prepare: Callable[[], Work],
    make: Callable[[Work], Answer],
) -> Response:
    """Admit a request, prepare it off the event loop, and answer it in the way that its body asks for.

    Raises:
      ApiError, RequestError, EngineError: before anything was sent.
    """
    service.model(body.model)
    with contextlib.ExitStack() as held:
        held.enter_context(service.admission.taking(num_answers))
        answer = make(await service.off_loop(prepare))
        if body.stream:
            return EventStream(answer.events(), held.pop_all(), service.config.stall_s)
        try:
            return JSONResponse(await until_gone(request.receive, answer.whole()))
        except ClientGoneError:
            return Response(status_code=499)  # nobody reads it; the log does
