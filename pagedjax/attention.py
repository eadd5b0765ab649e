"""Attention over the paged cache for one step: write this step's keys and values, then decode rows, then prefill tokens.

Under a mesh each device holds some of the KV heads. Pallas GPU calls are not partitioned by XLA, so the whole piece runs
inside `jax.shard_map`; heads never talk to each other, so nothing is exchanged.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from pagedjax.inputs import StepInputs
from pagedjax.params import MESH_AXIS
from pallas_kernels import paged_attention, paged_prefill_attention, write_kv


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    inputs: StepInputs,
    mesh: Mesh | None,
    implementation: str | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One layer's attention.

    Args:
      q: [B + T, K, G, H], rotary embedding applied.
      k, v: [B + T, K, H].
      k_pool, v_pool: [P, K, Z, H].
      inputs: the step.
      mesh: shards q, k, v and the pools over K.
      implementation: of the kernels; see `pallas_kernels`.

    Returns:
      the attention output [B + T, K, G, H] and the two pools.
    """
    local = functools.partial(_attend, implementation=implementation)
    if mesh is None:
        return local(q, k, v, k_pool, v_pool, inputs)
    heads, everywhere = PartitionSpec(None, MESH_AXIS), PartitionSpec()
    specs = (heads, heads, heads, heads, heads, StepInputs(*(everywhere for _ in inputs)))
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(heads, heads, heads), check_vma=False)(
        q, k, v, k_pool, v_pool, inputs
    )


def _attend(
    q: jax.Array, k: jax.Array, v: jax.Array, k_pool: jax.Array, v_pool: jax.Array, inputs: StepInputs, *, implementation: str | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    num_tokens, num_kv_heads, group, head_size = q.shape
    given = q.dtype
    q, k, v = (x.astype(k_pool.dtype) for x in (q, k, v))  # the cache may be held in another dtype than the model
    num_decode = inputs.decode_context_lens.shape[0]
    # Write before read: the new tokens' own keys are then found through the table like all others.
    k_pool, v_pool = write_kv(k_pool, v_pool, k, v, inputs.slot_mapping, implementation=implementation)
    flat = q.reshape(num_tokens, num_kv_heads * group, head_size)
    parts = []
    if num_decode:
        parts.append(
            paged_attention(
                flat[:num_decode], k_pool, v_pool, inputs.decode_block_tables, inputs.decode_context_lens, implementation=implementation
            )
        )
    if num_tokens > num_decode:
        parts.append(
            paged_prefill_attention(
                flat[num_decode:],
                k_pool,
                v_pool,
                inputs.prefill_block_tables,
                inputs.prefill_query_start_loc,
                inputs.prefill_context_lens,
                implementation=implementation,
            )
        )
    out = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
    return out.reshape(q.shape).astype(given), k_pool, v_pool
