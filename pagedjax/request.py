"""What a user asks and what comes back. Field names follow vLLM's, so that code written for it reads the same."""

from __future__ import annotations

import dataclasses
import itertools
import math
import numbers
import operator
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from pagedjax.errors import RequestError

FinishReason = Literal["stop", "length", "abort", "error"]
_MAX_SEED = 2**32
_MAX_LOGPROBS = 64
_MAX_TEMPERATURE = 1e30  # still finite in float32, and flat long before
_MAX_TOKEN_ID = 2**31 - 1  # ids travel as int32
_MAX_REPETITION = 1e6
_MAX_SAMPLES = 4096
GREEDY_TEMPERATURE = 1e-5  # the kernels' own; this module knows no JAX
MASKED_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot say; as in vLLM's server


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose the next token and when to stop.

    Attributes:
      n: how many answers, samples 0 to ``n - 1`` of the same request.
      best_of: draw so many and keep the `n` with the largest sum of log-probabilities; ``None`` for `n`.
      temperature: divides the logits; 0 is greedy (so is all below 1e-5).
      top_k: keep the `k` likeliest tokens, lowest ids first among ties; 0 or -1 is off.
      top_p: then keep the likeliest tokens until their probabilities reach `top_p`; 1 is off.
      min_p: then keep those at least so likely relative to the likeliest; 0 is off.
      repetition_penalty: above 1, tokens of prompt and answer become less likely: a positive logit is divided by it, another multiplied.
      presence_penalty: taken off the logit of each token of the answer, from -2 to 2.
      frequency_penalty: taken off for each time that it occurs there, from -2 to 2.
      logit_bias: token id to what is added to its logit, from -100 to 100.
      allowed_token_ids: no other tokens may come.
      bad_words: texts that may not come. Each is forbidden as it is spelled at the start of a word and within one; the last token of a
        spelling may not follow its others.
      bad_words_token_ids: the same as lists of token ids.
      seed: makes the request's tokens reproducible, whatever runs beside it (exactly in float32; in bfloat16 the logits of another batch
        size round otherwise); ``None`` draws one.
      max_tokens: the most new tokens; ``None`` for as many as the model's length leaves room for.
      min_tokens: no end token and no stop string counts before so many new tokens.
      stop: texts that end the answer, wherever they begin and however they are cut into tokens; never looked for in the prompt.
      include_stop_str_in_output: whether the text that ended the answer belongs to it.
      stop_token_ids: tokens that end the answer, beside the model's own end tokens.
      ignore_eos: go on past the model's own end tokens.
      logprobs: report the log-probability of each new token and of the `logprobs` likeliest; ``None`` reports none.
      prompt_logprobs: likewise of each prompt token but the first.
      skip_special_tokens: leave special tokens out of the text.
      detokenize: whether the answer gets a text at all.

    Everything that changes logits comes in this order: allowed ids, bad words and `min_tokens`; bias; penalties; temperature; top-k;
    top-p; min-p.

    Raises:
      RequestError: a value out of range; the message names the field.
    """

    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    bad_words_token_ids: Sequence[Sequence[int]] = ()
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True

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
        prompt_logprobs = None if self.prompt_logprobs is None else integer("prompt_logprobs", self.prompt_logprobs)
        for name, value in (("logprobs", logprobs), ("prompt_logprobs", prompt_logprobs)):
            if value is not None and not 0 <= value <= _MAX_LOGPROBS:
                raise RequestError(f"{name} is {value}; it must be from 0 to {_MAX_LOGPROBS}, or None for none")
        stops = token_ids("stop_token_ids", self.stop_token_ids)
        checked: dict[str, Any] = dict(
            temperature=temperature, top_p=top_p, top_k=top_k, max_tokens=max_tokens, seed=seed, logprobs=logprobs
        )
        checked |= dict(stop_token_ids=stops, prompt_logprobs=prompt_logprobs)
        for field, value in {**checked, **self._checked_logits(), **self._checked_samples(), **self._checked_ends(max_tokens)}.items():
            object.__setattr__(self, field, value)

    def _checked_logits(self) -> dict[str, Any]:
        """What changes logits beside temperature, top-k and top-p."""
        checked: dict[str, Any] = {
            name: number(name, getattr(self, name)) for name in ("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
        }
        if not 0 <= checked["min_p"] <= 1:
            raise RequestError(f"min_p is {self.min_p}; it must be from 0 (off) to 1")
        if not 0 < checked["repetition_penalty"] <= _MAX_REPETITION:
            raise RequestError(
                f"repetition_penalty is {self.repetition_penalty}; it must be above 0 and at most {_MAX_REPETITION:g}; 1 is off"
            )
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= checked[name] <= 2:
                raise RequestError(f"{name} is {getattr(self, name)}; it must be from -2 to 2")
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise RequestError(f"logit_bias is {self.logit_bias!r}; it must be a mapping from token ids to numbers")
            ids = token_ids("a token id of logit_bias", self.logit_bias)
            values = [number(f"logit_bias[{i}]", value) for i, value in zip(ids, self.logit_bias.values(), strict=True)]
            wrong = next(((i, value) for i, value in zip(ids, values, strict=True) if not -100 <= value <= 100), None)
            if wrong is not None:
                raise RequestError(f"logit_bias[{wrong[0]}] is {wrong[1]}; it must be from -100 to 100")
            checked["logit_bias"] = dict(zip(ids, values, strict=True))
        if self.allowed_token_ids is not None:
            checked["allowed_token_ids"] = tuple(dict.fromkeys(token_ids("allowed_token_ids", self.allowed_token_ids)))
            if not checked["allowed_token_ids"]:
                raise RequestError("allowed_token_ids is empty; at least one token must be allowed, or None for all")
        checked["bad_words"] = texts("bad_words", self.bad_words)
        if not isinstance(self.bad_words_token_ids, Sequence):
            raise RequestError(f"bad_words_token_ids is {self.bad_words_token_ids!r}; it must be a sequence of sequences of token ids")
        checked["bad_words_token_ids"] = tuple(token_ids("bad_words_token_ids", word) for word in self.bad_words_token_ids)
        if () in checked["bad_words_token_ids"]:
            raise RequestError("bad_words_token_ids has an empty entry; each needs at least one token id")
        return checked

    def _checked_samples(self) -> dict[str, Any]:
        n, best_of = integer("n", self.n), None if self.best_of is None else integer("best_of", self.best_of)
        if not 1 <= n <= _MAX_SAMPLES:
            raise RequestError(f"n is {n}; it must be from 1 to {_MAX_SAMPLES}")
        if best_of is not None and not n <= best_of <= _MAX_SAMPLES:
            raise RequestError(f"best_of is {best_of}; it must be at least n, {n}, and at most {_MAX_SAMPLES}")
        if max(n, best_of or 1) > 1 and self.temperature <= GREEDY_TEMPERATURE:
            raise RequestError(f"temperature is {self.temperature}: {max(n, best_of or 1)} samples would all be the same; use n = 1")
        return dict(n=n, best_of=best_of)

    def _checked_ends(self, max_tokens: int | None) -> dict[str, Any]:
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize"):
            if not isinstance(getattr(self, name), bool | np.bool_):
                raise RequestError(f"{name} is {getattr(self, name)!r}; it must be True or False")
        min_tokens, stop = integer("min_tokens", self.min_tokens), texts("stop", self.stop)
        if min_tokens < 0 or (max_tokens is not None and min_tokens > max_tokens):
            raise RequestError(f"min_tokens is {min_tokens}; it must be from 0 to max_tokens, {max_tokens}")
        if stop and not self.detokenize:
            raise RequestError(f"stop is {list(stop)} and detokenize is False; stop strings are looked for in the text")
        return dict(min_tokens=min_tokens, stop=stop)

    @property
    def num_samples(self) -> int:
        """How many answers are drawn: `best_of`, or `n`."""
        return self.n if self.best_of is None else self.best_of


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt, checked against the model, with everything that decides its answer.

    Attributes:
      prompt_token_ids: at least one id.
      params: with a seed filled in before it runs.
      stop_token_ids: every id that ends it, the model's own included unless they are ignored.
      max_new_tokens: `params.max_tokens`, cut to the room that the model's length leaves.
      banned_token_ids: bad words of one token.
      bad_words: those of several.
      sample_index: which of the samples of its parameters it is.
    """

    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    stop_token_ids: tuple[int, ...]
    max_new_tokens: int
    banned_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    sample_index: int = 0

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
    sample_index: int = 0,
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
      sample_index: see `Request`.

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
    for what in ("logprobs", "prompt_logprobs"):
        if (getattr(params, what) or 0) > vocab_size:
            raise RequestError(f"{what} is {getattr(params, what)}; the vocabulary has {vocab_size} tokens")
    for what, some in (
        ("logit_bias", params.logit_bias or ()),
        ("allowed_token_ids", params.allowed_token_ids or ()),
        ("bad_words_token_ids", itertools.chain(*params.bad_words_token_ids)),
    ):
        beyond = next((i for i in some if i >= vocab_size), None)
        if beyond is not None:
            raise RequestError(f"token id {beyond} of {what} is out of range; ids are 0 to {vocab_size - 1}")
    stop = dict.fromkeys(params.stop_token_ids)
    eos = token_ids("eos_ids", eos_ids)
    if not params.ignore_eos:
        stop |= dict.fromkeys(eos)
    if params.seed is None:
        params = dataclasses.replace(params, seed=default_seed)
    banned = tuple(dict.fromkeys(word[0] for word in params.bad_words_token_ids if len(word) == 1))
    if params.allowed_token_ids is not None:
        never = {*banned, *(stop if params.min_tokens else ())}
        if never.issuperset(params.allowed_token_ids):
            raise RequestError(f"allowed_token_ids is {list(params.allowed_token_ids)}; bad words and min_tokens leave none of them")
    room = max_model_len - len(ids)
    return Request(
        ids,
        params,
        tuple(stop),
        room if params.max_tokens is None else min(params.max_tokens, room),
        banned,
        tuple(dict.fromkeys(tuple(word) for word in params.bad_words_token_ids if len(word) > 1)),
        sample_index,
    )


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """Natural log-probability of one generated token, its rank (1 is the likeliest) and the likeliest tokens with theirs."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


def make_token_logprobs(logprob: float, rank: int, top_ids: Sequence[int], top_logprobs: Sequence[float]) -> TokenLogprobs:
    """Of a token and of the likeliest ones. Those that could not come at all are left out, and the token itself gets `MASKED_LOGPROB`."""
    top = tuple((i, p) for i, p in zip(top_ids, top_logprobs, strict=True) if p > MASKED_LOGPROB)
    return TokenLogprobs(logprob if logprob > MASKED_LOGPROB else MASKED_LOGPROB, rank, top)


@dataclasses.dataclass(frozen=True)
class Logprob:
    """Natural log-probability of one token, under the distribution that `EngineConfig.logprobs_mode` names."""

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
      stop_reason: what of `SamplingParams.stop_token_ids` or `SamplingParams.stop` ended it; ``None`` for a model's own end token or a
        length stop.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: FinishReason
    stop_reason: int | str | None = None


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
      prompt_logprobs: for each prompt token a dict as in `CompletionOutput.logprobs`, ``None`` for the first; or ``None``.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True
    num_cached_tokens: int | None = None
    metrics: dict[str, Any] = dataclasses.field(default_factory=dict)
    error: str | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


def texts(name: str, value: Any) -> tuple[str, ...]:
    """`value`, a text or several, as a tuple; a `RequestError` that names it if there is anything else in it, or an empty text."""
    several = (value,) if isinstance(value, str) else value
    if several is None:
        return ()
    if not isinstance(several, Sequence) or any(not isinstance(text, str) for text in several):
        raise RequestError(f"{name} is {value!r}; it must be a text or several")
    if "" in several:
        raise RequestError(f"{name} has an empty text in it; an empty text is everywhere")
    return tuple(several)


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
