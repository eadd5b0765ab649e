"""`LLM`: text in, text out, on a model named by a path or a hub id."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from tqdm import tqdm

from pagedjax.allocator import blocks_for
from pagedjax.checkpoint import open_checkpoint
from pagedjax.config import ModelConfig
from pagedjax.errors import RequestError
from pagedjax.generation import GeneratedRow, Run, RunOptions, TokenLogprobs
from pagedjax.load import eos_token_ids, load_config, load_params
from pagedjax.params import Params
from pagedjax.request import CompletionOutput, Logprob, Request, RequestOutput, SamplingParams, make_request
from pagedjax.text import Tokenizer

Prompt = str | Mapping[str, Any]
Message = Mapping[str, Any]

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
      kv_cache_bytes: the most memory for the KV cache; by default 4 GiB on a CPU, 90 % of the free device memory elsewhere.
      revision: of a hub id.
      options: block size, token budget, mesh, kernels.
      progress: called with (tensors read, tensors in all) while the weights load.

    Attributes:
      config: the model's `ModelConfig`.
      params: its weights.
      tokenizer: its tokenizer.
      eos_token_ids: tokens that end an answer.
      default_sampling_params: what the model's generation config asks for, as `generate` uses it.

    Raises:
      CheckpointError, UnsupportedModelError: the model cannot be loaded; the message says why.
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
        if max_num_seqs < 1:
            raise ValueError(f"max_num_seqs is {max_num_seqs}; it must be at least 1")
        with open_checkpoint(model, revision=revision) as checkpoint:
            self.config: ModelConfig = load_config(checkpoint, dtype=dtype, max_model_len=max_model_len)
            self.tokenizer: Tokenizer = checkpoint.tokenizer()
            self.eos_token_ids = eos_token_ids(checkpoint)
            self.default_sampling_params = _default_params(checkpoint.generation_config)
            self.params: Params = load_params(checkpoint, self.config, mesh=options.mesh, progress=progress)
        self._options, self._max_num_seqs = options, max_num_seqs
        self._seeds = np.random.default_rng(seed)
        self._ids = itertools.count()
        bytes_ = _free_bytes(options.mesh) if kv_cache_bytes is None else kv_cache_bytes
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
        **template_args: Any,
    ) -> list[RequestOutput]:
        """Answer a conversation, or several.

        Args:
          messages: ``{"role": ..., "content": ...}`` in order; or a list of conversations.
          sampling_params: see `generate`.
          use_tqdm: see `generate`.
          **template_args: for the chat template, such as ``tools``.
        """
        if not messages:
            raise RequestError("messages is empty; a conversation needs at least one message")
        conversations: list[Any] = [messages] if isinstance(messages[0], Mapping) else list(messages)
        texts = [self.tokenizer.apply_chat_template(c, **template_args) for c in conversations]
        ids = [self.tokenizer.encode_chat(c, **template_args) for c in conversations]
        return self._generate(texts, ids, sampling_params, use_tqdm)

    def stream_chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None, **template_args: Any
    ) -> Iterator[str]:
        """Answer a conversation piece by piece: yields text as soon as it is whole characters. Closing the iterator stops."""
        if not messages:
            raise RequestError("messages is empty; a conversation needs at least one message")
        request = self._request(self.tokenizer.encode_chat(messages, **template_args), sampling_params or self.default_sampling_params)
        self._check_fits(request)
        return self._stream(request)

    def _stream(self, request: Request) -> Iterator[str]:
        text = self.tokenizer.stream(skip_special_tokens=request.params.skip_special_tokens)
        for rows in self._run([request]).stream():
            piece = "".join(text.step(token) for token in rows[0] if token not in request.stop_token_ids)
            if piece:
                yield piece
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

    def _request(self, ids: Sequence[int], params: SamplingParams) -> Request:
        return make_request(
            ids,
            params,
            eos_ids=self.eos_token_ids,
            vocab_size=self.config.vocab_size,
            max_model_len=self.config.max_model_len,
            default_seed=int(self._seeds.integers(2**32)),
        )

    def _check_fits(self, request: Request) -> None:
        need = blocks_for(request.max_len, self._options.block_size)
        if need > self.num_kv_blocks:
            raise RequestError(
                f"a request of up to {request.max_len} tokens needs {need} KV blocks; kv_cache_bytes leaves room for {self.num_kv_blocks}. "
                "Lower max_tokens or raise kv_cache_bytes"
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
        requests = [self._request(i, p) for i, p in zip(ids, each, strict=True)]
        for request in requests:
            self._check_fits(request)
        outputs: list[RequestOutput] = []
        with tqdm(total=len(requests), desc="Generating", unit="prompt", disable=not use_tqdm) as bar:
            for batch in self._batches(requests):
                run = self._run(batch)
                for request, row in zip(batch, run.finish(), strict=True):
                    outputs.append(self._output(texts[len(outputs)], request, row, run))
                bar.update(len(batch))
        return outputs

    def _run(self, batch: Sequence[Request]) -> Run:
        return Run(self.params, self.config, batch, self._options, max_num_blocks=self.num_kv_blocks)

    def _batches(self, requests: Sequence[Request]) -> Iterator[list[Request]]:
        """Consecutive requests that fit the cache together."""
        batch: list[Request] = []
        used = 0
        for request in requests:
            need = blocks_for(request.max_len, self._options.block_size)
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


def _default_params(generation_config: Mapping[str, Any]) -> SamplingParams:
    """The sampling that the model's authors chose; values that transformers ignores without ``do_sample`` are ignored here too."""
    params = SamplingParams()
    if generation_config.get("do_sample") is False:
        return dataclasses.replace(params, temperature=0.0)
    wanted = {key: generation_config[key] for key in ("temperature", "top_k", "top_p") if generation_config.get(key) is not None}
    return dataclasses.replace(params, **wanted)


def _free_bytes(mesh: Mesh | None) -> int:
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if not stats or "bytes_limit" not in stats:
        return _CPU_CACHE_BYTES
    shards = 1 if mesh is None else mesh.size
    return int((stats["bytes_limit"] - stats["bytes_in_use"]) * _GPU_CACHE_SHARE) * shards
