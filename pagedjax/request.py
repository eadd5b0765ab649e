"""What a user asks and what comes back. Field names follow vLLM's, so that code written for it reads the same."""

from __future__ import annotations

import dataclasses
import math
import numbers
import operator
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from pagedjax.errors import RequestError

FinishReason = Literal["stop", "length", "abort", "error"]
_MAX_SEED = 2**32
_MAX_LOGPROBS = 64
_MAX_TEMPERATURE = 1e30  # still finite in float32, and flat long before
_MAX_TOKEN_ID = 2**31 - 1  # ids travel as int32


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose the next token and when to stop.

    Attributes:
      temperature: divides the logits; 0 is greedy.
      top_k: keep the `k` likeliest tokens; 0 or -1 is off.
      top_p: then keep the likeliest tokens until their probabilities reach `top_p`; 1 is off.
      seed: makes the request's tokens reproducible, whatever runs beside it (exactly in float32; in bfloat16 the logits of another batch
        size round otherwise); ``None`` draws one.
      max_tokens: the most new tokens; ``None`` for as many as the model's length leaves room for.
      stop_token_ids: tokens that end the answer, beside the model's own end tokens.
      ignore_eos: go on past the model's own end tokens.
      logprobs: report the log-probability of each new token and of the `logprobs` likeliest; ``None`` reports none.
      skip_special_tokens: leave special tokens out of the text.

    Raises:
      RequestError: a value out of range; the message names the field.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        # Plain numbers are kept, whatever kind was given: what comes later need not know NumPy's.
        temperature, top_p, top_k = number("temperature", self.temperature), number("top_p", self.top_p), integer("top_k", self.top_k)
        if not 0 <= temperature <= _MAX_TEMPERATURE:
            raise RequestError(f"temperature is {temperature}; it must be 0 (greedy) or more, and at most {_MAX_TEMPERATURE:g}")
        if not 0 < top_p <= 1:
            raise RequestError(f"top_p is {top_p}; it must be above 0 and at most 1")
        if top_k < -1:
            raise RequestError(f"top_k is {top_k}; it must be 1 or more, or 0 or -1 for off")
        max_tokens, seed, logprobs = (
            None if value is None else integer(name, value)
            for name, value in (("max_tokens", self.max_tokens), ("seed", self.seed), ("logprobs", self.logprobs))
        )
        if max_tokens is not None and max_tokens < 1:
            raise RequestError(f"max_tokens is {max_tokens}; it must be at least 1")
        if seed is not None and not 0 <= seed < _MAX_SEED:
            raise RequestError(f"seed is {seed}; it must be from 0 to 2**32 - 1")
        if logprobs is not None and not 0 <= logprobs <= _MAX_LOGPROBS:
            raise RequestError(f"logprobs is {logprobs}; it must be from 0 to {_MAX_LOGPROBS}, or None for none")
        stops = token_ids("stop_token_ids", self.stop_token_ids)
        checked = dict(temperature=temperature, top_p=top_p, top_k=top_k, max_tokens=max_tokens, seed=seed, logprobs=logprobs)
        for field, value in {**checked, "stop_token_ids": stops}.items():
            object.__setattr__(self, field, value)


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt, checked against the model, with everything that decides its answer.

    Attributes:
      prompt_token_ids: at least one id.
      params: with a seed filled in before it runs.
      stop_token_ids: every id that ends it, the model's own included unless they are ignored.
      max_new_tokens: `params.max_tokens`, cut to the room that the model's length leaves.
    """

    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    stop_token_ids: tuple[int, ...]
    max_new_tokens: int

    @property
    def max_num_tokens(self) -> int:
        """Tokens of prompt and output together, at most."""
        return len(self.prompt_token_ids) + self.max_new_tokens


def make_request(
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    *,
    eos_ids: Sequence[int],
    vocab_size: int,
    max_model_len: int,
    default_seed: int | None,
    name: str = "the prompt",
    limit: str | None = None,
) -> Request:
    """Check one prompt and resolve its parameters.

    Args:
      prompt_token_ids: token ids in ``[0, vocab_size)``.
      params: as the user gave them.
      eos_ids: the model's own end tokens.
      vocab_size: of the model.
      max_model_len: the most tokens of prompt and output together.
      default_seed: used when `params` has none; ``None`` leaves that to the caller.
      name: what messages call the prompt, such as ``"prompts[3]"``.
      limit: what messages call the reason for `max_model_len`; by default its own name and value.

    Raises:
      RequestError: an empty prompt, an id out of range, a prompt that leaves no room for a token, or more log-probabilities than tokens.
    """
    try:
        ids = tuple(integer(f"a token id of {name}", i) for i in prompt_token_ids)
    except TypeError:
        raise RequestError(f"{name} is {prompt_token_ids!r}; it must be a sequence of token ids") from None
    if not ids:
        raise RequestError(f"{name} is empty; it needs at least one token")
    for position, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            raise RequestError(f"token id {token} at position {position} of {name} is out of range; ids are 0 to {vocab_size - 1}")
    if len(ids) >= max_model_len:
        reason = f"max_model_len {max_model_len}" if limit is None else limit
        raise RequestError(f"{name} has {len(ids)} tokens; with {reason} it may have at most {max_model_len - 1}")
    if params.logprobs is not None and params.logprobs > vocab_size:
        raise RequestError(f"logprobs is {params.logprobs}; the vocabulary has {vocab_size} tokens")
    stop = dict.fromkeys(params.stop_token_ids)
    eos = token_ids("eos_ids", eos_ids)
    if not params.ignore_eos:
        stop |= dict.fromkeys(eos)
    if params.seed is None:
        params = dataclasses.replace(params, seed=default_seed)
    room = max_model_len - len(ids)
    return Request(ids, params, tuple(stop), room if params.max_tokens is None else min(params.max_tokens, room))


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """Natural log-probability of one generated token, its rank (1 is the likeliest) and the likeliest tokens with theirs."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True)
class Logprob:
    """Natural log-probability of one token under the model's own distribution (before temperature and filters)."""

    logprob: float
    rank: int | None
    decoded_token: str | None


