"""The device's side of an engine: weights, cache and row state, and the compiled steps over them.

A dispatch returns at once; its tokens are fetched later. Cache and state are donated from one dispatch to the next, so the device runs them
in the order in which they were dispatched.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from pagedjax.config import ModelConfig
from pagedjax.engine_config import Buckets, EngineConfig
from pagedjax.engine_step import EngineState, decode_window, make_engine_state, mixed_step, set_tables
from pagedjax.errors import ConfigError
from pagedjax.inputs import MixedInputs, PromptInputs, StepInputs, TableRow, WindowInputs, neutral_sampling
from pagedjax.kv_cache import KVCache, make_cache
from pagedjax.params import MESH_AXIS, Params
from pagedjax.sampling import Sampled, Sampler


class Runner(Protocol):
    """What an `Engine` needs of a device; tests pass one without a transformer in it."""

    num_compilations: int

    def dispatch(self, inputs: WindowInputs | MixedInputs, *, report: bool) -> Any:
        """Start a step and return a handle for `fetch`."""

    def fetch(self, handle: Any, *, report: bool) -> Sampled:
        """Wait for a step and bring what it sampled to the host: leaves [B + C, ...] of a mixed step, [W, B, ...] of a window."""

    def set_tables(self, state_id: int, row: TableRow) -> None:
        """Give a row of the state its `LogitTables`, before the step that starts a request there."""

    def recover(self) -> bool:
        """After a failed step: make the device usable again, and say whether everything in the cache was lost."""

    def update_params(self, params: Any) -> None:
        """Use other weights from the next dispatch on."""

    def warmup(self, cache_dir: Path) -> Iterator[str]:
        """Compile every step, one at a time, and name each when it is done. What was compiled is kept in `cache_dir`."""


_COMPILERS = os.cpu_count() or 1


class _Traces:
    """Counts traces of the jitted steps: one a compilation."""

    def __init__(self) -> None:
        self.count = 0

    def of(self, step: Callable[..., Any], **static: Any) -> Callable[..., Any]:
        @functools.wraps(step)
        def traced(*args: Any) -> Any:
            self.count += 1
            return step(*args, **static)

        return traced


_traces = _Traces()


class Steps(NamedTuple):
    """The jitted steps of an engine: functions of (params, cache, state, inputs), and `engine_step.set_tables`."""

    window: Any
    mixed: Any
    set_tables: Any


@functools.cache  # jitted once for all engines, so that two engines of the same shapes share what was compiled
def jitted_steps(
    config: ModelConfig,
    mesh: Mesh | None,
    num_logprobs: int,
    implementation: str | None,
    num_steps: int,
    sampler: Sampler,
    fused_rows: int = 0,
) -> Steps:
    """The steps for these settings; cache and state are donated."""
    static: dict[str, Any] = dict(config=config, mesh=mesh, num_logprobs=num_logprobs, implementation=implementation, sampler=sampler)
    return Steps(
        jax.jit(
            _traces.of(decode_window, **static, num_steps=num_steps, window=look_every(num_steps), fused_rows=fused_rows),
            donate_argnums=(1, 2),
        ),
        jax.jit(_traces.of(mixed_step, **static), donate_argnums=(1, 2)),
        jax.jit(_traces.of(set_tables), donate_argnums=(0,)),
    )


class ModelRunner:
    """A transformer on a device.

    Args:
      params: the weights.
      config: the model.
      engine_config: the engine's settings.
      buckets: the padded sizes.
      num_blocks: usable blocks of the cache.
      mesh: shards weights and pools over KV heads.
      kv_dtype: of the cache; by default the model's.
      sampler: what is the same for all requests.

    Attributes:
      num_compilations: steps compiled for this engine.
    """

    def __init__(
        self,
        params: Params,
        config: ModelConfig,
        engine_config: EngineConfig,
        buckets: Buckets,
        num_blocks: int,
        mesh: Mesh | None = None,
        kv_dtype: str | None = None,
        sampler: Sampler = Sampler(),
    ) -> None:
        self.num_compilations = 0
        self._params, self._config, self._engine_config = params, config, engine_config
        self._buckets, self._num_blocks, self._mesh, self._kv_dtype = buckets, num_blocks, mesh, kv_dtype
        device = next(iter(jax.tree.leaves(params)[0].devices()))
        self._place: jax.sharding.Sharding = SingleDeviceSharding(device) if mesh is None else NamedSharding(mesh, PartitionSpec())
        self._steps = _steps_of(config, engine_config, mesh, sampler)
        self._compiled: dict[Hashable, Any] = {}
        self._pools: KVCache | None = None
        self._state: EngineState = self._make_state()

    def dispatch(self, inputs: WindowInputs | MixedInputs, *, report: bool) -> Sampled:
        """See `Runner`. The tokens start on their way to the host as soon as they are there."""
        before = _traces.count
        sampled = self._run(inputs)
        self.num_compilations += _traces.count - before
        for leaf in jax.tree.leaves(sampled if report else sampled.token):
            leaf.copy_to_host_async()
        return sampled

    def set_tables(self, state_id: int, row: TableRow) -> None:
        """See `Runner`."""
        before = _traces.count
        step = self._compiled.get("set_tables", self._steps.set_tables)
        self._state = step(self._state, np.asarray(state_id, np.int32), row)
        self.num_compilations += _traces.count - before

    def fetch(self, handle: Sampled, *, report: bool) -> Sampled:
        """See `Runner`."""
        if not report:
            handle = Sampled(handle.token)
        return jax.tree.map(np.asarray, handle)

    def recover(self) -> bool:
        """See `Runner`. A step that fails after it was given the cache takes it along."""
        arrays = jax.tree.leaves((self._pools, self._state))
        if not any(leaf.is_deleted() for leaf in arrays) and _is_sound(arrays):
            return False
        del arrays
        # Freed first: there is no room for two.
        self._pools = self._state = None  # type: ignore[assignment]
        self._state = self._make_state()
        return True

    def update_params(self, params: Params) -> None:
        """See `Runner`.

        Raises:
          ConfigError: other names, shapes or dtypes than before.
        """
        if str(jax.tree.structure(self._params)) != str(jax.tree.structure(params)):
            raise ConfigError("update_params: these are weights of another architecture")
        for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(self._params), jax.tree.leaves(params), strict=True):
            if (a.shape, a.dtype) != (b.shape, b.dtype):
                name = jax.tree_util.keystr(path).lstrip(".")
                raise ConfigError(f"update_params: {name} is {b.dtype}{list(b.shape)}; the engine runs with {a.dtype}{list(a.shape)}")
        self._params = params

    def warmup(self, cache_dir: Path) -> Iterator[str]:
        """See `Runner`. Each step then runs once without rows, which writes nothing: a device loads a step when it first runs."""
        before = _traces.count
        make = functools.partial(make_cache, self._config, self._num_blocks, self._engine_config.block_size, None, self._kv_dtype)
        cache = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self._cache_sharding), jax.eval_shape(make))
        with keep_every_compilation(cache_dir), concurrent.futures.ThreadPoolExecutor(_COMPILERS) as threads:
            # Tracing holds Python's lock; compiling, and reading what was compiled before, do not.
            started = time.perf_counter()
            jobs = {}
            try:
                state_id, row = np.asarray(self._engine_config.max_num_seqs, np.int32), empty_table_row(self._config, self._engine_config)
                tables = threads.submit(self._steps.set_tables.lower(self._state, state_id, row).compile)
                for name, inputs in warmup_inputs(self._buckets, self._engine_config):
                    step = self._steps.window if isinstance(inputs, WindowInputs) else self._steps.mixed
                    jobs[threads.submit(step.lower(self._params, cache, self._state, inputs).compile)] = name, inputs
                for job in concurrent.futures.as_completed(jobs):
                    name, inputs = jobs[job]
                    self._compiled[_shapes(inputs)] = job.result()
                    yield f"{name} ({time.perf_counter() - started:.1f} s since the start)"
                self._compiled["set_tables"] = tables.result()
            finally:
                threads.shutdown(wait=False, cancel_futures=True)
                self.num_compilations += _traces.count - before
            for _, inputs in jobs.values():
                self._run(inputs)
            self.set_tables(self._engine_config.max_num_seqs, row)
            jax.block_until_ready(self._state)
            yield f"tables of a request, and each step once ({time.perf_counter() - started:.1f} s since the start)"

    def _run(self, inputs: WindowInputs | MixedInputs) -> Sampled:
        step = self._compiled.get(_shapes(inputs))
        if step is None:
            step = self._steps.window if isinstance(inputs, WindowInputs) else self._steps.mixed
        sampled, self._pools, self._state = step(self._params, self._cache, self._state, inputs)
        return sampled

    @property
    def _cache(self) -> KVCache:
        """The pools, made when a step first needs them: while XLA compiles it tries matrix products on the device, and wants room."""
        if self._pools is None:
            self._pools = make_cache(self._config, self._num_blocks, self._engine_config.block_size, self._cache_sharding, self._kv_dtype)
        return self._pools

    @property
    def _cache_sharding(self) -> jax.sharding.Sharding:
        # Committed to a place from the start, as what a step gives back is: a step is compiled for that, too.
        return self._place if self._mesh is None else NamedSharding(self._mesh, PartitionSpec(None, MESH_AXIS))

    def _make_state(self) -> EngineState:
        return jax.device_put(_new_state(self._config, self._engine_config), self._place)


def _new_state(config: ModelConfig, engine_config: EngineConfig) -> EngineState:
    return make_engine_state(
        engine_config.max_num_seqs,
        engine_config.max_device_stop_ids,
        config.vocab_size,
        engine_config.max_bad_words,
        engine_config.max_bad_word_tokens,
    )


def empty_table_row(config: ModelConfig, engine_config: EngineConfig) -> TableRow:
    """Tables that change nothing."""
    words = np.full((engine_config.max_bad_words, engine_config.max_bad_word_tokens), -1, np.int32)
    return TableRow(np.zeros(config.vocab_size, np.float32), np.zeros(config.vocab_size, np.int32), words, words[0, 1:].copy())


def _steps_of(config: ModelConfig, engine_config: EngineConfig, mesh: Mesh | None, sampler: Sampler) -> Steps:
    num_logprobs = min(engine_config.max_logprobs, sampler.vocab_size or config.vocab_size)  # a tiny vocabulary may have fewer tokens
    fused_rows = engine_config.fused_decode_rows or 0  # an engine has made a number of it
    return jitted_steps(config, mesh, num_logprobs, engine_config.implementation, engine_config.window, sampler, fused_rows)


def _shapes(inputs: WindowInputs | MixedInputs) -> Hashable:
    """What tells one compiled step from another."""
    if isinstance(inputs, WindowInputs):
        return inputs.block_tables.shape
    return inputs.decode.block_tables.shape, inputs.prefill.token_ids.shape, inputs.prompt is None


@contextlib.contextmanager
def keep_every_compilation(cache_dir: Path) -> Iterator[None]:
    """JAX's persistent cache by default leaves out what took less than a second to compile; together that is much of a start."""
    jax.config.update("jax_compilation_cache_dir", str(cache_dir))
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, 0)
    try:
        yield
    finally:
        jax.config.update(name, before)


