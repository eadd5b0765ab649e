"""``/v1/chat/completions``."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from pagedjax.engine import TokenDelta
from pagedjax.server import params, prompts
from pagedjax.server.answer import Answer, Choice, respond
from pagedjax.server.logprobs import of_chat, of_prompt
from pagedjax.server.schemas import ChatRequest
from pagedjax.server.service import service_of
from pagedjax.server.strict_json import JsonRoute
from pagedjax.server.work import Work, prepare

router = APIRouter(route_class=JsonRoute)


class ChatAnswer(Answer):
    """A message of the assistant's."""

    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, choice: Choice) -> dict[str, Any]:
        """With its message."""
        return {
            "index": index,
            "message": {"role": "assistant", "content": "".join(choice.pieces), "refusal": None},
            "logprobs": self._logprobs(choice.token_ids, choice.logprobs),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }

    def chunks(self, index: int, delta: TokenDelta, is_first: bool) -> list[dict[str, Any]]:
        """The role first, then text, and the reason alone at the end."""
        chunks = []
        if is_first:
            chunks.append(_chunk(index, {"role": "assistant", "content": "", "refusal": None}))
        logprobs = self._logprobs(delta.token_ids, delta.logprobs or [])
        if delta.text or (logprobs and delta.token_ids):
            chunks.append(_chunk(index, {"content": delta.text or ""}, logprobs))
        if delta.finish_reason is not None:
            chunks.append(_chunk(index, {}) | {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason})
        return chunks

    def extra(self) -> dict[str, Any]:
        """The prompt's log-probabilities beside the choices, as in vLLM: they are the same for all."""
        logprobs = self.choices[0].prompt_logprobs
        if self.work.params.prompt_logprobs is None or logprobs is None:
            return {}
        return {"prompt_logprobs": of_prompt(self.service.names, self.work.prompts[0].token_ids, logprobs)}

    def _logprobs(self, token_ids: list[int], logprobs: list[Any]) -> dict[str, Any] | None:
        if self.work.params.logprobs is None:
            return None
        return {"content": of_chat(self.service.names, token_ids, logprobs), "refusal": None}


def _chunk(index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}


@router.post("/v1/chat/completions")
async def chat_completions(request: Request, body: ChatRequest) -> Response:
    """Answer a conversation, whole or as a stream of events."""
    service = service_of(request)
    sampling = params.of_chat(body, service.llm.default_sampling_params)

    def work() -> Work:
        prompt = prompts.of_conversation(service.llm.tokenizer, body)
        asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        return prepare(service.llm, [prompt], sampling, max_tokens=asked, cache_salt=body.cache_salt, priority=body.priority)

    return await respond(request, service, body, sampling.n, work, lambda made: ChatAnswer(service, body, made))
