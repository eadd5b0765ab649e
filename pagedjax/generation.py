"""`generate()`: token ids in, token ids out. Allocates blocks, prefills, then decodes on the device in one compiled loop.

Every prompt gets all the blocks that it may need before the first step; there is no scheduling here.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pagedjax import step
from pagedjax.allocator import BlockAllocator, blocks_for, total_blocks
from pagedjax.batch import block_tables, bucket, plan_prefill, prefill_inputs, sampling_inputs
from pagedjax.config import ModelConfig
from pagedjax.errors import ConfigError, RequestError
from pagedjax.kv_cache import KVCache, make_cache
from pagedjax.params import MESH_AXIS, Params
from pagedjax.request import FinishReason, Request, SamplingParams, TokenLogprobs, integer, make_request, make_token_logprobs
from pagedjax.sampling import Sampled

_STEPS_BETWEEN_REPORTS = 64
_STATIC = ("config", "mesh", "num_logprobs", "implementation")
_prefill_step = jax.jit(step.prefill_step, static_argnames=_STATIC, donate_argnames=("cache", "state"))
_decode_loop = jax.jit(step.decode_loop, static_argnames=(*_STATIC, "num_steps", "window"), donate_argnames=("cache", "state"))


@dataclasses.dataclass(frozen=True)
class GeneratedRow:
    """One row's new tokens."""

    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[TokenLogprobs] | None


@dataclasses.dataclass(frozen=True)
class GenerateResult:
    """What `generate` returns; every list has one entry a prompt.

    Attributes:
      token_ids: the new tokens, a final end token included.
      lengths: how many new tokens.
      finish_reasons: ``"stop"`` or ``"length"``.
      logprobs: per new token, or ``None`` when not asked for.
      prefill_s: seconds until every prompt's first new token was on the device, compiling included.
      decode_s: seconds of the rest.
    """

    token_ids: list[list[int]]
    lengths: list[int]
    finish_reasons: list[FinishReason]
    logprobs: list[list[TokenLogprobs]] | None
    prefill_s: float
    decode_s: float


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """How a batch runs; none of it changes a token in float32. A setting out of range is a `ConfigError`.

    Attributes:
      block_size: tokens a KV block, a power of two.
      token_budget: the most prompt tokens in a prefill step; longer prompts are cut in chunks.
      window: decode steps between two looks at early exit; ``None`` is 1 on a CPU and 8 elsewhere.
      mesh: shard over KV heads.
      implementation: of the kernels; ``None`` picks the fastest here.
    """

    block_size: int = 16
    token_budget: int = 2048
    window: int | None = None
    mesh: Mesh | None = None
    implementation: str | None = None

    def __post_init__(self) -> None:
        for name in ("block_size", "token_budget", "window"):
            value = getattr(self, name)
            if name == "window" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} is {value!r}; it must be a positive integer")
            if name != "token_budget" and value & (value - 1):
                raise ConfigError(f"{name} is {value}; it must be a power of two")

    def resolved_window(self) -> int:
        """The window in steps."""
        if self.window is not None:
            return self.window
        return 1 if jax.default_backend() == "cpu" else 8


