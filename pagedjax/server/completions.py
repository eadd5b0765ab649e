"""``/v1/completions``."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from pagedjax.engine import TokenDelta
from pagedjax.server import params, prompts
from pagedjax.server.answer import Answer, Choice, respond
from pagedjax.server.logprobs import CompletionLogprobs, of_prompt
from pagedjax.server.schemas import CompletionRequest
from pagedjax.server.service import Service, service_of
from pagedjax.server.strict_json import JsonRoute
from pagedjax.server.work import Work, prepare

router = APIRouter(route_class=JsonRoute)


class CompletionAnswer(Answer):
    """Texts that go on from prompts."""

    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, service: Service, body: CompletionRequest, work: Work) -> None:
        super().__init__(service, body, work)
        self._echoes, self._prompt_alone = bool(body.echo), bool(body.echo) and body.max_tokens == 0
        self._asks_prompt_logprobs, self._logprobs = body.prompt_logprobs is not None, body.logprobs is not None
        self._lists = [CompletionLogprobs(service.names) for _ in work.texts]

    @property
    def num_shown_tokens(self) -> int:
        """None where the prompt alone was asked for: the one that was drawn is not shown."""
        return 0 if self._prompt_alone else super().num_shown_tokens

    def choice(self, index: int, choice: Choice) -> dict[str, Any]:
        """With its text."""
        whole = TokenDelta("", choice.token_ids, choice.logprobs, None, text="".join(choice.pieces), prompt_logprobs=choice.prompt_logprobs)
        shown = self._piece(index, whole, is_first=True) | {"finish_reason": self._reason(choice.finish_reason)}
        shown["stop_reason"] = None if self._prompt_alone else choice.stop_reason
        if self._asks_prompt_logprobs and choice.prompt_logprobs is not None:
            ids = self.work.prompt_of(index).token_ids
            shown["prompt_logprobs"] = of_prompt(self.service.names, ids, choice.prompt_logprobs)
        return shown

    def chunks(self, index: int, delta: TokenDelta, is_first: bool) -> list[dict[str, Any]]:
        """One, or none where nothing became certain."""
        piece = self._piece(index, delta, is_first)
        if delta.finish_reason is not None:
            piece |= {"finish_reason": self._reason(delta.finish_reason), "stop_reason": delta.stop_reason}
        has_tokens = piece["logprobs"] is not None and piece["logprobs"]["tokens"]
        return [piece] if piece["text"] or has_tokens or piece["finish_reason"] is not None else []

    def _piece(self, index: int, delta: TokenDelta, is_first: bool) -> dict[str, Any]:
        """Text and log-probabilities of some tokens; before the first, the prompt's where it is echoed."""
        text, token_ids = delta.text or "", list(delta.token_ids)
        logprobs: list[Any] = list(delta.logprobs or ())
        if self._prompt_alone:
            text, token_ids, logprobs = "", [], []
        if is_first and self._echoes:
            prompt = self.work.prompt_of(index)
            text = (self._text_of(prompt.token_ids) if prompt.text is None else prompt.text) + text
            if self._logprobs:
                token_ids = prompt.token_ids + token_ids
                logprobs = [*(delta.prompt_logprobs or [None] * len(prompt.token_ids)), *logprobs]
        lists = self._lists[index].of(token_ids, logprobs) if self._logprobs else None
        return {"index": index, "text": text, "logprobs": lists, "finish_reason": None}

    def _text_of(self, token_ids: list[int]) -> str:
        return self.service.llm.tokenizer.decode(token_ids, skip_special_tokens=self.work.params.skip_special_tokens)

    def _reason(self, reason: str | None) -> str | None:
        return "length" if self._prompt_alone else reason


@router.post("/v1/completions")
async def completions(request: Request, body: CompletionRequest) -> Response:
    """Continue each prompt, whole or as a stream of events."""
    service = service_of(request)
    sampling = params.of_completion(body, service.llm.default_sampling_params)
    several = isinstance(body.prompt, list) and not isinstance(body.prompt[0], int)

    def work() -> Work:
        read = prompts.of_completion(service.llm.tokenizer, body.prompt, body.add_special_tokens)
        return prepare(service.llm, read, sampling, max_tokens=body.max_tokens, cache_salt=body.cache_salt, priority=body.priority)

    num_answers = sampling.n * (len(body.prompt) if several else 1)
    return await respond(request, service, body, num_answers, work, lambda made: CompletionAnswer(service, body, made))
