"""Build the calls that the bench and the tuner measure: data, shuffled tables, and enough of them to defeat the L2 cache."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import paged_attention, paged_prefill_attention, rope_write_kv, skinny_matmul, write_kv
from pallas_kernels.tuning.shapes import DecodeShape, MatmulShape, MixedShape, PrefillShape, RopeShape, WriteShape

_DISTINCT_BYTES = 256 << 20  # several times the L2 of any card
_ERROR_ROWS = 4  # rows that are compared with the reference: a whole batch of long rows would not fit as float32


@dataclass
class Pools:
    """Random pools with as many cells as ``num_blocks`` blocks of 16; shapes of one layout share a pair."""

    num_blocks: int
    _made: dict[tuple[int, int, int, str], tuple[jax.Array, jax.Array]] = field(default_factory=dict)

    def get(self, shape: DecodeShape | PrefillShape) -> tuple[jax.Array, jax.Array]:
        """``(k_pool, v_pool)``, made when first asked for."""
        key = (shape.num_kv_heads, shape.block_size, shape.head_size, shape.dtype)
        if key not in self._made:
            self._made[key] = self.fresh(shape)
        return self._made[key]

    def fresh(self, shape: DecodeShape | PrefillShape | WriteShape | RopeShape) -> tuple[jax.Array, jax.Array]:
        """A pair that nobody else holds: it may be donated."""
        blocks = max(2, self.num_blocks * 16 // shape.block_size)
        size, dtype = (blocks, shape.num_kv_heads, shape.block_size, shape.head_size), jnp.dtype(shape.dtype)
        return jax.random.normal(jax.random.key(1), size, dtype), jax.random.normal(jax.random.key(2), size, dtype)


def tables(num_blocks: int, rows: int, width: int, count: int) -> list[jax.Array]:
    """``count`` tables int32[rows, width] of shuffled blocks; each is free of repetition, different ones share blocks if they must."""
    rng = np.random.default_rng(0)
    need = rows * width
    if need > num_blocks - 1:
        raise ValueError(f"{rows} rows of {width} blocks need {need} blocks, the pool has {num_blocks - 1}")
    out: list[jax.Array] = []
    ids = rng.permutation(np.arange(1, num_blocks))
    at = 0
    for _ in range(count):
        if at + need > len(ids):
            ids, at = rng.permutation(ids), 0
        out.append(jnp.asarray(ids[at : at + need].reshape(rows, width), jnp.int32))
        at += need
    return out


def calls_for(num_bytes: int) -> int:
    """How many calls one measurement takes: enough distinct data to pass through the L2 several times."""
    return max(12, min(200, math.ceil(_DISTINCT_BYTES / num_bytes)))


@dataclass(frozen=True)
class Case:
    """One thing to time: ``call(i)`` enqueues the i-th call."""

    name: str
    implementation: str
    call: Callable[[int], Any]
    calls: int
    bytes_needed: int = 0
    flops: int = 0
    error: Callable[[], float] | None = None
    apart: tuple["Case", ...] = ()  # the ops of this case by themselves


def relative_error(got: jax.Array, want: jax.Array) -> float:
    """``|got - want| / |want|`` in the 2-norm; NaN if anything is not finite."""
    a, b = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def decode_case(shape: DecodeShape, implementation: str, pools: Pools, attend: Callable[..., Any] | None = None) -> Case:
    """``attend`` replaces the op: for a backend's function with settings of one's own."""
    k_pool, v_pool = pools.get(shape)
    calls = calls_for(shape.bytes_needed)
    dtype, lens = jnp.dtype(shape.dtype), jnp.asarray(shape.contexts)
    q = jax.random.normal(jax.random.key(3), (shape.batch, shape.num_heads, shape.head_size), dtype)
    named_op = functools.partial(paged_attention, implementation=implementation)
    run = jax.jit(attend or named_op)
    distinct = tables(k_pool.shape[0], shape.batch, shape.table_width, calls)

    def error() -> float:
        rows = slice(0, min(_ERROR_ROWS, shape.batch))
        args = (k_pool, v_pool, distinct[0][rows], lens[rows])
        want = jax.jit(functools.partial(paged_attention, implementation="reference"))(q[rows], *args)
        return relative_error(run(q, k_pool, v_pool, distinct[0], lens)[rows].astype(jnp.float32), want.astype(jnp.float32))

    return Case(
        shape.name, implementation, lambda i: run(q, k_pool, v_pool, distinct[i % calls], lens), calls, shape.bytes_needed, error=error
    )


def write_case(shape: WriteShape, implementation: str, pools: Pools) -> Case:
    """The pools are donated from call to call."""
    state = list(pools.fresh(shape))
    calls = calls_for(shape.bytes_needed)
    rng, num_slots = np.random.default_rng(0), state[0].shape[0] * shape.block_size
    slots = [
        jnp.asarray(rng.choice(num_slots - shape.block_size, shape.tokens, replace=False) + shape.block_size, jnp.int32) for _ in range(8)
    ]
    size, dtype = (shape.tokens, shape.num_kv_heads, shape.head_size), jnp.dtype(shape.dtype)
    k, v = (jax.random.normal(jax.random.key(i), size, dtype) for i in (4, 5))
    run = jax.jit(functools.partial(write_kv, implementation=implementation), donate_argnums=(0, 1))

    def call(i: int) -> tuple[jax.Array, jax.Array]:
        state[:] = run(state[0], state[1], k, v, slots[i % len(slots)])
        return state[0], state[1]

    def error() -> float:
        k_pool, v_pool = call(0)
        block, offset = slots[0] // shape.block_size, slots[0] % shape.block_size
        return max(
            relative_error(pool[block, :, offset].astype(jnp.float32), x.astype(jnp.float32)) for pool, x in ((k_pool, k), (v_pool, v))
        )

    return Case(shape.name, implementation, call, calls, shape.bytes_needed, error=error)


@dataclass(frozen=True)
class MatmulData:
    """Arguments of ``skinny_matmul``: enough weights that the L2 holds none when its turn comes again."""

    weights: list[jax.Array]
    given: dict[str, jax.Array]  # the other arrays
    options: dict[str, Any]


def matmul_data(shape: MatmulShape) -> MatmulData:
    """Random numbers of a shape."""
    inputs, outputs, gate_up = shape.num_inputs, shape.num_outputs, "gate_up" in shape.parts
    draw = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
    size = (outputs * (2 if gate_up else 1), inputs)
    make = jax.jit(lambda i: draw(jax.random.key(i), size) * jnp.asarray(inputs**-0.5, jnp.bfloat16))
    given = dict(x=draw(jax.random.key(3), (shape.rows, inputs)))
    if "norm" in shape.parts:
        given["sum_squares"] = jnp.square(given["x"].astype(jnp.float32)).sum(-1)[None]
    if "residual" in shape.parts:
        given["residual"] = draw(jax.random.key(4), (shape.rows, outputs))
    if "next_norm" in shape.parts:
        given["next_norm"] = 1 + draw(jax.random.key(5), (outputs,)) / 4
    count = 1 + math.ceil(_DISTINCT_BYTES / shape.bytes_needed)
    return MatmulData([make(i) for i in range(count)], given, dict(gate_up=gate_up, eps=1e-5 if "norm" in shape.parts else 0.0))


def matmul_case(
    shape: MatmulShape, implementation: str, data: MatmulData | None = None, multiply: Callable[..., Any] | None = None
) -> Case:
    """``multiply`` replaces the op: for a backend's function with settings of one's own."""
    data = data or matmul_data(shape)
    weights, given, options = data.weights, data.given, data.options
    op = multiply or functools.partial(skinny_matmul, implementation=implementation)
    run = jax.jit(lambda weight, given: op(weight=weight, **given, **options).out)

    def error() -> float:
        reference = functools.partial(skinny_matmul, implementation="reference", **options)
        want = jax.jit(lambda weight, given: reference(weight=weight, **given).out)(weights[0], given)
        return relative_error(run(weights[0], given).astype(jnp.float32), want.astype(jnp.float32))

    calls, flops = calls_for(shape.bytes_needed), 2 * shape.rows * weights[0].size
    return Case(shape.name, implementation, lambda i: run(weights[i % len(weights)], given), calls, shape.bytes_needed, flops, error)


def rope_case(shape: RopeShape, implementation: str, pools: Pools) -> Case:
    """The pools are donated from call to call."""
    state = list(pools.fresh(shape))
    calls = calls_for(shape.bytes_needed)
    rng, num_slots = np.random.default_rng(0), state[0].shape[0] * shape.block_size
    slots = [
        jnp.asarray(rng.choice(num_slots - shape.block_size, shape.tokens, replace=False) + shape.block_size, jnp.int32) for _ in range(8)
    ]
    dtype, group = jnp.dtype(shape.dtype), shape.num_heads // shape.num_kv_heads
    qkv = jax.random.normal(jax.random.key(4), (shape.tokens, shape.num_kv_heads, group + 2, shape.head_size), dtype)
    angle = jax.random.normal(jax.random.key(5), (shape.tokens, shape.head_size // 2), jnp.float32)
    cos, sin = (jnp.tile(f(angle), (1, 2)).astype(dtype) for f in (jnp.cos, jnp.sin))
    run = jax.jit(functools.partial(rope_write_kv, implementation=implementation), donate_argnums=(3, 4))

    def call(i: int) -> jax.Array:
        q, *state[:] = run(qkv, cos, sin, *state, slots[i % len(slots)])
        return q

    def error() -> float:
        want, *_ = jax.jit(functools.partial(rope_write_kv, implementation="reference"))(qkv, cos, sin, *state, slots[0])
        return relative_error(call(0).astype(jnp.float32), want.astype(jnp.float32))

    return Case(shape.name, implementation, call, calls, shape.bytes_needed, error=error)


def prefill_case(shape: PrefillShape, implementation: str, pools: Pools) -> Case:
    """``implementation="cudnn"`` gathers the context to dense keys and values (if any was cached) and calls cuDNN's attention."""
    k_pool, v_pool = pools.get(shape)
    calls, tokens = 12, shape.rows * shape.new
    q = jax.random.normal(jax.random.key(3), (tokens, shape.num_heads, shape.head_size), jnp.dtype(shape.dtype))
    starts = jnp.arange(shape.rows + 1, dtype=jnp.int32) * shape.new
    lens = jnp.full((shape.rows,), shape.new + shape.cached, jnp.int32)
    distinct = tables(k_pool.shape[0], shape.rows, shape.table_width, calls)
    run = jax.jit(functools.partial(_dense_prefill, shape=shape, gather=shape.cached > 0))
    if implementation == "cudnn" and not shape.cached:  # plain causal attention: the dense arrays are there already
        k, v = (_dense(pool, distinct[0], shape) for pool in (k_pool, v_pool))
        return Case(shape.name, "cudnn dense", lambda i: run(q, k, v, distinct[0]), calls, flops=shape.flops)
    if implementation == "cudnn":
        return Case(shape.name, "gather + cudnn", lambda i: run(q, k_pool, v_pool, distinct[i % calls]), calls, flops=shape.flops)
    paged = jax.jit(functools.partial(paged_prefill_attention, implementation=implementation))

    def error() -> float:
        want = run(q, *((_dense(p, distinct[0], shape) for p in (k_pool, v_pool)) if not shape.cached else (k_pool, v_pool)), distinct[0])
        got = paged(q, k_pool, v_pool, distinct[0], starts, lens)
        return relative_error(got.astype(jnp.float32), want.astype(jnp.float32))

    return Case(
        shape.name,
        implementation,
        lambda i: paged(q, k_pool, v_pool, distinct[i % calls], starts, lens),
        calls,
        flops=shape.flops,
        error=error,
    )