def generate(
    params: Params,
    config: ModelConfig,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int | Sequence[int] = 16,
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    eos_ids: Sequence[int] = (),
    logprobs: int | None = None,
    options: RunOptions = RunOptions(),
) -> GenerateResult:
    """Continue each prompt. The jit-compiled functional interface: ids in, ids out, no tokenizer.

    Args:
      params: the weights.
      config: the model.
      prompts: lists of token ids, of any lengths.
      max_new_tokens: the most new tokens, for all prompts or one number each; cut where ``config.max_model_len`` is reached.
      temperature: 0 is greedy.
      top_k: keep the k likeliest; 0 is off.
      top_p: then keep the likeliest up to this probability; 1 is off.
      seed: with the position, decides every draw; equal prompts in one call draw equally.
      eos_ids: any of these tokens ends a row.
      logprobs: report each new token's log-probability and the likeliest `logprobs` tokens.
      options: how to run it.

    Returns:
      new ids, lengths, finish reasons, log-probabilities and times.

    Raises:
      RequestError: an unusable prompt or parameter; nothing has run then.
      ValueError: the mesh does not divide the model.
      NotImplementedError: a named implementation that does not run here, or not on these shapes.

    Source: a cache of blocks behind a table is Kwon et al. 2023 (arXiv:2309.06180).
    """
    limits = list(max_new_tokens) if isinstance(max_new_tokens, Sequence | np.ndarray) else [max_new_tokens] * len(prompts)
    if len(limits) != len(prompts):
        raise RequestError(f"max_new_tokens has {len(limits)} entries for {len(prompts)} prompts")
    requests = []
    for index, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        if integer("max_new_tokens", limit) < 1:
            raise RequestError(f"max_new_tokens is {limit}; it must be at least 1")
        one = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, max_tokens=limit, logprobs=logprobs)
        requests.append(
            make_request(
                prompt,
                one,
                eos_ids=eos_ids,
                vocab_size=config.vocab_size,
                max_model_len=config.max_model_len,
                default_seed=seed,
                name=f"prompts[{index}]",
            )
        )
    run = Run(params, config, requests, options)
    rows = run.finish()
    return GenerateResult(
        token_ids=[s.token_ids for s in rows],
        lengths=[len(s.token_ids) for s in rows],
        finish_reasons=[s.finish_reason for s in rows],
        logprobs=None if logprobs is None else [s.logprobs or [] for s in rows],
        prefill_s=run.prefill_s,
        decode_s=run.decode_s,
    )


