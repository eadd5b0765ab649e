"""`LLM`: text in, text out, on a model named by a path or a hub id."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from tqdm import tqdm

from pagedjax.allocator import blocks_for
from pagedjax.checkpoint import Checkpoint, open_checkpoint
from pagedjax.config import ModelConfig
from pagedjax.errors import CheckpointError, ConfigError, RequestError
from pagedjax.generation import GeneratedRow, Run, RunOptions
from pagedjax.load import eos_token_ids, load_config, load_params
from pagedjax.params import Params
from pagedjax.request import CompletionOutput, Logprob, Request, RequestOutput, SamplingParams, TokenLogprobs, make_request
from pagedjax.text import Tokenizer

Prompt = str | Mapping[str, Any]
Message = Mapping[str, Any]

# What a generation config may ask for beyond temperature, top-k and top-p, with the values under which it asks for nothing.
_NOT_BUILT: dict[str, Any] = {
    "repetition_penalty": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "min_new_tokens": 0,
    "suppress_tokens": [],
    "bad_words_ids": [],
}
_CPU_CACHE_BYTES = 4 << 30
_GPU_CACHE_SHARE = 0.9  # of what is free once the weights are there


class LLM:
    """A loaded model with its tokenizer.

    Args:
      model: a Hugging Face folder, a GGUF file, or a hub id.
      dtype: ``"auto"`` (the checkpoint's own), ``"float32"``, ``"bfloat16"`` or ``"float16"``, for weights and KV cache.
      max_model_len: the most tokens of prompt and answer together; by default what the model was made for.
      seed: from which the seeds of requests that name none are drawn.
      max_num_seqs: the most requests that run side by side.
      kv_cache_bytes: the most memory for the KV cache; by default what `free_cache_bytes` says.
      revision: of a hub id.
      options: block size, token budget, mesh, kernels.
      progress: called with (tensors read, tensors in all) while the weights load.

    Attributes:
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
        max_num_seqs: int = 64,
        kv_cache_bytes: int | None = None,
        revision: str | None = None,
        options: RunOptions = RunOptions(),
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        for name, value in (("max_num_seqs", max_num_seqs), ("kv_cache_bytes", kv_cache_bytes)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name} is {value!r}; it must be a positive integer")
        with open_checkpoint(model, revision=revision) as checkpoint:
            self.config: ModelConfig = load_config(checkpoint, dtype=dtype, max_model_len=max_model_len)
            self.tokenizer: Tokenizer = checkpoint.tokenizer()
            own = () if self.tokenizer.eos_token_id is None else (self.tokenizer.eos_token_id,)
            self.eos_token_ids = tuple(dict.fromkeys((*eos_token_ids(checkpoint), *own)))
            self.default_sampling_params = _default_params(checkpoint)
            self.params: Params = load_params(checkpoint, self.config, mesh=options.mesh, progress=progress)
        self._options, self._max_num_seqs = options, max_num_seqs
        self._seeds = np.random.default_rng(seed)
        self._ids = itertools.count()
        bytes_ = free_cache_bytes(options.mesh) if kv_cache_bytes is None else kv_cache_bytes
        self.num_kv_blocks = bytes_ // (self.config.kv_bytes_per_token * options.block_size)
        """KV blocks that a batch may use."""

    @property
    def max_model_len(self) -> int:
        """The most tokens of prompt and answer together."""
        return self.config.max_model_len

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue each prompt.

        Args:
          prompts: a text or several, each perhaps given as ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``.
          sampling_params: for all prompts, or one for each; by default the model's own.
          use_tqdm: show a progress bar on standard error.

        Returns:
          one `RequestOutput` a prompt, in order.

        Raises:
          RequestError: an unusable prompt or parameter. Nothing has run then.
        """
        single = isinstance(prompts, str | Mapping)
        several: list[Prompt] = [prompts] if single else list(prompts)  # type: ignore[list-item]
        texts, ids = [], []
        for prompt in several:
            text, token_ids = self._read_prompt(prompt)
            texts.append(text)
            ids.append(token_ids)
        return self._generate(texts, ids, sampling_params, use_tqdm)

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
        return self._generate(texts, [self.tokenizer.encode(text, add_special_tokens=False) for text in texts], sampling_params, use_tqdm)

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
          an iterator over the text that became certain, whole characters only, after the prefill and then after every 8 steps; ``""``
          when nothing did, so that who reads can look at other things as often.

        Raises:
          RequestError: as `chat`, before the first piece.
        """
        if not messages:
            raise RequestError("messages is empty; a conversation needs at least one message")
        ids = self.tokenizer.encode_chat(messages, tools=tools, **dict(chat_template_kwargs or {}))
        request = self._request(ids, sampling_params or self.default_sampling_params)
        self._check_fits(request)
        return self._stream(request)

    def _stream(self, request: Request) -> Iterator[str]:
        text = self.tokenizer.stream(skip_special_tokens=request.params.skip_special_tokens)
        for rows in self._run([request]).stream():
            yield "".join(text.step(token) for token in rows[0] if token not in request.stop_token_ids)
        rest = text.finish()
        if rest:
            yield rest

    def _read_prompt(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt)
        if isinstance(prompt, Mapping) and "prompt_token_ids" in prompt:
            return prompt.get("prompt"), prompt["prompt_token_ids"]
        if isinstance(prompt, Mapping) and isinstance(prompt.get("prompt"), str):
            return prompt["prompt"], self.tokenizer.encode(prompt["prompt"])
        raise RequestError(f"a prompt is {prompt!r}; it must be a text, {{'prompt': text}} or {{'prompt_token_ids': ids}}")

    def _request(self, ids: Sequence[int], params: SamplingParams, name: str = "the prompt") -> Request:
        return make_request(
            ids,
            params,
            eos_ids=self.eos_token_ids,
            vocab_size=self.config.vocab_size,
            max_model_len=self.config.max_model_len,
            default_seed=int(self._seeds.integers(2**32)),
            name=name,
        )

    def _check_fits(self, request: Request) -> None:
        need = blocks_for(request.max_num_tokens, self._options.block_size)
        if need > self.num_kv_blocks:
            raise RequestError(
                f"a request of up to {request.max_num_tokens} tokens needs {need} KV blocks; kv_cache_bytes leaves room for "
                f"{self.num_kv_blocks}. Lower max_tokens or raise kv_cache_bytes"
            )

    def _generate(
        self,
        texts: Sequence[str | None],
        ids: Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        params = self.default_sampling_params if sampling_params is None else sampling_params
        each = [params] * len(ids) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(ids):
            raise RequestError(f"sampling_params has {len(each)} entries for {len(ids)} prompts")
        named = (f"prompts[{i}]" if len(ids) > 1 else "the prompt" for i in range(len(ids)))
        requests = [self._request(i, p, name) for i, p, name in zip(ids, each, named, strict=True)]
        for request in requests:
            self._check_fits(request)
        outputs: list[RequestOutput] = []
        with tqdm(total=len(requests), desc="Generating", unit="prompt", disable=not use_tqdm) as bar:
            for batch in self._batches(requests):
                run = self._run(batch)
                before = bar.n

                def show(finished: int, before: int = before) -> None:
                    bar.update(before + finished - bar.n)

                rows = run.finish(show if use_tqdm else None)
                for request, row in zip(batch, rows, strict=True):
                    outputs.append(self._output(texts[len(outputs)], request, row, run))
        return outputs

    def _run(self, batch: Sequence[Request]) -> Run:
        return Run(self.params, self.config, batch, self._options, max_num_blocks=self.num_kv_blocks)

    def _batches(self, requests: Sequence[Request]) -> Iterator[list[Request]]:
        """Consecutive requests that fit the cache together."""
        batch: list[Request] = []
        used = 0
        for request in requests:
            need = blocks_for(request.max_num_tokens, self._options.block_size)
            if batch and (len(batch) == self._max_num_seqs or used + need > self.num_kv_blocks):
                yield batch
                batch, used = [], 0
            batch.append(request)
            used += need
        if batch:
            yield batch

    def _output(self, prompt: str | None, request: Request, row: GeneratedRow, run: Run) -> RequestOutput:
        params, ids = request.params, row.token_ids
        stopped = row.finish_reason == "stop"
        logprobs = None if row.logprobs is None else [self._logprobs(t, lp) for t, lp in zip(ids, row.logprobs, strict=True)]
        completion = CompletionOutput(
            index=0,
            text=self.tokenizer.decode(ids[:-1] if stopped else ids, skip_special_tokens=params.skip_special_tokens),
            token_ids=ids,
            cumulative_logprob=None if row.logprobs is None else sum(lp.logprob for lp in row.logprobs),
            logprobs=logprobs,
            finish_reason=row.finish_reason,
            stop_reason=ids[-1] if stopped and ids[-1] in params.stop_token_ids else None,
        )
        metrics = {"prefill_s": run.prefill_s, "decode_s": run.decode_s, "seed": params.seed}
        return RequestOutput(str(next(self._ids)), prompt, list(request.prompt_token_ids), [completion], metrics=metrics)

    def _logprobs(self, token: int, at: TokenLogprobs) -> dict[int, Logprob]:
        ranked = {token: (at.logprob, at.rank)} | {i: (p, n) for n, (i, p) in enumerate(at.top, 1) if i != token}
        return {i: Logprob(p, rank, self.tokenizer.decode([i], skip_special_tokens=False)) for i, (p, rank) in ranked.items()}


def _default_params(checkpoint: Checkpoint) -> SamplingParams:
    """The sampling that the model's authors chose in ``generation_config.json``; greedy where they say ``do_sample: false``.

    Raises:
      CheckpointError: a value out of range.
    """
    given = {key: value for key, value in checkpoint.generation_config.items() if value is not None}
    ignored = [f"{key}={given[key]!r}" for key, neutral in _NOT_BUILT.items() if given.get(key, neutral) != neutral]
    if ignored:
        warnings.warn(f"{checkpoint.source}: the generation config asks for {', '.join(ignored)}, which is not built", stacklevel=3)
    names = {"max_new_tokens": "max_tokens"}
    if given.get("do_sample") is False:
        given |= {"temperature": 0.0, "top_k": 0, "top_p": 1.0}
    names |= {key: key for key in ("temperature", "top_k", "top_p")}
    try:
        return SamplingParams(**{ours: given[theirs] for theirs, ours in names.items() if theirs in given})
    except RequestError as error:
        raise CheckpointError(f"{checkpoint.source}: generation config: {error}") from error


def free_cache_bytes(mesh: Mesh | None = None) -> int:
    """Bytes that an `LLM` takes for its KV cache unless told otherwise: see `cache_share`."""
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if not stats or "bytes_limit" not in stats:
        return _CPU_CACHE_BYTES
    shards = 1 if mesh is None else mesh.size
    return cache_share(stats["bytes_limit"] - stats["bytes_in_use"], device.platform) * shards


def cache_share(free_bytes: int, platform: str) -> int:
    """Bytes of the KV cache where `free_bytes` are left beside the weights: at most 4 GiB on a CPU, 90 % of them elsewhere."""
    return min(free_bytes, _CPU_CACHE_BYTES) if platform == "cpu" else int(free_bytes * _GPU_CACHE_SHARE)
