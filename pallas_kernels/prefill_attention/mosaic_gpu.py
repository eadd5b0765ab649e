"""Paged prefill attention as one Pallas Mosaic GPU kernel: Hopper, bfloat16 and float16.

Here: which problems it serves, its ring, its buffers and barriers, its launch. What a CTA does stands in ``mosaic_kernel``.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._dispatch import Device
from pallas_kernels.prefill_attention import PrefillProblem
from pallas_kernels.prefill_attention.mosaic_kernel import COPY_WARPS, ROWS, Plan, RingConfig, attend
from pallas_kernels.prefill_attention.tiles import num_query_tiles, packed_index, query_tiles


def default_config(problem: PrefillProblem) -> RingConfig:
    """What fits beside the queries into 227 KiB of shared memory."""
    return {64: RingConfig(128, 4), 128: RingConfig(128, 2), 256: RingConfig(64, 2)}[problem.pool.head_size]


def why_not(problem: PrefillProblem | None, device: Device, *, interpret: bool) -> str | None:
    """Why this kernel cannot serve the problem there; ``None`` if it can."""
    if device.compute_capability is None or device.compute_capability[0] != 9:
        return "it needs a Hopper GPU (compute capability 9.0); pallas_triton serves other NVIDIA GPUs"
    if problem is None:
        return None
    pool = problem.pool
    if pool.dtype == "float32":
        return "it computes in bfloat16 or float16, got float32 (pallas_triton takes it)"
    if pool.head_size not in (64, 128, 256):
        return f"head sizes 64, 128 and 256 are supported, got {pool.head_size} (pallas_triton takes others)"
    if not 8 <= pool.block_size <= 128:
        return f"block sizes 8 to 128 are supported, got {pool.block_size} (pallas_triton takes others)"
    if problem.options.scale <= 0:
        return f"the scale must be positive, got {problem.options.scale} (reference takes any)"
    return None


def _scratch(plan: Plan, head_size: int, dtype: Any, want_lse: bool) -> dict[str, Any]:
    """Shared memory and barriers of a CTA, by the names of ``attend``'s arguments."""
    tile_kv, stages = plan.config.tile_kv, plan.config.stages
    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    copies = max(COPY_WARPS, tile_kv // plan.block_size)
    barrier, smem = plgpu.Barrier, plgpu.SMEM
    ring = smem((stages, tile_kv, head_size), dtype, transforms=swizzled)
    shared: dict[str, Any] = {
        "q_s": smem((2, ROWS, head_size), dtype, transforms=swizzled),
        "stage_s": smem((2, ROWS, head_size if head_size <= 128 else 64), dtype),
        "k_s": ring,
        "v_s": ring,
        "q_full": barrier(num_barriers=2),
        "k_full": barrier(num_arrivals=copies, num_barriers=stages),
        "v_full": barrier(num_arrivals=copies, num_barriers=stages),
        "k_free": barrier(num_arrivals=2, num_barriers=stages),
        "v_free": barrier(num_arrivals=2, num_barriers=stages),
        "v_clean": barrier(num_barriers=2),
        "turn": barrier(num_arrivals=2),
    }
    if want_lse:
        shared["lse_s"] = smem((2, ROWS), jnp.float32)
    return shared


def run(
    problem: PrefillProblem,
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    block_tables: jax.Array,
    query_start_loc: jax.Array,
    context_lens: jax.Array,
    *,
    interpret: bool,
    config: RingConfig | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """See ``pallas_kernels.paged_prefill_attention``."""
    num_tokens, num_heads, head_size = q.shape
    heads = 2 if problem.group % 2 == 0 else 1
    tile_q = ROWS * (3 - heads)
    plan = Plan(
        config=config or default_config(problem),
        num_tiles=num_query_tiles(num_tokens, problem.num_rows, tile_q),
        heads=heads,
        group=problem.group,
        block_size=problem.pool.block_size,
        options=problem.options,
    )
    tiles = query_tiles(query_start_loc, context_lens, num_tokens=num_tokens, tile=tile_q)
    want_lse = problem.options.return_lse
    # A copy's box may not be larger than the array.
    q = jnp.pad(q, ((0, max(0, ROWS - num_tokens)), (0, 0), (0, 0)))

    def paged_prefill_attention(q: Any, k: Any, v: Any, table: Any, tiles: Any, out: Any, *lse_and_scratch: Any, **scratch: Any) -> None:
        attend(q, k, v, table, tiles, out, lse_and_scratch[0] if want_lse else None, **scratch, plan=plan)

    out_type = [jax.ShapeDtypeStruct(q.shape, q.dtype)]
    if want_lse:
        out_type.append(jax.ShapeDtypeStruct((num_heads, plan.num_tiles * tile_q), jnp.float32))
    out, *lse = plgpu.kernel(
        paged_prefill_attention,
        out_type=out_type,
        grid=(plan.num_tiles * (num_heads // heads),),
        grid_names=("item",),
        num_threads=3,
        thread_name="wg",
        scratch_types=_scratch(plan, head_size, q.dtype, want_lse),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(q, k_pool.reshape(-1, head_size), v_pool.reshape(-1, head_size), block_tables, jnp.concatenate(tiles))
    out = out[:num_tokens]
    if not want_lse:
        return out, None
    place = packed_index(query_start_loc, num_tokens=num_tokens, tile=tile_q)
    return out, lse[0][:, place].T