class Run:
    """One batch of requests on its way through the device.

    `finish` decodes in one dispatch; `stream` in short ones, giving tokens out between them. Use one of the two, once.

    Args:
      params, config: the model.
      requests: the batch; all of them together must fit `max_num_blocks`.
      options: how to run it.
      max_num_blocks: the most KV blocks that there is memory for; ``None`` for no limit.
    """

    def __init__(
        self,
        params: Params,
        config: ModelConfig,
        requests: Sequence[Request],
        options: RunOptions = RunOptions(),
        *,
        max_num_blocks: int | None = None,
    ) -> None:
        self.requests = list(requests)
        self.prefill_s = self.decode_s = 0.0
        self.num_finished = 0
        self._params, self._config, self._options, self._max_num_blocks = params, config, options, max_num_blocks
        wanted = [r.params.logprobs for r in requests if r.params.logprobs is not None]
        self._num_logprobs = max(wanted) if wanted else None

    def finish(self, on_progress: Callable[[int], None] | None = None) -> list[GeneratedRow]:
        """Run to the end and return every row's tokens.

        Args:
          on_progress: called with the number of finished rows after every 64 decode steps; without it, decoding is one dispatch.
        """
        if not self.requests:
            return []
        longest = max(r.max_new_tokens for r in self.requests) - 1
        reports = []
        for reported in self._dispatches(longest if on_progress is None else min(longest, _STEPS_BETWEEN_REPORTS)):
            reports.append(reported)
            if on_progress is not None:
                on_progress(self.num_finished)
        return self._rows(reports)

    def stream(self, num_steps: int = 8) -> Iterator[list[list[int]]]:
        """Yield each row's new tokens after the prefill and then after every `num_steps` decode steps."""
        for reported in self._dispatches(num_steps):
            columns = np.asarray(reported.token).T
            yield [[int(t) for t in column if t >= 0] for column in columns[: len(self.requests)]]

    def _dispatches(self, num_steps: int) -> Iterator[Sampled]:
        """Run the batch; yield what was sampled, ``[steps, B, ...]`` on the host, first for the prefill, then a dispatch at a time."""
        requests, options, config = self.requests, self._options, self._config
        window = options.resolved_window()
        num_rows = bucket(len(requests))
        # A bucket may be almost twice what is needed, and memory must not be asked for that is not there.
        num_blocks = bucket(total_blocks((r.max_num_tokens for r in requests), options.block_size))
        allocator = BlockAllocator(num_blocks if self._max_num_blocks is None else min(num_blocks, self._max_num_blocks))
        blocks = [self._allocate(allocator, r) for r in requests]
        width = bucket(max(len(ids) for ids in blocks))
        jitted = dict(config=config, mesh=options.mesh, num_logprobs=self._num_logprobs, implementation=options.implementation)
        cache = self._make_cache(allocator.num_blocks)
        state = step.make_state(num_rows)
        sampling = sampling_inputs(requests, num_rows)
        prompts = [r.prompt_token_ids for r in requests]

        begin = time.perf_counter()
        firsts = []
        for chunks in plan_prefill([len(p) for p in prompts], options.token_budget):
            inputs = prefill_inputs(chunks, prompts, blocks, block_size=options.block_size, table_width=width, num_state_rows=num_rows)
            sampled, cache, state = _prefill_step(self._params, cache, state, inputs, sampling, **jitted)
            firsts.append((inputs.state_ids, sampled))
        first = _place_by_row(jax.device_get(firsts), num_rows)
        self.prefill_s = time.perf_counter() - begin
        stops = [set(r.stop_token_ids) for r in requests]
        left = [0 if first.token[0, row] in stops[row] else r.max_new_tokens - 1 for row, r in enumerate(requests)]
        self.num_finished = left.count(0)
        yield first

        begin = time.perf_counter()
        table = block_tables(blocks, num_rows, width)
        while max(left) > 0:
            sampled, cache, state = _decode_loop(
                self._params, cache, state, table, sampling, num_steps=bucket(num_steps, window), window=window, **jitted
            )
            reported = jax.device_get(sampled)
            self.decode_s += time.perf_counter() - begin
            for row in range(len(requests)):
                tokens = reported.token[:, row]
                count = int((tokens >= 0).sum())
                left[row] = 0 if count and int(tokens[count - 1]) in stops[row] else left[row] - count
            self.num_finished = left.count(0)
            yield reported
            begin = time.perf_counter()
        for ids in blocks:
            allocator.release(ids)

    def _allocate(self, allocator: BlockAllocator, request: Request) -> list[int]:
        # The last token is never fed back, so its keys and values need no cell; one block less only at a border, so keep it plain.
        ids = allocator.allocate(blocks_for(request.max_num_tokens, self._options.block_size))
        assert ids is not None, "the pool was sized for these requests"
        return ids

    def _make_cache(self, num_blocks: int) -> KVCache:
        mesh = self._options.mesh
        sharding = None if mesh is None else NamedSharding(mesh, PartitionSpec(None, MESH_AXIS))
        return make_cache(self._config, num_blocks, self._options.block_size, sharding)

    def _rows(self, reports: list[Sampled]) -> list[GeneratedRow]:
        joined = jax.tree.map(lambda *leaves: np.concatenate(leaves), *reports)
        return [self._row(request, _column(joined, row)) for row, request in enumerate(self.requests)]

    def _row(self, request: Request, column: Sampled) -> GeneratedRow:
        live = [int(i) for i in np.flatnonzero(np.asarray(column.token) >= 0)]
        token_ids = [int(column.token[i]) for i in live]
        reason: FinishReason = "stop" if token_ids[-1] in request.stop_token_ids else "length"
        logprobs = None
        if request.params.logprobs is not None:
            logprobs = [_token_logprobs(column, i, request.params.logprobs) for i in live]
        return GeneratedRow(token_ids, reason, logprobs)


def _column(reported: Sampled, row: int) -> Sampled:
    return jax.tree.map(lambda leaf: leaf[:, row], reported)


def _token_logprobs(column: Sampled, index: int, num_top: int) -> TokenLogprobs:
    assert column.logprob is not None and column.rank is not None and column.top_ids is not None and column.top_logprobs is not None
    ids, values = column.top_ids[index, :num_top].tolist(), column.top_logprobs[index, :num_top].tolist()
    return make_token_logprobs(float(column.logprob[index]), int(column.rank[index]), ids, values)


def _place_by_row(firsts: list[tuple[np.ndarray, Sampled]], num_rows: int) -> Sampled:
    """Bring the prefill's samples, one a logit position, into row order: leaves ``[1, B, ...]``."""

    def place(*leaves: np.ndarray) -> np.ndarray:
        out = np.full((num_rows, *leaves[0].shape[1:]), -1, leaves[0].dtype)
        for (rows, _), leaf in zip(firsts, leaves, strict=True):
            known = rows < num_rows
            out[rows[known]] = leaf[known]
        return out[None]

    return jax.tree.map(place, *(sampled for _, sampled in firsts))
