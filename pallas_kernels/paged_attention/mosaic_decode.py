"""The decode kernel for Hopper, written for one thread at a time in Mosaic GPU.

One cluster of ``splits`` CTAs serves one (row, KV head). The tiles of a row form ``chains`` chains: chain ``c`` has the tiles
``c, c + chains, ...``, and CTA ``s`` works on the chains ``s, s + splits, ...``, one after the other. Only how the chains are
spread over CTAs depends on ``splits``, never a number: a row's result is the same bits for every ``splits`` (and ``stages``).
Since a CTA's first tile does not depend on the row's length, it asks for the length and its first table entries at once.

* Warp 4 produces: lane ``p`` copies the ``p``-th block of a tile (TMA) into a ring of ``stages`` tiles of K and of V.
  A block behind the context is asked for outside of the pool, where TMA writes zeros and reads nothing.
* Warps 0 to 3 compute with tokens, not queries, along wgmma's M = 64 ("swap AB"):
  ``S^T[tile, columns] = K Q^T`` and ``O^T[H, columns] += V^T P``; the columns are the queries of one KV head.
* In the last tile (and with a sliding window in the first) the cells of V that the row does not attend to are cleared in
  shared memory, since 0 * NaN is NaN.
* A chain's partial result goes out in pieces: every CTA of the cluster gets its share of H and the log-sum-exp (distributed
  shared memory, ``st.async``), merges that share over the chains in a fixed tree and writes it.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention import mosaic_ptx as ptx
from pallas_kernels.paged_attention.mosaic_consumer import Consumer
from pallas_kernels.paged_attention.mosaic_producer import Producer
from pallas_kernels.paged_attention.mosaic_shape import Shape
from pallas_kernels.paged_attention.mosaic_thread import SWIZZLE


def call(shape: Shape, q: jax.Array, k_pool: jax.Array, v_pool: jax.Array, tables: jax.Array, lens: jax.Array) -> tuple[jax.Array, ...]:
    """Run the kernel: ``out [B, N, H]`` and, with ``return_lse``, ``float32[B, N]``."""
    dtype = k_pool.dtype
    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(SWIZZLE))
    smem = plgpu.SMEM
    scratch = {
        "q_s": smem((shape.columns, shape.H), dtype, transforms=swizzled),
        "p_s": smem((shape.columns, shape.tile), dtype, transforms=swizzled),
        "k_s": smem((shape.stages, shape.tile, shape.H), dtype, transforms=swizzled),
        "v_s": smem((shape.stages, shape.tile, shape.H), dtype, transforms=swizzled),
        "words_s": smem((shape.words,), jnp.float32),
    }
    tiled, plain = plgpu.RefType(swizzled), plgpu.RefType()
    out_type = [jax.ShapeDtypeStruct((shape.B * shape.N, shape.H), q.dtype)]
    if shape.return_lse:
        out_type.append(jax.ShapeDtypeStruct((shape.B * shape.N,), jnp.float32))

    def paged_decode(*refs: Any, q_s: Any, p_s: Any, k_s: Any, v_s: Any, words_s: Any) -> None:
        item = lax.axis_index("item")
        split = lax.axis_index("split") if shape.splits > 1 else jnp.int32(0)
        scalar = plgpu.Layout.WG_SPLAT
        types = ([plain] * len(refs), [tiled] * 4 + [plain], [scalar, scalar])

        @plgpu.inline_mgpu(arg_types=types)
        def program(ctx: Any, gmem: Any, scratch: Any, index: Any) -> None:
            _Program(shape, ctx, gmem, scratch, [x.registers.item() for x in index]).emit()

        program(list(refs), [q_s, p_s, k_s, v_s, words_s], [item, split])

    kernel = plgpu.kernel(
        paged_decode,
        out_type=out_type,
        scratch_types=scratch,
        grid=(shape.B * shape.K,),
        grid_names=("item",),
        num_threads=2,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, lowering_semantics=mgpu.LoweringSemantics.Lane
        ),
        cluster=(shape.splits,) if shape.splits > 1 else (),
        cluster_names=("split",) if shape.splits > 1 else (),
    )
    tokens = shape.P * shape.K * shape.Z
    pools = (pool.reshape(tokens, shape.H) for pool in (k_pool, v_pool))
    out, *lse = kernel(q.reshape(shape.B * shape.N, shape.H), *pools, tables.reshape(-1), lens)
    return (out.reshape(shape.B, shape.N, shape.H), *(x.reshape(shape.B, shape.N) for x in lse))


class _Program(Producer, Consumer):
    """Both roles."""

    def emit(self) -> None:
        """Set up, then take the role of this thread's warp."""
        s = self.s
        # Loads that need not know the row's length are in flight while the barriers are made.
        known = s.stages if s.splits == s.chains else 1
        ids = [self.block_ids(ptx.add(self.split, n * s.chains)) for n in range(known)]
        with ptx.when(ptx.equal(self.group, 0)):
            self.load_q()
        self.count_tiles()
        with ptx.when(ptx.equal(utils.thread_idx(), 0)):
            for slot in range(s.stages):
                for kind, arrivals in ((0, 1), (1, 1), (2, 4)):
                    ptx.barrier_init(self.barrier(kind, slot), arrivals)
            ptx.barrier_init(self.barrier(3), 1)
            ptx.fence_barrier_init()
            if s.splits > 1:
                ptx.barrier_expect(self.barrier(3), ptx.mul(self.used, 4 * s.width * (s.share + 1)), ptx.equal(self.lane, 0))
        ptx.cta_barrier()
        if s.splits > 1:
            ptx.cluster_arrive()
        with ptx.when(ptx.equal(self.group, 0)):
            self.compute()
        with ptx.when(ptx.equal(self.group, 1)):
            with ptx.when(ptx.equal(self.warp, 0)):
                self.produce(ids)
            if s.splits > 1:
                ptx.cluster_wait()
