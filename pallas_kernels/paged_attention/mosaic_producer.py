"""The producer's part of the decode kernel: queries, block ids and the copies of K and V."""

from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.paged_attention import mosaic_ptx as ptx
from pallas_kernels.paged_attention.mosaic_thread import SWIZZLE, THREADS, Thread


class Producer(Thread):
    """Emits what brings data to shared memory."""

    def load_q(self) -> None:
        """Copy this KV head's queries to ``q_s`` (tiled, swizzled); the columns without a query are zero. A barrier follows."""
        s = self.s
        chunks = s.H // 8  # of 16 bytes
        source, target = utils.memref_ptr(self.q), utils.memref_ptr(self.q_s)
        rows = ptx.add(ptx.mul(self.row, s.N), ptx.mul(self.head, s.G))
        four = ir.VectorType.get((4,), ptx.i32())
        zeros = arith.constant(four, ir.DenseElementsAttr.get_splat(four, ir.IntegerAttr.get(ptx.i32(), 0)))
        for start in range(0, s.columns * chunks, THREADS):
            c = ptx.add(self.thread, start)
            with ptx.when(ptx.less(c, s.columns * chunks)):
                g, j = ptx.div(c, chunks), ptx.rem(c, chunks)
                owner = ptx.minimum(g, s.G - 1)
                from_ = ptx.byte(source, ptx.add(ptx.mul(ptx.add(rows, owner), 2 * s.H), ptx.mul(j, 16)))
                value = ptx.select(ptx.less(g, s.G), llvm.load(four, from_), zeros)
                r = ptx.rem(g, 8)
                line = ptx.add(ptx.mul(ptx.add(ptx.mul(ptx.div(g, 8), s.H // 64), ptx.div(j, 8)), 8), r)
                at = ptx.add(ptx.mul(line, 128), ptx.mul(ptx.xor(ptx.rem(j, 8), r), 16))
                llvm.store(value, ptx.byte(target, at))
        ptx.fence_async()

    def _piece_token(self, tile: Any) -> Any:
        return ptx.add(self.first_token(tile), ptx.mul(self.lane, self.s.piece))

    def block_ids(self, tile: Any) -> Any:
        """The block that this lane copies for ``tile`` (any block of the table where the tile does not exist)."""
        block = ptx.minimum(ptx.div(self._piece_token(tile), self.s.Z), self.s.M - 1)
        return ptx.load_i32(self.tables, ptx.add(ptx.mul(self.row, self.s.M), block))

    def produce(self, ids: list[Any]) -> None:
        """Copy this CTA's tiles into the ring; ``ids`` are this lane's blocks of the first ones.

        As many tiles as the ring has stages are looked up ahead: a load of the table takes longer than the request of a tile.
        """
        s = self.s
        last = self.split
        for n in range(s.stages):
            if n >= len(ids):
                ids = [*ids, self.block_ids(last)]
            last, _ = self.next_tile(last)
        rounds = ptx.div(ptx.add(self.count, s.stages - 1), s.stages)

        # A round fills every stage once, so that a stage's block ids stay in one register from their load to their use.
        @mgpu.fori(rounds, [self.split, last, ids, ptx.const(1)])
        def _round(r: Any, carry: Any) -> Any:
            now, last, ids, parity = carry
            for stage in range(s.stages):
                n = ptx.add(ptx.mul(r, s.stages), stage)
                with ptx.when(ptx.less(n, self.count)):
                    self._copy_tile(stage, now, ids[stage], r, parity)
                ids = [*ids[:stage], self.block_ids(last), *ids[stage + 1 :]]
                now, last = self.next_tile(now)[0], self.next_tile(last)[0]
            return [now, last, ids, ptx.xor(parity, 1)]

    def _copy_tile(self, stage: int, tile: Any, block: Any, r: Any, parity: Any) -> None:
        s = self.s
        pieces = s.tile // s.piece
        index = ir.IndexType.get()
        with ptx.when(ptx.less(ptx.const(0), r)):
            ptx.barrier_wait(self.barrier(2, stage), parity)
        token = self._piece_token(tile)
        at = ptx.add(ptx.mul(ptx.add(ptx.mul(block, s.K), self.head), s.Z), ptx.rem(token, s.Z))
        at = arith.index_cast(index, ptx.select(ptx.less(token, self.context_len), at, ptx.const(s.P * s.K * s.Z)))
        cells = arith.index_cast(index, ptx.mul(ptx.rem(self.lane, pieces), s.piece // 8))
        for kind, source, ring in ((0, self.k, self.k_s), (1, self.v, self.v_s)):
            full = self.barrier(kind, stage)
            ptx.barrier_expect(full, s.tile * s.H * utils.bytewidth(self.dtype), ptx.equal(self.lane, 0))
            self.ctx.async_copy(
                src_ref=source,
                dst_ref=utils.memref_slice(ring, (stage, utils.ds(cells, s.piece // 8))),
                gmem_slice=(utils.ds(at, s.piece), utils.ds(0, s.H)),
                gmem_transform=(mgpu.TileTransform((8, 64)),),
                swizzle=SWIZZLE,
                barrier=utils.BarrierRef(full, ptx.const(0), None, 1),
                arrive=False,
                predicate=ptx.less(self.lane, pieces),
            )