@dataclasses.dataclass(frozen=True)
class CompletionOutput:
    """One answer.

    Attributes:
      index: which of the request's samples.
      text: the answer, special tokens left out unless asked for.
      token_ids: the answer's tokens, a final end token included.
      cumulative_logprob: sum over `token_ids`, or ``None`` when log-probabilities were not asked for.
      logprobs: for each token a dict from token id to `Logprob`: the token itself and the likeliest; or ``None``.
      finish_reason: ``"stop"`` (an end token), ``"length"``, ``"abort"`` (somebody ended it) or ``"error"`` (a step failed).
      stop_reason: the id in `SamplingParams.stop_token_ids` that ended it; ``None`` for a model's own end token or a length stop.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: FinishReason
    stop_reason: int | None = None


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """A request and its answers.

    Attributes:
      request_id: unique within the `LLM`.
      prompt: the text, or ``None`` when token ids were given.
      prompt_token_ids: what the model read.
      outputs: the answers.
      finished: always true here: the offline interface returns whole answers.
      num_cached_tokens: tokens of the prompt that were found in the prefix cache.
      metrics: seconds until the first token, waiting included (``prefill_s``), seconds from there (``decode_s``), and the seed.
      error: what went wrong, where the finish reason is ``"error"``.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True
    num_cached_tokens: int | None = None
    metrics: dict[str, Any] = dataclasses.field(default_factory=dict)
    error: str | None = None


def number(name: str, value: Any) -> float:
    """`value` as a float, NumPy's numbers included; a `RequestError` that names it unless it is a finite number."""
    try:
        if isinstance(value, bool | np.bool_) or not isinstance(value, numbers.Real | np.floating) or not math.isfinite(value):
            raise OverflowError
        return float(value)
    except OverflowError:  # also of an integer beyond every float
        shown = repr(value)
        raise RequestError(f"{name} is {shown if len(shown) < 50 else shown[:50] + '...'}; it must be a finite number") from None


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """`value` as ids that fit an int32; a `RequestError` that names it otherwise."""
    try:
        ids = tuple(integer(name, i) for i in value)
    except TypeError:
        raise RequestError(f"{name} is {value!r}; it must be a sequence of token ids") from None
    if any(not 0 <= i <= _MAX_TOKEN_ID for i in ids):
        raise RequestError(f"{name} is {list(ids)}; token ids are 0 to {_MAX_TOKEN_ID}")
    return ids


def integer(name: str, value: Any) -> int:
    """`value` as an int, NumPy's integers included; a `RequestError` that names it for anything else."""
    # operator.index takes NumPy integers too, and refuses floats and strings.
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise RequestError(f"{name} is {value!r}; it must be an integer") from None
