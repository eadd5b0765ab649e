"""Write the keys and values of a step's tokens into their slots, in place when the pools are donated."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._attention import check_array
from pallas_kernels._dispatch import INTERPRET_SUFFIX, Op, current_device
from pallas_kernels.kv_layout import Pool, describe_pools

OP = Op(
    name="write_kv",
    modules={
        "reference": "pallas_kernels.kv_write.reference",
        "pallas_triton": "pallas_kernels.kv_write.pallas_triton",
        "pallas_triton_interpret": "pallas_kernels.kv_write.pallas_triton",
    },
    preference=("pallas_triton", "reference"),
)


@dataclass(frozen=True)
class WriteProblem:
    """Static description of one call."""

    num_tokens: int  # T
    pool: Pool


def write_kv(
    k_pool: jax.Array, v_pool: jax.Array, k: jax.Array, v: jax.Array, slot_mapping: jax.Array, *, implementation: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """Write token t's keys and values into slot ``slot_mapping[t]``.

    Under ``jax.jit`` with both pools donated it happens in place: nothing of the pool's size is copied or allocated.
    (The XLA implementation widens bfloat16 pools on a CPU with jax 0.10, whose scatter does so.)

    Args:
        k_pool: ``[P, K, Z, H]`` keys, bfloat16, float16 or float32.
        v_pool: ``[P, K, Z, H]`` values.
        k: ``[T, K, H]`` new keys, of the pools' dtype.
        v: ``[T, K, H]`` new values.
        slot_mapping: ``int32[T]``, ``block_id * Z + offset``. Slots of the null block (below ``Z``: padding), negative
            ones and ones past the pool are dropped. A slot that occurs twice holds one of the two, which is not defined.
        implementation: a name runs or raises; ``None`` picks the fastest that serves these shapes here.

    Returns:
        The new ``(k_pool, v_pool)``.

    Raises:
        ValueError: the arguments do not fit together, or there is no implementation of that name.
        NotImplementedError: the named implementation does not run here; the message says why.
    """
    problem = describe(k_pool, v_pool, k, v, slot_mapping)
    name = OP.resolve(implementation, problem, current_device())
    arrays = [jnp.asarray(x) for x in (k_pool, v_pool, k, v, slot_mapping)]
    if problem.num_tokens == 0:
        return arrays[0], arrays[1]
    written: tuple[jax.Array, jax.Array] = _run(name, problem, *arrays)
    return written


def describe(k_pool: Any, v_pool: Any, k: Any, v: Any, slot_mapping: Any) -> WriteProblem:
    """Validate a call (arrays, or anything with ``shape`` and ``dtype``) and describe it.

    Raises:
        ValueError: naming both values that do not fit together.
    """
    pool = describe_pools(k_pool, v_pool)
    check_array("k", k, "T K H", pool.dtype, K=pool.num_kv_heads, H=pool.head_size)
    tokens = k.shape[0]
    check_array("v", v, "T K H", pool.dtype, T=tokens, K=pool.num_kv_heads, H=pool.head_size)
    check_array("slot_mapping", slot_mapping, "T", "int32", T=tokens)
    return WriteProblem(tokens, pool)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run(name: str, problem: WriteProblem, *arrays: jax.Array) -> Any:
    return OP.load(name).run(problem, *arrays, interpret=name.endswith(INTERPRET_SUFFIX))
