"""Rotary embedding and the KV write in one pass over a step's projections."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._attention import check_array
from pallas_kernels._dispatch import INTERPRET_SUFFIX, Op, current_device
from pallas_kernels.kv_layout import Pool, describe_pools

OP = Op(
    name="rope_write_kv",
    modules={
        "reference": "pallas_kernels.rope_kv.reference",
        "pallas_triton": "pallas_kernels.rope_kv.pallas_triton",
        "pallas_triton_interpret": "pallas_kernels.rope_kv.pallas_triton",
    },
    preference=("pallas_triton", "reference"),
)


@dataclass(frozen=True)
class RopeProblem:
    """Static description of one call."""

    num_tokens: int  # T
    group: int  # G
    pool: Pool


def rope_write_kv(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    slot_mapping: jax.Array,
    *,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Turn queries and keys by their positions' angles, write keys and values into their slots and give the queries.

    The rotation is that of Su et al. 2021 (arXiv:2104.09864) in the rotate-half form, computed in float32 and rounded once. The write is
    `write_kv`'s: in place when the pools are donated.

    Args:
      qkv: ``[T, K, G + 2, H]`` of the pools' dtype: for each KV head its G query heads, then its key, then its value.
      cos, sin: ``[T, H]``, float32, bfloat16 or float16; the two halves of H are equal. H is even.
      k_pool, v_pool: ``[P, K, Z, H]``.
      slot_mapping: ``int32[T]``; see `write_kv`, padding included.
      implementation: a name runs or raises; ``None`` picks the fastest that serves these shapes here.

    Returns:
      queries ``[T, K * G, H]`` of the pools' dtype, and the new ``(k_pool, v_pool)``.

    Raises:
      ValueError: the arguments do not fit together, or there is no implementation of that name.
      NotImplementedError: the named implementation does not run here; the message says why.
    """
    problem = describe(qkv, cos, sin, k_pool, v_pool, slot_mapping)
    name = OP.resolve(implementation, problem, current_device())
    arrays = [jnp.asarray(x) for x in (qkv, cos, sin, k_pool, v_pool, slot_mapping)]
    if problem.num_tokens == 0:
        return jnp.zeros((0, problem.pool.num_kv_heads * problem.group, problem.pool.head_size), k_pool.dtype), arrays[3], arrays[4]
    done: tuple[jax.Array, jax.Array, jax.Array] = _run(name, problem, *arrays)
    return done


def describe(qkv: Any, cos: Any, sin: Any, k_pool: Any, v_pool: Any, slot_mapping: Any) -> RopeProblem:
    """Validate a call (arrays, or anything with ``shape`` and ``dtype``) and describe it.

    Raises:
      ValueError: naming both values that do not fit together.
    """
    pool = describe_pools(k_pool, v_pool)
    check_array("qkv", qkv, "T K G+2 H", pool.dtype, K=pool.num_kv_heads, H=pool.head_size)
    tokens, _, heads, _ = qkv.shape
    if heads < 3:
        raise ValueError(f"qkv must have at least 3 heads a KV head (a query, the key and the value), got {heads}")
    if pool.head_size % 2:
        raise ValueError(f"the head size must be even for halves to turn, got {pool.head_size}")
    for name, angle in (("cos", cos), ("sin", sin)):
        check_array(name, angle, "T H", T=tokens, H=pool.head_size)
    check_array("slot_mapping", slot_mapping, "T", "int32", T=tokens)
    return RopeProblem(tokens, heads - 2, pool)


# A jit of its own: a kernel that a model calls once a layer is traced and lowered once, not once a layer.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _run(name: str, problem: RopeProblem, *arrays: jax.Array) -> Any:
    return OP.load(name).run(problem, *arrays, interpret=name.endswith(INTERPRET_SUFFIX))
