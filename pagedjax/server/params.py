"""From a body to `SamplingParams`; what it leaves open is as the model's own generation config has it."""

from __future__ import annotations

import dataclasses
from typing import Any

from pagedjax.errors import RequestError
from pagedjax.request import SamplingParams
from pagedjax.server.schemas import ChatRequest, CompletionRequest

_DEFAULT_MAX_TOKENS = 16  # of OpenAI's completions; a chat's answer may take what room there is
_MAX_STOP = 1000  # characters; each costs some 300 bytes in each answer
_SAME_NAME = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "ignore_eos",
    "stop_token_ids",
    "allowed_token_ids",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "prompt_logprobs",
)


def of_chat(body: ChatRequest, defaults: SamplingParams) -> SamplingParams:
    """Of ``/v1/chat/completions``.

    Raises:
      RequestError: a value out of range.
    """
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return _params(body, defaults, max_tokens=max_tokens, logprobs=logprobs)


def of_completion(body: CompletionRequest, defaults: SamplingParams) -> SamplingParams:
    """Of ``/v1/completions``. With `echo`, a `max_tokens` of 0 asks for nothing but the prompt: one token is drawn, and not shown.

    Raises:
      RequestError: a value out of range.
    """
    max_tokens = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens == 0 and body.echo:
        max_tokens = 1
    prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        prompt_logprobs = max(body.logprobs, prompt_logprobs or 0)
    return dataclasses.replace(_params(body, defaults, max_tokens=max_tokens, logprobs=body.logprobs), prompt_logprobs=prompt_logprobs)


def _params(body: ChatRequest | CompletionRequest, defaults: SamplingParams, **values: Any) -> SamplingParams:
    values |= {name: value for name in _SAME_NAME if (value := getattr(body, name)) is not None}
    if body.stop is not None:
        values["stop"] = [body.stop] if isinstance(body.stop, str) else body.stop
        length = sum(map(len, values["stop"]))
        if length > _MAX_STOP:
            raise RequestError(f"stop strings have {length} characters in all; at most {_MAX_STOP} are looked for")
    if body.seed is not None:
        values["seed"] = body.seed % 2**32  # OpenAI's seeds have 64 bits and a sign
    if body.logit_bias is not None:
        values["logit_bias"] = {_token_id(key): value for key, value in body.logit_bias.items()}
    if "min_tokens" not in values and defaults.min_tokens and (values["max_tokens"] or defaults.min_tokens) < defaults.min_tokens:
        values["min_tokens"] = values["max_tokens"]  # the model's own wish gives way to the client's
    return dataclasses.replace(defaults, **values)


def _token_id(key: str) -> int:
    if not key.isascii() or not key.isdigit() or len(key) > 10:
        raise RequestError(f"logit_bias has the key {key[:50]!r}; keys are token ids")
    return int(key)