def _is_sound(arrays: list[jax.Array]) -> bool:
    """Whether the arrays really came to be: a step that failed while it ran left arrays that raise when they are waited for."""
    try:
        jax.block_until_ready(arrays)
    except Exception:  # noqa: BLE001 (whatever the device reports; the caller has the error of the step itself)
        return False
    return True


def look_every(window: int) -> int:
    """Steps between two looks at whether every row is done: a look is free on a CPU and a round trip to the host on a GPU."""
    return 1 if jax.default_backend() == "cpu" else window


def warmup_inputs(buckets: Buckets, config: EngineConfig) -> list[tuple[str, WindowInputs | MixedInputs]]:
    """A step without rows of every size, with a name. Largest first: what does not fit fails at once."""
    nobody = config.max_num_seqs
    num_tokens = buckets.tokens[-1]
    largest = _no_chunks(
        buckets.mixed_rows[-1], num_tokens, buckets.prefill_rows(num_tokens), buckets.widths[-1], nobody, config.max_device_stop_ids
    )
    none = np.zeros(num_tokens, np.int32)
    prompt = PromptInputs(np.asarray(0, np.int32), none, none, none)
    steps: list[tuple[str, WindowInputs | MixedInputs]] = [("log-probabilities of prompts", largest._replace(prompt=prompt))]
    for width in reversed(buckets.widths):
        for num_tokens in reversed(buckets.tokens):
            for num_rows in reversed(buckets.mixed_rows):
                name = f"mixed step: {num_rows} rows, {num_tokens} prompt tokens, {width} blocks"
                steps.append(
                    (name, _no_chunks(num_rows, num_tokens, buckets.prefill_rows(num_tokens), width, nobody, config.max_device_stop_ids))
                )
        steps += [
            (f"window: {num_rows} rows, {config.window} steps, {width} blocks", _no_rows(num_rows, width, nobody))
            for num_rows in reversed(buckets.rows)
        ]
    return steps


