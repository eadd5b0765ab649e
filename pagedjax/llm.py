"""`LLM`: text in, text out, on a model named by a path or a hub id."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from pagedjax.checkpoint import Checkpoint, open_checkpoint
from pagedjax.config import ModelConfig
from pagedjax.engine import Engine, RequestResult, TokenDelta
from pagedjax.engine_config import EngineConfig
from pagedjax.errors import CheckpointError, EngineError, RequestError
from pagedjax.load import eos_token_ids, load_config, load_params
from pagedjax.params import Params
from pagedjax.request import CompletionOutput, Logprob, RequestOutput, SamplingParams, TokenLogprobs
from pagedjax.sampling import LogitsProcessor
from pagedjax.text import AnswerText, Tokenizer

Prompt = str | Mapping[str, Any]
Message = Mapping[str, Any]

# What a generation config may ask for and does not get, with the values under which it asks for nothing.
_NOT_BUILT: dict[str, Any] = {
    "typical_p": 1.0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
}


@dataclasses.dataclass(frozen=True)
class _ReadPrompt:
    """A prompt as token ids; the text where one was given."""

    text: str | None
    token_ids: list[int]
    cache_salt: str = ""


class LLM:
    """A loaded model with its tokenizer.

    Args:
      model: a Hugging Face folder, a GGUF file, or a hub id.
      dtype: ``"auto"`` (the checkpoint's own), ``"float32"``, ``"bfloat16"`` or ``"float16"``, for weights and KV cache.
      max_model_len: the most tokens of prompt and answer together; by default what the model was made for.
      seed: from which the seeds of requests that name none are drawn.
      max_num_seqs, kv_cache_bytes, gpu_memory_utilization: see `EngineConfig`.
      revision: of a hub id.
      engine_config: everything else about how it runs; the arguments above go before it.
      mesh: shards weights and cache over KV heads.
      logits_processors: see `Engine`.
      progress: called with (tensors read, tensors in all) while the weights load.

    Attributes:
      engine: the `Engine` that runs it; `engine.stats()` tells what it does, `engine.warmup()` compiles ahead.
      config: the model's `ModelConfig`.
      params: its weights.
      tokenizer: its tokenizer.
      eos_token_ids: tokens that end an answer: those of the generation config (else the model config) and the tokenizer's own.
      default_sampling_params: what the model's generation config asks for, as `generate` uses it.

    Raises:
      CheckpointError, UnsupportedModelError: the model cannot be loaded; the message says why.
      ConfigError: an unusable setting.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str = "auto",
        max_model_len: int | None = None,
        seed: int = 0,
        max_num_seqs: int | None = None,
        kv_cache_bytes: int | None = None,
        gpu_memory_utilization: float | None = None,
        revision: str | None = None,
        engine_config: EngineConfig = EngineConfig(),
        mesh: Mesh | None = None,
        logits_processors: Sequence[LogitsProcessor] = (),
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        named = dict(max_num_seqs=max_num_seqs, kv_cache_bytes=kv_cache_bytes, gpu_memory_utilization=gpu_memory_utilization)
        engine_config = dataclasses.replace(engine_config, **{name: value for name, value in named.items() if value is not None})  # type: ignore[arg-type]
        length = engine_config.max_model_len if max_model_len is None else max_model_len
        with open_checkpoint(model, revision=revision) as checkpoint:
            self.config: ModelConfig = load_config(checkpoint, dtype=dtype, max_model_len=length)
            self.tokenizer: Tokenizer = checkpoint.tokenizer()
            own = () if self.tokenizer.eos_token_id is None else (self.tokenizer.eos_token_id,)
            self.eos_token_ids = tuple(dict.fromkeys((*eos_token_ids(checkpoint), *own)))
            self.default_sampling_params = _default_params(checkpoint)
            self.params: Params = load_params(checkpoint, self.config, mesh=mesh, progress=progress)
        self.engine = Engine(
            self.params,
            self.config,
            dataclasses.replace(engine_config, max_model_len=None),  # the config has it
            mesh,
            eos_token_ids=self.eos_token_ids,
            seed=seed,
            vocab_size=min(self.tokenizer.vocab_size, self.config.vocab_size) or None,
            logits_processors=logits_processors,
        )
        self._ids = itertools.count()
        self._mail: dict[str, collections.deque[TokenDelta]] = {}
        self._left: set[str] = set()  # streams that nobody reads any more

    @property
    def max_model_len(self) -> int:
        """The most tokens of prompt and answer together."""
        return self.engine.max_model_len

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue each prompt.

        Args:
          prompts: a text or several, each perhaps given as ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``, either with a
            ``"cache_salt"``: only prompts of equal salts share KV blocks.
          sampling_params: for all prompts, or one for each; by default the model's own.
          priority: one number a prompt; lower ones go first.
          use_tqdm: show a progress bar on standard error.

        Returns:
          one `RequestOutput` a prompt, in order.

        Raises:
          RequestError: an unusable prompt or parameter. Nothing has run then.
        """
        single = isinstance(prompts, str | Mapping)
        several: list[Prompt] = [prompts] if single else list(prompts)  # type: ignore[list-item]
        return self._generate([self._read_prompt(prompt) for prompt in several], sampling_params, priority, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or several.

        Args:
          messages: ``{"role": ..., "content": ...}`` in order; or a list of conversations.
          sampling_params: see `generate`.
          use_tqdm: see `generate`.
          tools, chat_template, add_generation_prompt, continue_final_message: see `Tokenizer.apply_chat_template`.
          chat_template_kwargs: further names for the template.

        Returns:
          one `RequestOutput` a conversation, in order; its `prompt` is the text that the template made.

        Raises:
          RequestError: an unusable conversation or parameter, or a model without a chat template. Nothing has run then.
        """
        if not messages:
            raise RequestError("messages is empty; a conversation needs at least one message")
        conversations: list[Any] = [messages] if isinstance(messages[0], Mapping) else list(messages)
        options: dict[str, Any] = dict(
            tools=tools,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        texts = [self.tokenizer.apply_chat_template(c, **options, **dict(chat_template_kwargs or {})) for c in conversations]
        # The template wrote every special token itself.
        prompts = [_ReadPrompt(text, self.tokenizer.encode(text, add_special_tokens=False)) for text in texts]
        return self._generate(prompts, sampling_params, None, use_tqdm)

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[str]:
        """Answer a conversation piece by piece. Closing the iterator stops.

        Args:
          messages, sampling_params, tools, chat_template_kwargs: see `chat`.

        Returns:
          an iterator over the text that became certain after each step of the engine, whole characters only; ``""`` when nothing
          did, so that who reads can look at other things as often.

        Raises:
          RequestError: as `chat`, before the first piece.
          EngineError: a step failed, while reading.
        """
        if not messages:
            raise RequestError("messages is empty; a conversation needs at least one message")
        ids = self.tokenizer.encode_chat(messages, tools=tools, **dict(chat_template_kwargs or {}))
        params = self._as_token_ids(sampling_params or self.default_sampling_params)
        if params.num_samples > 1:
            raise RequestError(f"{params.num_samples} samples are asked for; a stream is one answer")
        if not params.detokenize:
            raise RequestError("detokenize is False; a stream gives text")
        self.engine.check_request(ids, params)
        return self._stream(ids, params)

    def _stream(self, ids: Sequence[int], params: SamplingParams) -> Iterator[str]:
        request_id = self.engine.add_request(ids, params, text=self._text(ids, params))
        # Two streams may be read in turn: whoever runs a step keeps what it gave to the other.
        mail = self._mail[request_id] = collections.deque()
        reason = None
        try:
            while reason is None:
                if not mail:
                    self._step()
                if not mail:
                    yield ""
                    continue
                delta = mail.popleft()
                reason = delta.finish_reason
                if delta.error is not None:
                    raise EngineError(delta.error)
                yield delta.text or ""
        finally:
            del self._mail[request_id]
            if reason is None:
                self._left.add(request_id)
                self.engine.abort(request_id)

    def _step(self) -> None:
        """A step of the engine; what it gave goes to the streams, and the rest back to who else uses the engine."""
        others = []
        for delta in self.engine.step():
            if delta.request_id in self._mail:
                self._mail[delta.request_id].append(delta)
            elif delta.request_id not in self._left:
                others.append(delta)
            elif delta.finish_reason is not None:
                self._left.remove(delta.request_id)
        self.engine.give_back(others)

    def _read_prompt(self, prompt: Prompt) -> _ReadPrompt:
        if isinstance(prompt, str):
            return _ReadPrompt(prompt, self.tokenizer.encode(prompt))
        if isinstance(prompt, Mapping) and "prompt_token_ids" in prompt:
            return _ReadPrompt(prompt.get("prompt"), prompt["prompt_token_ids"], prompt.get("cache_salt", ""))
        if isinstance(prompt, Mapping) and isinstance(prompt.get("prompt"), str):
            return _ReadPrompt(prompt["prompt"], self.tokenizer.encode(prompt["prompt"]), prompt.get("cache_salt", ""))
        raise RequestError(f"a prompt is {prompt!r}; it must be a text, {{'prompt': text}} or {{'prompt_token_ids': ids}}")

    def _generate(
        self,
        prompts: Sequence[_ReadPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        params = self.default_sampling_params if sampling_params is None else sampling_params
        given = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(given) != len(prompts) or any(not isinstance(one, SamplingParams) for one in given):
            raise RequestError(f"sampling_params has {len(given)} entries for {len(prompts)} prompts; each must be a SamplingParams")
        if priority is not None and len(priority) != len(prompts):
            raise RequestError(f"priority has {len(priority)} entries for {len(prompts)} prompts")
        each = [self._as_token_ids(one) for one in given]
        for at, (prompt, one) in enumerate(zip(prompts, each, strict=True)):
            # A text reads the prompt before the engine checks it, and the engine, which sees samples, would count wrongly.
            if one.stop or one.num_samples > 1:
                name = f"prompts[{at}]" if len(prompts) > 1 else "the prompt"
                self.engine.check_request(prompt.token_ids, one, name=name)
        samples = [(at, index) for at, one in enumerate(each) for index in range(one.num_samples)]
        results = iter(
            self.engine.generate(
                [prompts[at].token_ids for at, _ in samples],
                [self._of_sample(each[at], index) for at, index in samples],
                priorities=None if priority is None else [priority[at] for at, _ in samples],
                cache_salts=[prompts[at].cache_salt for at, _ in samples],
                sample_indices=[index for _, index in samples],
                texts=[self._text(prompts[at].token_ids, each[at]) if each[at].stop else None for at, _ in samples],
                use_tqdm=use_tqdm,
            )
        )
        of_prompts = [[next(results) for _ in range(one.num_samples)] for one in each]
        return [self._output(prompt.text, one, several) for prompt, one, several in zip(prompts, each, of_prompts, strict=True)]

    def _as_token_ids(self, params: SamplingParams) -> SamplingParams:
        """Bad words as token ids, and a seed where several samples must have the same."""
        if params.num_samples > 1 and params.seed is None:
            params = dataclasses.replace(params, seed=self.engine.draw_seed())
        if not params.bad_words:
            return params
        # A word is spelled one way at the start of a word and another within one.
        spelled = (text for word in params.bad_words for text in (word, f" {word.lstrip()}"))
        spellings = (self.tokenizer.encode(text, add_special_tokens=False) for text in spelled)
        ids = dict.fromkeys(tuple(spelling) for spelling in spellings if spelling)
        return dataclasses.replace(params, bad_words=(), bad_words_token_ids=(*params.bad_words_token_ids, *ids))

    def _of_sample(self, params: SamplingParams, index: int) -> SamplingParams:
        """Parameters of one of several samples: the prompt's log-probabilities come once, and who is chosen by its own needs them."""
        if params.best_of is not None and params.best_of > params.n and params.logprobs is None:
            params = dataclasses.replace(params, logprobs=0)
        return params if index == 0 else dataclasses.replace(params, prompt_logprobs=None)

    def _text(self, prompt_ids: Sequence[int], params: SamplingParams) -> AnswerText:
        # An answer's text is what it adds to the prompt's: as the first text of all, a SentencePiece tokenizer's would lose a space.
        return AnswerText(
            self.tokenizer.stream(skip_special_tokens=params.skip_special_tokens, context=prompt_ids),
            params.stop,
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    def _output(self, prompt: str | None, params: SamplingParams, results: Sequence[RequestResult]) -> RequestOutput:
        first = results[0]
        chosen = list(results)
        if params.num_samples > params.n:  # the best of them, the lowest sample first among ties; the worst is one that failed
            chosen = sorted(results, key=lambda r: -math.inf if r.error is not None else _cumulative(r), reverse=True)[: params.n]
        metrics = {"prefill_s": first.prefill_s, "decode_s": max(r.decode_s for r in results), "seed": first.seed}
        return RequestOutput(
            str(next(self._ids)),
            prompt,
            first.prompt_token_ids,
            [self._completion(index, params, result) for index, result in enumerate(chosen)],
            num_cached_tokens=first.num_cached_tokens,
            metrics=metrics,
            error=next((r.error for r in results if r.error is not None), None),
            prompt_logprobs=None if first.prompt_logprobs is None else self._prompt_logprobs(first),
        )

    def _completion(self, index: int, params: SamplingParams, result: RequestResult) -> CompletionOutput:
        ids = result.token_ids
        logprobs = None if result.logprobs is None or params.logprobs is None else result.logprobs
        return CompletionOutput(
            index=index,
            text=self._whole_text(params, result),
            token_ids=ids,
            cumulative_logprob=None if result.logprobs is None else _cumulative(result),
            logprobs=None if logprobs is None else [self._logprobs(t, lp) for t, lp in zip(ids, logprobs, strict=True)],
            finish_reason=result.finish_reason,
            stop_reason=result.stop_reason,
        )

    def _whole_text(self, params: SamplingParams, result: RequestResult) -> str:
        if result.text is not None or not params.detokenize:
            return result.text or ""
        ids = result.token_ids
        # An end token says nothing in the answer, unless what ended it is asked for.
        shown = ids[:-1] if result.finish_reason == "stop" and not params.include_stop_str_in_output else ids
        return self.tokenizer.stream(skip_special_tokens=params.skip_special_tokens, context=result.prompt_token_ids).finish(shown)

    def _prompt_logprobs(self, result: RequestResult) -> list[dict[int, Logprob] | None]:
        assert result.prompt_logprobs is not None
        pairs = zip(result.prompt_token_ids, result.prompt_logprobs, strict=True)
        return [None if lp is None else self._logprobs(token, lp) for token, lp in pairs]

    def _logprobs(self, token: int, at: TokenLogprobs) -> dict[int, Logprob]:
        ranked = {token: (at.logprob, at.rank)} | {i: (p, n) for n, (i, p) in enumerate(at.top, 1) if i != token}
        return {i: Logprob(p, rank, self.tokenizer.decode([i], skip_special_tokens=False)) for i, (p, rank) in ranked.items()}


def _cumulative(result: RequestResult) -> float:
    return sum(lp.logprob for lp in result.logprobs or ())


def _default_params(checkpoint: Checkpoint) -> SamplingParams:
    """The sampling that the model's authors chose in ``generation_config.json``; greedy where they say ``do_sample: false``.

    Raises:
      CheckpointError: a value out of range.
    """
    given = {key: value for key, value in checkpoint.generation_config.items() if value is not None}
    ignored = [f"{key}={given[key]!r}" for key, neutral in _NOT_BUILT.items() if given.get(key, neutral) != neutral]
    if ignored:
        warnings.warn(f"{checkpoint.source}: the generation config asks for {', '.join(ignored)}, which is not built", stacklevel=3)
    names = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
    if given.get("do_sample") is False:
        given |= {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    names |= {key: key for key in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}
    try:
        values = {ours: given[theirs] for theirs, ours in names.items() if theirs in given}
        if values.get("min_tokens") and "max_tokens" not in values:
            values["max_tokens"] = None
        banned = [*([i] for i in given.get("suppress_tokens", ())), *given.get("bad_words_ids", ())]
        return SamplingParams(**values, bad_words_token_ids=banned)
    except RequestError as error:
        raise CheckpointError(f"{checkpoint.source}: generation config: {error}") from error