def mixed_case(shape: MixedShape, implementation: str, pools: Pools) -> Case:
    """Both ops of a step in one program; ``apart`` are the two by themselves."""
    apart = decode_case(shape.decode, implementation, pools), prefill_case(shape.prefill, implementation, pools)
    k_pool, v_pool = pools.get(shape.decode)
    calls, size = 12, shape.decode
    shapes = (size.batch, size.num_heads, size.head_size), (shape.prefill.rows * shape.prefill.new, size.num_heads, size.head_size)
    q, queries = (jax.random.normal(jax.random.key(3), dims, jnp.dtype(size.dtype)) for dims in shapes)
    starts = jnp.arange(shape.prefill.rows + 1, dtype=jnp.int32) * shape.prefill.new
    lens = jnp.full((shape.prefill.rows,), shape.prefill.new + shape.prefill.cached, jnp.int32)
    ids = (
        tables(k_pool.shape[0], size.batch, size.table_width, calls),
        tables(k_pool.shape[0], shape.prefill.rows, shape.prefill.table_width, calls),
    )

    @jax.jit
    def step(q: jax.Array, queries: jax.Array, table: jax.Array, prefill_table: jax.Array, pools: Any) -> Any:
        keys, values = pools
        return (
            paged_attention(q, keys, values, table, jnp.asarray(size.contexts), implementation=implementation),
            paged_prefill_attention(queries, keys, values, prefill_table, starts, lens, implementation=implementation),
        )

    def call(i: int) -> Any:
        return step(q, queries, ids[0][i % calls], ids[1][i % calls], (k_pool, v_pool))

    return Case(shape.name, implementation, call, calls, apart=apart)


def _dense(pool: jax.Array, table: jax.Array, shape: PrefillShape) -> jax.Array:
    """``[rows, tokens, K, H]``."""
    gathered = jnp.moveaxis(pool[table], 2, 3)
    return gathered.reshape(shape.rows, -1, shape.num_kv_heads, shape.head_size)[:, : shape.new + shape.cached]


def _dense_prefill(q: jax.Array, k: jax.Array, v: jax.Array, table: jax.Array, *, shape: PrefillShape, gather: bool) -> jax.Array:
    if gather:
        k, v = _dense(k, table, shape), _dense(v, table, shape)
    queries = q.reshape(shape.rows, shape.new, shape.num_heads, shape.head_size)
    if not shape.cached:
        out = jax.nn.dot_product_attention(queries, k, v, is_causal=True, implementation="cudnn")
    else:  # cuDNN's causal mask starts at the top left corner, ours ends at the bottom right one: pass it as an array
        mask = jnp.arange(k.shape[1])[None, :] <= jnp.arange(shape.new)[:, None] + shape.cached
        out = jax.nn.dot_product_attention(queries, k, v, mask=mask[None, None], implementation="cudnn")
    return out.reshape(q.shape)
