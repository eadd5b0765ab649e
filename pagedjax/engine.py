"""The engine: requests come and go, and the device is kept busy. Where the scheduler's decisions meet the device's steps.

One round of `Engine.step`: schedule and dispatch the next step, then take the tokens of the one before. So the host works while the
device does, and tokens come out one step late.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import jax
import numpy as np
from jax.sharding import Mesh
from tqdm import tqdm

import pallas_kernels
from pagedjax.allocator import BlockAllocator
from pagedjax.batch import engine_inputs, prompt_range, table_row
from pagedjax.checkpoint.demo import cache_folder
from pagedjax.config import ModelConfig
from pagedjax.engine_config import Buckets, EngineConfig, cache_dtype, kv_block_bytes, make_buckets
from pagedjax.errors import ConfigError, RequestError
from pagedjax.fused_decode import fused_rows
from pagedjax.inputs import WindowInputs
from pagedjax.memory import CPU_CACHE_BYTES, DeviceMemory, num_blocks_that_fit
from pagedjax.params import Params
from pagedjax.prefix_cache import Hasher, hash_block
from pagedjax.request import FinishReason, Request, SamplingParams, TokenLogprobs, integer, make_request, make_token_logprobs, token_ids
from pagedjax.runner import ModelRunner, Runner, keep_every_compilation, workspace_bytes
from pagedjax.sampling import LogitsProcessor, Sampled, Sampler
from pagedjax.scheduler import ScheduledBatch, Scheduler
from pagedjax.sequence import Status, TokenSequence
from pagedjax.stats import EngineStats, Meter, RequestTimes

logger = logging.getLogger("pagedjax.engine")

_MAX_IN_FLIGHT = 2  # one step runs while the next one waits behind it


@dataclasses.dataclass(frozen=True)
class TokenDelta:
    """What a step gave to one request.

    Attributes:
      request_id: whose.
      token_ids: new tokens, perhaps none; a final end token included.
      logprobs: of each of them, or ``None`` when not asked for.
      finish_reason: ``None`` while it goes on, then ``"stop"``, ``"length"``, ``"abort"`` or ``"error"``.
      error: what went wrong, with the reason ``"error"``.
      text: what became certain of the text, where `Engine.add_request` was given one.
      stop_reason: with the reason ``"stop"``, what of `SamplingParams.stop_token_ids` or `SamplingParams.stop` it was.
      num_cached_tokens: prompt tokens that were found in the prefix cache; ``None`` before it was first admitted.
      prompt_logprobs: with the first tokens, where asked for, those of the prompt; see `RequestResult`.
    """

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason | None
    error: str | None = None
    text: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None


@dataclasses.dataclass(frozen=True)
class RequestResult:
    """A whole answer.

    Attributes:
      request_id: whose.
      prompt_token_ids: what the model read.
      token_ids: the new tokens, a final end token included.
      finish_reason: see `TokenDelta`.
      logprobs: of each new token, or ``None`` when not asked for.
      num_cached_tokens: prompt tokens that were found in the prefix cache.
      num_preemptions: how often it was computed again.
      seed: with which it was sampled.
      prefill_s: seconds from its arrival to its first token, waiting and compiling included; ``None`` if there was none.
      decode_s: seconds from there to its last.
      error: what went wrong, with the reason ``"error"``.
      text, stop_reason: see `TokenDelta`; here the whole text.
      prompt_logprobs: of each prompt token, ``None`` for the first; ``None`` when not asked for, or when it did not come that far.
    """

    request_id: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[TokenLogprobs] | None
    num_cached_tokens: int
    num_preemptions: int
    seed: int
    prefill_s: float | None
    decode_s: float
    error: str | None = None
    text: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None


BlockState = Literal["null", "free", "cached", "used", "shared"]


@dataclasses.dataclass(frozen=True)
class RequestView:
    """Where an unfinished request stands.

    Attributes:
      request_id: whose.
      status: waiting, running or preempted.
      num_prompt_tokens: what the model reads.
      num_new_tokens: those that have come out so far.
      max_new_tokens: the most that may.
      num_computed_tokens: tokens whose keys and values the dispatched steps leave in the cache.
      num_cached_tokens: prompt tokens that were found in the prefix cache; ``None`` before it was first admitted.
      num_preemptions: how often it lost its blocks.
      block_ids: physical blocks that it holds, in order.
    """

    request_id: str
    status: Status
    num_prompt_tokens: int
    num_new_tokens: int
    max_new_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int | None
    num_preemptions: int
    block_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """An engine between two steps, for views and for debugging. It is a copy: the engine goes on without changing it.

    Attributes:
      blocks: the state of each physical block, by its id: ``"null"`` (block 0), ``"free"``, ``"cached"`` (held by nobody, but a prefix
        may find it), ``"used"`` (held by one request) or ``"shared"`` (by several).
      requests: the unfinished ones in the order of their arrival.
      stats: see `EngineStats`.
    """

    blocks: tuple[BlockState, ...]
    requests: tuple[RequestView, ...]
    stats: EngineStats


class Text(Protocol):
    """The text of one answer as it grows; `pagedjax.text.AnswerText` is one. No token is taken after `stopped` is set."""

    stopped: str | None

    def step(self, token_id: int) -> str:
        """The text that became certain with a token."""

    def finish(self) -> str:
        """The rest of it."""


@dataclasses.dataclass(eq=False)
class _Live:
    """A request in the engine: its row, its times, its text and the log-probabilities so far."""

    row: TokenSequence
    times: RequestTimes
    stops: frozenset[int]
    host_stops: bool
    logprobs: list[TokenLogprobs] | None
    prompt_logprobs: list[TokenLogprobs | None] | None
    text: Text | None
    pieces: list[str]


@dataclasses.dataclass(frozen=True)
class _Flight:
    """A dispatched step whose tokens have not been taken yet."""

    batch: ScheduledBatch
    handle: Any
    num_decode_rows: int | None  # padded, of a mixed step; None for a window
    report: bool
    prompts: tuple[range, ...] = ()  # for each chunk the prompt positions that it reports on


class Engine:
    """Continuous batching over the paged KV cache: token ids in, token ids out.

    Not safe for use from several threads; `AsyncEngine` is.

    Args:
      params: the weights.
      config: the model.
      engine_config: limits and sizes.
      mesh: shards weights and cache over KV heads.
      eos_token_ids: the model's own end tokens.
      seed: from which the seeds of requests that name none are drawn.
      runner: runs the steps; by default the transformer of `params`. A test may pass another.
      hasher: names blocks for the prefix cache.
      vocab_size: ids of the tokenizer, where the model has rows for more: those are never sampled and count in no sum.
      logits_processors: traced functions of (logits f32[B, V], `LogitsState`) that give logits; they come before everything else.

    Attributes:
      max_model_len: the most tokens of prompt and answer together: what the model allows, the settings ask for and the cache holds.
      num_kv_blocks: blocks of the KV cache.
      buckets: the padded sizes that steps are compiled for.

    Raises:
      ConfigError: an unusable setting, or no room for a KV cache.
    """

    def __init__(
        self,
        params: Params | None,
        config: ModelConfig,
        engine_config: EngineConfig = EngineConfig(),
        mesh: Mesh | None = None,
        *,
        eos_token_ids: Sequence[int] = (),
        seed: int = 0,
        runner: Callable[[EngineConfig, Buckets, int], Runner] | None = None,
        hasher: Hasher = hash_block,
        vocab_size: int | None = None,
        logits_processors: Sequence[LogitsProcessor] = (),
    ) -> None:
        if params is None and runner is None:
            raise ConfigError("params is None; without weights there is nothing to run but a runner of your own")
        try:
            self.eos_token_ids = token_ids("eos_token_ids", eos_token_ids)
            if integer("seed", seed) < 0:
                raise RequestError(f"seed is {seed}; it must be 0 or more")
        except RequestError as error:
            raise ConfigError(str(error)) from None
        if vocab_size is not None and not 1 <= vocab_size <= config.vocab_size:
            raise ConfigError(f"vocab_size is {vocab_size}; the model has {config.vocab_size} rows")
        self.vocab_size = config.vocab_size if vocab_size is None else vocab_size
        sampler = Sampler(vocab_size, engine_config.logprobs_mode, tuple(logits_processors))
        try:
            for op in ("paged_attention", "paged_prefill_attention", "write_kv"):
                pallas_kernels.support(op, engine_config.implementation)
        except ValueError as error:
            raise ConfigError(f"implementation is {engine_config.implementation!r}: {error}") from None
        asked = engine_config.max_model_len
        if asked is not None and asked > config.max_model_len:
            raise ConfigError(f"max_model_len is {asked}; the model was made for at most {config.max_model_len}")
        length = config.max_model_len if asked is None else asked
        platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
        platform = "gpu" if platform in ("gpu", "cuda") else "cpu"
        self.buckets = make_buckets(engine_config, length, platform)
        kv_dtype = cache_dtype(engine_config.kv_cache_dtype, config.dtype, platform)
        if params is not None:
            fused = dict(kv_dtype=kv_dtype, mesh=mesh, implementation=engine_config.implementation)
            rows = fused_rows(engine_config.fused_decode_rows, self.buckets.rows, params, config, **fused)  # type: ignore[arg-type]
            engine_config = dataclasses.replace(engine_config, fused_decode_rows=rows)
        self.num_kv_blocks = _num_kv_blocks(params, config, engine_config, self.buckets, kv_dtype, mesh, sampler)
        self.max_model_len = min(length, self.num_kv_blocks * engine_config.block_size)
        self.config, self.engine_config = config, engine_config
        if asked is not None and self.max_model_len < asked:
            logger.warning(
                "max_model_len is %d, but the KV cache of %d blocks holds %d tokens", asked, self.num_kv_blocks, self.max_model_len
            )
        self._runner: Runner
        if runner is None:
            assert params is not None
            self._runner = ModelRunner(params, config, engine_config, self.buckets, self.num_kv_blocks, mesh, kv_dtype, sampler)
        else:
            self._runner = runner(engine_config, self.buckets, self.num_kv_blocks)
        self._allocator = BlockAllocator(self.num_kv_blocks)
        self._scheduler = Scheduler(
            self._allocator,
            block_size=engine_config.block_size,
            max_num_seqs=engine_config.max_num_seqs,
            max_blocks=self.buckets.widths[-1],
            token_budget=engine_config.token_budget,
            max_prefill_rows=self.buckets.prefill_rows(self.buckets.tokens[-1]),
            window=engine_config.window,
            prefix_caching=engine_config.enable_prefix_caching,
            hasher=hasher,
        )
        self._live: dict[str, _Live] = {}
        self._flights: collections.deque[_Flight] = collections.deque()
        self._out: list[TokenDelta] = []
        self._results: dict[str, RequestResult] = {}
        self._kept: set[str] = set()
        self._ending: set[str] = set()  # ended, but `step` has not said so yet
        self._meter = Meter()
        self._arrivals = itertools.count()
        self._names = itertools.count()
        self._seeds = np.random.default_rng(seed)
        self._num_dispatches = self._table_bytes = self._num_given = 0
        self._num_prefill_tokens = self._num_padded_prefill_tokens = 0
        self._step_s = self._wait_s = 0.0

    # Requests.

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams = SamplingParams(),
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        name: str = "the prompt",
        sample_index: int = 0,
        text: Text | None = None,
    ) -> str:
        """Queue a request.

        Args:
          prompt_token_ids: at least one id.
          sampling_params: how to continue it.
          request_id: unique among the requests in the engine; by default a new number.
          priority: lower ones go first; equal ones in the order in which they came.
          cache_salt: only requests with the same salt share blocks.
          name: what messages call the prompt.
          sample_index: which of the samples of these parameters to draw: `SamplingParams.n` and `best_of` are for who calls.
          text: makes text of the tokens, and may end the request; needed for `SamplingParams.stop`.

        Returns:
          the request's id.

        Raises:
          RequestError: an unusable argument. Other requests do not notice.
        """
        if request_id is None:
            request_id = next(i for i in map(str, self._names) if i not in self._live and i not in self._ending)
        if not isinstance(request_id, str) or not request_id:
            raise RequestError(f"request_id is {request_id!r}; it must be a text")
        if request_id in self._live or request_id in self._ending:
            raise RequestError(f"request_id {request_id!r} is in use by a request that has not finished")
        if not isinstance(cache_salt, str):
            raise RequestError(f"cache_salt is {cache_salt!r}; it must be a text")
        request = self.check_request(prompt_token_ids, sampling_params, name=name, sample_index=sample_index)
        if text is None and request.params.stop:
            raise RequestError(f"stop is {list(request.params.stop)}; an engine sees tokens alone: give it a text, or use LLM")
        if request.params.seed is None:
            request = dataclasses.replace(request, params=dataclasses.replace(request.params, seed=self.draw_seed()))
        logprobs = request.params.logprobs
        row = TokenSequence(request_id, request, next(self._arrivals), integer("priority", priority), cache_salt)
        self._live[request_id] = _Live(
            row,
            RequestTimes(time.perf_counter()),
            frozenset(request.stop_token_ids),
            len(request.stop_token_ids) > self.engine_config.max_device_stop_ids,
            None if logprobs is None else [],
            None if request.params.prompt_logprobs is None else [None] * len(request.prompt_token_ids),
            text,
            [],
        )
        self._scheduler.add(row)
        return request_id

    def draw_seed(self) -> int:
        """A seed for a request that names none."""
        return int(self._seeds.integers(2**32))

    def check_request(
        self, prompt_token_ids: Sequence[int], sampling_params: SamplingParams, *, name: str = "the prompt", sample_index: int = 0
    ) -> Request:
        """What `add_request` checks of a prompt and its parameters, without queueing it.

        Raises:
          RequestError: as `add_request`.
        """
        if not isinstance(sampling_params, SamplingParams):
            raise RequestError(f"sampling_params is {sampling_params!r}; it must be a SamplingParams")
        settings = self.engine_config
        for what in ("logprobs", "prompt_logprobs"):
            asked = getattr(sampling_params, what)
            if asked is not None and asked > settings.max_logprobs:
                raise RequestError(f"{what} is {asked}; this engine reports at most max_logprobs = {settings.max_logprobs}")
            if asked is not None and asked > self.vocab_size:
                raise RequestError(f"{what} is {asked}; the vocabulary has {self.vocab_size} tokens")
        if sampling_params.bad_words:
            raise RequestError("bad_words are texts and an engine sees tokens alone: use bad_words_token_ids, or LLM")
        if not 0 <= integer("sample_index", sample_index) < 2**31:
            raise RequestError(f"sample_index is {sample_index}; it must be 0 or more")
        request = make_request(
            prompt_token_ids,
            sampling_params,
            eos_ids=self.eos_token_ids,
            vocab_size=self.config.vocab_size,
            max_model_len=self.max_model_len,
            default_seed=None,
            name=name,
            limit=self._limit(),
            sample_index=sample_index,
        )
        longest = max((len(word) for word in request.bad_words), default=0)
        if longest > settings.max_bad_word_tokens:
            raise RequestError(
                f"a bad word has {longest} tokens; this engine takes at most max_bad_word_tokens = {settings.max_bad_word_tokens}"
            )
        if len(request.bad_words) > settings.max_bad_words:
            raise RequestError(
                f"there are {len(request.bad_words)} spellings of bad words of several tokens; this engine takes at most "
                f"max_bad_words = {settings.max_bad_words}"
            )
        if sampling_params.min_tokens and len(request.stop_token_ids) > settings.max_device_stop_ids:
            raise RequestError(
                f"min_tokens is {sampling_params.min_tokens} with {len(request.stop_token_ids)} end tokens; this engine can "
                f"hold back at most max_device_stop_ids = {settings.max_device_stop_ids} of them"
            )
        return request

    def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests, wherever they are; their blocks are free at once. An unknown or finished one is no error."""
        if not isinstance(request_id, str | Iterable):
            raise RequestError(f"request_id is {request_id!r}; it must be a text or several")
        for one in [request_id] if isinstance(request_id, str) else list(request_id):
            live = self._live.get(one)
            if live is not None:
                self._finish(live, "abort", [])

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do or to give."""
        return bool(self._live or self._flights or self._out)

    # Steps.

    def step(self) -> list[TokenDelta]:
        """Dispatch the next step and take the tokens of the one before.

        Returns:
          what requests got, in no particular order; empty where the device has only just begun. A step that fails ends its
          requests with the reason ``"error"``; nothing is raised.
        """
        started = time.perf_counter()
        try:
            return self._one_step()
        finally:
            self._step_s += time.perf_counter() - started

    def _one_step(self) -> list[TokenDelta]:
        batch = self._scheduler.schedule(drained=not self._flights)
        if batch is None and self._flights:
            self._take()
            batch = self._scheduler.schedule(drained=not self._flights)
        if batch is not None:
            self._dispatch(batch)
        while self._flights and (batch is None or len(self._flights) >= _MAX_IN_FLIGHT):
            self._take()
        out, self._out = self._out, []
        self._ending.clear()
        return out

    def give_back(self, deltas: Sequence[TokenDelta]) -> None:
        """Deltas that `step` gave to somebody who is not meant: the next `step` gives them again, first."""
        self._out = [*deltas, *self._out]
        self._ending |= {delta.request_id for delta in deltas if delta.finish_reason is not None}

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
        *,
        priorities: Sequence[int] | None = None,
        cache_salts: Sequence[str] | None = None,
        sample_indices: Sequence[int] | None = None,
        texts: Sequence[Text | None] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestResult]:
        """Answer all prompts, those of other requests in the engine going on beside them.

        Args:
          prompts: lists of token ids.
          sampling_params: for all prompts, or one for each.
          priorities, cache_salts, sample_indices, texts: one for each prompt; see `add_request`.
          use_tqdm: show a progress bar on standard error.

        Returns:
          one `RequestResult` a prompt, in order. Where a step failed, its requests have the reason ``"error"``.

        Raises:
          RequestError: an unusable prompt or parameter. None of the prompts is queued then.
        """
        for what, several in (
            ("sampling_params", sampling_params),
            ("priorities", priorities),
            ("cache_salts", cache_salts),
            ("sample_indices", sample_indices),
            ("texts", texts),
        ):
            if not isinstance(several, SamplingParams | Sequence) and (several is not None or what == "sampling_params"):
                raise RequestError(f"{what} is {several!r}; it must be one for each prompt")
        each = [sampling_params] * len(prompts) if isinstance(sampling_params, SamplingParams) else list(sampling_params)
        if len(each) != len(prompts):
            raise RequestError(f"sampling_params has {len(each)} entries for {len(prompts)} prompts")
        ranks = [0] * len(prompts) if priorities is None else list(priorities)
        salts = [""] * len(prompts) if cache_salts is None else list(cache_salts)
        samples = [0] * len(prompts) if sample_indices is None else list(sample_indices)
        of_texts: list[Text | None] = [None] * len(prompts) if texts is None else list(texts)
        for what, given in (("priorities", ranks), ("cache_salts", salts), ("sample_indices", samples), ("texts", of_texts)):
            if len(given) != len(prompts):
                raise RequestError(f"{what} has {len(given)} entries for {len(prompts)} prompts")
        ids: list[str] = []
        others: list[TokenDelta] = []
        try:
            for index, (prompt, params) in enumerate(zip(prompts, each, strict=True)):
                name = f"prompts[{index}]" if len(prompts) > 1 else "the prompt"
                if sample_indices is None and params.num_samples > 1:
                    raise RequestError(
                        f"{params.num_samples} samples of {name} are asked for; an engine draws one: use LLM, or sample_indices"
                    )
                ids.append(
                    self.add_request(
                        prompt,
                        params,
                        priority=ranks[index],
                        cache_salt=salts[index],
                        name=name,
                        sample_index=samples[index],
                        text=of_texts[index],
                    )
                )
            mine = set(ids)
            self._kept |= mine
            left = len(mine)
            with tqdm(total=len(ids), desc="Generating", unit="prompt", disable=not use_tqdm) as bar:
                while left:
                    for delta in self.step():
                        if delta.request_id not in mine:
                            others.append(delta)
                        elif delta.finish_reason is not None:
                            left -= 1
                            bar.update()
            return [self._results[i] for i in ids]
        finally:
            self.abort(ids)  # of an interrupted call; those that finished are gone
            mine = set(ids)
            self._kept -= mine
            self._out = [delta for delta in self._out if delta.request_id not in mine]
            self._ending -= mine
            self.give_back(others)
            for one in ids:
                self._results.pop(one, None)

    def warmup(self, *, cache_dir: str | Path | None = None, use_tqdm: bool = True) -> None:
        """Compile every step that the engine may run, so that no request waits for it.

        Compiled steps are kept in JAX's persistent cache, however quick they were to compile: the next start reads them from there.

        Args:
          cache_dir: folder of that cache. By default what JAX is set to (``jax_compilation_cache_dir``), and where it is set to nothing,
            ``xla`` in pagedjax's cache folder (``$PAGEDJAX_CACHE``, else ``~/.cache/pagedjax``). JAX stays set to it.
          use_tqdm: show a progress bar on standard error.
        """
        with tqdm(total=self.buckets.num_executables, desc="Compiling", unit="step", disable=not use_tqdm) as bar:
            for name in self._runner.warmup(_compilation_cache(cache_dir)):
                logger.debug("compiled %s", name)
                bar.update()

    def update_params(self, params: Params) -> None:
        """Go on with other weights of the same shapes; nothing is copied.

        Requests in flight keep the tokens that they have given out and are computed again under the new weights, and blocks of the old ones
        are never found again.

        Raises:
          ConfigError: other names, shapes or dtypes. Nothing has changed then.
        """
        while self._flights:
            self._take()
        self._runner.update_params(params)
        self._scheduler.preempt_all()
        self._scheduler.new_weights()

    def stats(self) -> EngineStats:
        """What the engine holds now and has done so far."""
        scheduler, allocator = self._scheduler, self._allocator
        counts = scheduler.stats
        now = time.perf_counter()
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=scheduler.num_waiting,
            num_preempted=scheduler.num_preempted,
            num_preemptions=counts.num_preemptions,
            num_finished=counts.num_finished,
            num_free_blocks=allocator.num_free,
            num_used_blocks=allocator.num_used,
            num_cached_blocks=allocator.num_cached,
            prefix_hit_rate=counts.num_cached_tokens / counts.num_prompt_tokens if counts.num_prompt_tokens else 0.0,
            num_prompt_tokens=counts.num_prompt_tokens,
            num_cached_tokens=counts.num_cached_tokens,
            num_generated_tokens=self._meter.num_generated_tokens,
            tokens_per_s=self._meter.tokens_per_s(now),
            time_to_first_token_s=self._meter.time_to_first_token_s(),
            time_per_token_s=self._meter.time_per_token_s(),
            num_dispatches=self._num_dispatches,
            num_mixed_steps=counts.num_mixed_steps,
            num_windows=counts.num_windows,
            num_compilations=self._runner.num_compilations,
            table_bytes=self._table_bytes,
            step_s=self._step_s,
            wait_s=self._wait_s,
            num_prefill_tokens=self._num_prefill_tokens,
            num_padded_prefill_tokens=self._num_padded_prefill_tokens,
        )

    def snapshot(self) -> Snapshot:
        """The state of every block and of every unfinished request. Its cost grows with both; for numbers alone there is `stats`."""
        return Snapshot(
            blocks=("null", *(self._block_state(i) for i in range(1, self.num_kv_blocks + 1))),
            requests=tuple(
                RequestView(
                    request_id=row.request_id,
                    status=row.status,
                    num_prompt_tokens=len(row.request.prompt_token_ids),
                    num_new_tokens=row.num_new_tokens,
                    max_new_tokens=row.request.max_new_tokens,
                    num_computed_tokens=row.num_computed_tokens,
                    num_cached_tokens=row.num_cached_tokens,
                    num_preemptions=row.num_preemptions,
                    block_ids=tuple(row.block_ids),
                )
                for row in (live.row for live in self._live.values())
            ),
            stats=self.stats(),
        )

    def _block_state(self, block_id: int) -> BlockState:
        count = self._allocator.reference_count(block_id)
        if count:
            return "shared" if count > 1 else "used"
        return "cached" if self._allocator.is_cached(block_id) else "free"

    def _limit(self) -> str:
        """What `max_model_len` comes from, for a message."""
        cells = self.num_kv_blocks * self.engine_config.block_size
        if self.max_model_len < cells:
            return f"max_model_len {self.max_model_len}"
        return f"a KV cache of {self.num_kv_blocks} blocks of {self.engine_config.block_size} tokens"

    def _dispatch(self, batch: ScheduledBatch) -> None:
        rows = (*batch.decodes, *(chunk.sequence for chunk in batch.prefills))
        report = any(row.request.params.logprobs is not None for row in rows)
        settings = self.engine_config
        try:
            inputs = engine_inputs(
                batch,
                self._scheduler.tables,
                self.buckets,
                block_size=settings.block_size,
                window=settings.window,
                num_stops=settings.max_device_stop_ids,
            )
            window = inputs if isinstance(inputs, WindowInputs) else inputs.decode
            for chunk in batch.prefills:
                if chunk.is_last:
                    self._set_tables(chunk.sequence)
            prompts: tuple[range, ...] = ()
            if not isinstance(inputs, WindowInputs) and inputs.prompt is not None:
                prompts = tuple(prompt_range(chunk) for chunk in batch.prefills)
            report = report or bool(prompts)
            handle = self._runner.dispatch(inputs, report=report)
            self._flights.append(_Flight(batch, handle, None if window is inputs else len(window.state_ids), report, prompts))
        except BaseException as error:  # (whatever the device reports: its requests fail, not the engine)
            # Tokens of the steps before are sound, and some of these requests may end with them.
            while self._flights:
                self._take()
            self._fail(batch, error)
            if not isinstance(error, Exception):
                raise  # interrupted: the step counts as failed, as nobody knows how far it came
            return
        self._num_dispatches += 1
        self._table_bytes += window.state_ids.nbytes + window.block_tables.nbytes
        if not isinstance(inputs, WindowInputs):
            self._table_bytes += inputs.prefill.prefill_block_tables.nbytes
            self._num_prefill_tokens += sum(chunk.query_len for chunk in batch.prefills)
            self._num_padded_prefill_tokens += len(inputs.prefill.token_ids) if batch.prefills else 0

    def _set_tables(self, row: TokenSequence) -> None:
        """Where a request has tables, give them to the row that it is about to start in."""
        settings = self.engine_config
        words = settings.max_bad_words, settings.max_bad_word_tokens
        tables = table_row(row.request, row.new_token_ids, self.config.vocab_size, *words)
        if tables is not None:
            self._runner.set_tables(row.state_id, tables)
            self._num_dispatches += 1

    def _take(self) -> None:
        """Bring the tokens of the oldest dispatch to their requests."""
        flight = self._flights[0]  # and it stays there when the wait is interrupted
        started = time.perf_counter()
        try:
            sampled = self._runner.fetch(flight.handle, report=flight.report)
        except Exception as error:  # noqa: BLE001 (a step may fail while it runs, and says so only now)
            self._flights.popleft()
            self._fail(flight.batch, error)
            return
        finally:
            self._wait_s += time.perf_counter() - started
        try:
            self._flights.popleft()
            self._give_all(flight, sampled)
        except BaseException as error:  # interrupted: nobody knows who got their tokens and who did not
            if self._flights and self._flights[0] is flight:
                self._flights.popleft()
            self._fail(flight.batch, error)
            raise

    def _give_all(self, flight: _Flight, sampled: Sampled) -> None:
        batch, now = flight.batch, time.perf_counter()
        before = self._num_given
        if flight.num_decode_rows is None:
            token = sampled.token
            counts = (token >= 0).sum(axis=0).tolist()
            columns = token.T.tolist()
            for index, (row, expected) in enumerate(zip(batch.decodes, batch.num_tokens, strict=True)):
                self._give(row, expected, columns[index][: counts[index]], now, sampled if flight.report else None, index)
            self._meter.tokens(now, self._num_given - before)
            return
        if flight.prompts:
            self._give_prompts(flight, sampled)
            sampled = sampled._replace(prompt=None)
        tokens = sampled.token.tolist()
        whole = jax.tree.map(lambda leaf: leaf[None], sampled) if flight.report else None
        places = [(row, i) for i, row in enumerate(batch.decodes)]
        places += [(chunk.sequence, flight.num_decode_rows + i) for i, chunk in enumerate(batch.prefills) if chunk.is_last]
        for row, index in places:
            self._give(row, 1, tokens[index : index + 1] if tokens[index] >= 0 else [], now, whole, index)
        self._meter.tokens(now, self._num_given - before)

    def _give_prompts(self, flight: _Flight, sampled: Sampled) -> None:
        """Log-probabilities of prompt tokens, in the order of `batch.prompt_inputs`."""
        assert sampled.prompt is not None
        reported = jax.tree.map(lambda leaf: leaf[None], sampled.prompt)
        at = 0
        for chunk, positions in zip(flight.batch.prefills, flight.prompts, strict=True):
            row = chunk.sequence
            live = self._live.get(row.request_id)
            if live is not None and live.row is row and live.prompt_logprobs is not None:
                num_top = row.request.params.prompt_logprobs or 0
                for i, position in enumerate(positions, at):
                    live.prompt_logprobs[position] = token_logprobs(reported, 0, i, num_top)
                if positions and positions[-1] == len(live.prompt_logprobs) - 1:
                    row.wants_prompt_logprobs = False
            at += len(positions)

    def _give(self, row: TokenSequence, expected: int, token_ids: list[int], now: float, sampled: Sampled | None, index: int) -> None:
        """Tokens for one row of a dispatch; it may have been aborted meanwhile."""
        live = self._live.get(row.request_id)
        if live is None or live.row is not row:
            return
        if live.host_stops:
            end = next((i for i, token in enumerate(token_ids) if token in live.stops), None)
            token_ids = token_ids if end is None else token_ids[: end + 1]
        piece = None
        if live.text is not None:
            token_ids, piece = self._read(live, token_ids)
            live.pieces.append(piece)
        self._scheduler.update(row, expected, token_ids)
        if not token_ids:
            # The device ends a row for the same reasons as the host, whose last tokens came with an earlier dispatch.
            self._finish(live, "error", [], None, "the device ended this request, and the host did not see why")
            return
        prompt_logprobs = None
        if live.times.first_token_s is None:
            live.times.first_token_s = now
            prompt_logprobs = live.prompt_logprobs
        live.times.finished_s = now
        self._num_given += len(token_ids)
        logprobs = None
        if live.logprobs is not None:
            assert sampled is not None
            num_top = row.request.params.logprobs or 0
            logprobs = [token_logprobs(sampled, i, index, num_top) for i in range(len(token_ids))]
            live.logprobs.extend(logprobs)
        if live.text is not None and live.text.stopped is not None:
            self._finish(live, "stop", token_ids, logprobs, stop_reason=live.text.stopped, prompt_logprobs=prompt_logprobs)
        elif token_ids[-1] in live.stops:
            named = token_ids[-1] in row.request.params.stop_token_ids
            self._finish(live, "stop", token_ids, logprobs, stop_reason=token_ids[-1] if named else None, prompt_logprobs=prompt_logprobs)
        elif row.num_new_tokens >= row.request.max_new_tokens:
            self._finish(live, "length", token_ids, logprobs, prompt_logprobs=prompt_logprobs)
        else:
            known = dict(num_cached_tokens=row.num_cached_tokens, prompt_logprobs=prompt_logprobs)
            self._out.append(TokenDelta(row.request_id, token_ids, logprobs, None, text=piece, **known))  # type: ignore[arg-type]

    def _read(self, live: _Live, token_ids: list[int]) -> tuple[list[int], str]:
        """Tokens as text: those up to the end of the answer, and the text that became certain."""
        assert live.text is not None
        text, pieces, params = live.text, [], live.row.request.params
        for i, token in enumerate(token_ids):
            # An end token ends the answer and says nothing in it, unless what ends it is asked for.
            if token not in live.stops or params.include_stop_str_in_output:
                pieces.append(text.step(token))
            if text.stopped is not None:
                return token_ids[: i + 1], "".join(pieces)
        ends = bool(token_ids) and (
            token_ids[-1] in live.stops or live.row.num_new_tokens + len(token_ids) >= live.row.request.max_new_tokens
        )
        if ends:
            pieces.append(text.finish())
        return token_ids, "".join(pieces)

    def _finish(
        self,
        live: _Live,
        reason: FinishReason,
        token_ids: list[int],
        logprobs: list[TokenLogprobs] | None = None,
        error: str | None = None,
        stop_reason: int | str | None = None,
        prompt_logprobs: list[TokenLogprobs | None] | None = None,
    ) -> None:
        row, times = live.row, live.times
        if live.text is not None and reason in ("abort", "error"):
            live.pieces.append(live.text.finish())
        self._scheduler.finish(row)
        del self._live[row.request_id]
        self._ending.add(row.request_id)
        self._meter.finished(times, row.num_new_tokens)
        shown = live.pieces[-1] if live.text is not None and live.pieces else None
        self._out.append(
            TokenDelta(
                row.request_id,
                token_ids,
                logprobs if live.logprobs is not None else None,
                reason,
                error,
                shown,
                stop_reason,
                row.num_cached_tokens,
                prompt_logprobs,
            )
        )
        first = times.time_to_first_token()
        decode = 0.0 if times.first_token_s is None or times.finished_s is None else times.finished_s - times.first_token_s
        if row.request_id in self._kept:
            self._results[row.request_id] = RequestResult(
                request_id=row.request_id,
                prompt_token_ids=list(row.request.prompt_token_ids),
                token_ids=row.new_token_ids,
                finish_reason=reason,
                logprobs=live.logprobs,
                num_cached_tokens=row.num_cached_tokens or 0,
                num_preemptions=row.num_preemptions,
                seed=row.request.params.seed or 0,
                prefill_s=first,
                decode_s=decode,
                error=error,
                text=None if live.text is None else "".join(live.pieces),
                stop_reason=stop_reason,
                prompt_logprobs=None if row.wants_prompt_logprobs else live.prompt_logprobs,
            )
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug(
                "request_id=%s reason=%s prompt_tokens=%d cached_tokens=%d new_tokens=%d preemptions=%d first_token_s=%s decode_s=%.4f",
                row.request_id,
                reason,
                len(row.request.prompt_token_ids),
                row.num_cached_tokens or 0,
                row.num_new_tokens,
                row.num_preemptions,
                "none" if first is None else f"{first:.4f}",
                decode,
            )

    def _fail(self, batch: ScheduledBatch, error: BaseException) -> None:
        """End the requests of a failed step, and make the rest able to go on."""
        message = f"a step failed: {type(error).__name__}: {error}"
        logger.error("%s", message, exc_info=error)
        for row in (*batch.decodes, *(chunk.sequence for chunk in batch.prefills)):
            live = self._live.get(row.request_id)
            if live is not None and live.row is row:
                self._finish(live, "error", [], None, message)
        # Blocks that this step was to fill may have been made known already.
        self._allocator.forget_cached()
        while self._flights:
            self._take()
        if self._runner.recover():
            self._scheduler.preempt_all()
            self._allocator.forget_cached()


def _compilation_cache(cache_dir: str | Path | None = None) -> Path:
    """The folder where compiled steps are kept."""
    return Path(cache_dir or jax.config.jax_compilation_cache_dir or cache_folder() / "xla")  # type: ignore[attr-defined]


def token_logprobs(sampled: Sampled, step: int, row: int, num_top: int) -> TokenLogprobs:
    """What ``sampled``, leaves [W, B, ...], says of one token."""
    assert sampled.logprob is not None and sampled.rank is not None and sampled.top_ids is not None and sampled.top_logprobs is not None
    return make_token_logprobs(
        float(sampled.logprob[step, row]),
        int(sampled.rank[step, row]),
        sampled.top_ids[step, row, :num_top].tolist(),
        sampled.top_logprobs[step, row, :num_top].tolist(),
    )


def _num_kv_blocks(
    params: Params | None,
    config: ModelConfig,
    settings: EngineConfig,
    buckets: Buckets,
    kv_dtype: str,
    mesh: Mesh | None,
    sampler: Sampler,
) -> int:
    """Blocks that the settings ask for, or that fit."""
    shards = 1 if mesh is None else mesh.size
    block_bytes = kv_block_bytes(config, settings.block_size, kv_dtype)
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if settings.num_kv_blocks is not None:
        # The pools are made by the first step; what can't be is said now.
        asked_bytes = (settings.num_kv_blocks + 1) * block_bytes // shards
        if stats and params is not None and asked_bytes > stats["bytes_limit"] - stats["bytes_in_use"]:
            raise ConfigError(
                f"num_kv_blocks is {settings.num_kv_blocks}; with the null block they take {asked_bytes} bytes, and of JAX's "
                f"{stats['bytes_limit']} bytes of this device {stats['bytes_in_use']} are in use"
            )
        return settings.num_kv_blocks
    most = settings.max_num_seqs * buckets.widths[-1]  # all that the rows can fill; more would only keep prefixes
    if settings.kv_cache_bytes is not None or not stats or params is None:
        asked = settings.kv_cache_bytes
        num_blocks = (CPU_CACHE_BYTES if asked is None else asked) // block_bytes - 1  # one is the null block
        if num_blocks < 1:
            raise ConfigError(
                f"kv_cache_bytes is {asked or CPU_CACHE_BYTES}; two blocks of {settings.block_size} tokens, one of them the null block, "
                f"take {2 * block_bytes} bytes"
            )
        if asked is None:
            num_blocks = min(num_blocks, most)
        return num_blocks
    weights = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
    memory = device_memory(stats)
    if memory.total_bytes * settings.gpu_memory_utilization > memory.limit_bytes:
        logger.warning(
            "gpu_memory_utilization is %g, but JAX keeps to %.2f GiB of this GPU's %.2f: set XLA_CLIENT_MEM_FRACTION before JAX starts",
            settings.gpu_memory_utilization,
            memory.limit_bytes / (1 << 30),
            memory.total_bytes / (1 << 30),
        )
    with keep_every_compilation(_compilation_cache()):
        workspace = workspace_bytes(params, config, settings, buckets, kv_dtype, mesh, sampler)
    return num_blocks_that_fit(
        dataclasses.replace(memory, other_bytes=max(0, stats["bytes_in_use"] - weights)),
        utilization=settings.gpu_memory_utilization,
        weight_bytes=weights,
        workspace_bytes=workspace,
        block_bytes=block_bytes // shards,
    )


def device_memory(stats: dict[str, int]) -> DeviceMemory:
    """From JAX's memory statistics of a GPU. JAX knows its own limit only: the total is that limit over the fraction that was asked for."""
    limit = stats["bytes_limit"]
    return DeviceMemory(total_bytes=int(limit / xla_memory_fraction()), limit_bytes=limit)


def xla_memory_fraction() -> float:
    """The share of a GPU's memory that JAX takes: ``XLA_CLIENT_MEM_FRACTION``, by default three quarters."""
    import os

    text = os.environ.get("XLA_CLIENT_MEM_FRACTION") or os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION") or "0.75"
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1:
        raise ConfigError(f"XLA_CLIENT_MEM_FRACTION is {text!r}; it must be above 0 and at most 1")
    return value