def _no_rows(num_rows: int, width: int, nobody: int) -> WindowInputs:
    return WindowInputs(np.full(num_rows, nobody, np.int32), np.zeros((num_rows, width), np.int32))


def _no_chunks(num_rows: int, num_tokens: int, num_chunks: int, width: int, nobody: int, num_stops: int) -> MixedInputs:
    def zeros(*shape: int) -> np.ndarray:
        return np.zeros(shape, np.int32)

    prefill = StepInputs(
        token_ids=zeros(num_tokens),
        positions=zeros(num_tokens),
        slot_mapping=zeros(num_tokens),
        decode_block_tables=zeros(0, width),
        decode_context_lens=zeros(0),
        prefill_block_tables=zeros(num_chunks, width),
        prefill_query_start_loc=zeros(num_chunks + 1),
        prefill_context_lens=zeros(num_chunks),
        logit_ids=zeros(num_chunks),
        state_ids=np.full(num_chunks, nobody, np.int32),
    )
    return MixedInputs(_no_rows(num_rows, width, nobody), prefill, neutral_sampling(num_chunks, num_stops))


def workspace_bytes(
    params: Params,
    config: ModelConfig,
    engine_config: EngineConfig,
    buckets: Buckets,
    kv_dtype: str,
    mesh: Mesh | None = None,
    sampler: Sampler = Sampler(),
) -> int:
    """Bytes of the rows' state, of scratch and outputs of the largest mixed step and window, as the compiler reports them, and of what
    compiling another takes: XLA tries its matrix products with operands of their sizes on the device.

    They do not depend on the size of the pool, so the steps are compiled for a small one here, with no array made.
    """

    def spec(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None) if mesh is not None else None)

    def sizes() -> tuple[KVCache, EngineState]:
        return (
            make_cache(config, max(64, buckets.widths[-1]), engine_config.block_size, dtype=kv_dtype),
            _new_state(config, engine_config),
        )

    cache, state = jax.eval_shape(sizes)
    jitted = _steps_of(config, engine_config, mesh, sampler)
    most = 0
    steps = dict(
        warmup_inputs(
            dataclasses.replace(
                buckets, rows=buckets.rows[-1:], mixed_rows=buckets.mixed_rows[-1:], tokens=buckets.tokens[-1:], widths=buckets.widths[-1:]
            ),
            engine_config,
        )
    )
    for inputs in steps.values():
        args = jax.tree.map(spec, (params, cache, state, inputs))
        step = jitted.window if isinstance(inputs, WindowInputs) else jitted.mixed
        analysis = step.lower(*args).compile().memory_analysis()
        if analysis is not None:
            most = max(most, analysis.temp_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes)
    # The largest product's weights and output, and as much again for what is compared with it.
    trial = 2 * max(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
    return most + trial + sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
