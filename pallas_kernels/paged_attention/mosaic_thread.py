"""One thread of the decode kernel: what it knows of itself, and its way through the tiles.

The producer's and the consumers' programs (``mosaic_producer.py``, ``mosaic_consumer.py``) build on it; the kernel as a
whole is described in ``mosaic_decode.py``.
"""

from typing import Any

from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir

from pallas_kernels.paged_attention import mosaic_ptx as ptx
from pallas_kernels.paged_attention.mosaic_shape import Shape

SWIZZLE = 128
THREADS = 128  # of a warpgroup


class Thread:
    """Emits one thread's program. Attributes are MLIR values of that thread."""

    def __init__(self, shape: Shape, ctx: Any, gmem: Any, scratch: Any, index: Any) -> None:
        self.s = shape
        self.ctx = ctx
        self.q, self.k, self.v, self.tables, self.lens, self.out, *lse = gmem
        self.lse = lse[0] if lse else None
        self.q_s, self.p_s, self.k_s, self.v_s, words = scratch
        self.words = utils.memref_ptr(words)
        self.item, self.split = index
        thread = utils.thread_idx()
        self.thread = ptx.rem(thread, THREADS)
        self.group = utils.warpgroup_idx()
        self.warp = ptx.rem(utils.warp_idx(), 4)
        self.lane = ptx.rem(thread, 32)
        self.row, self.head = ptx.div(self.item, shape.K), ptx.rem(self.item, shape.K)
        self.dtype = ir.MemRefType(self.k.type).element_type
        self.context_len = ptx.minimum(ptx.maximum(ptx.load_i32(self.lens, self.row), 0), shape.M * shape.Z)
        if shape.sliding_window is None:
            self.lowest = self.start = ptx.const(0)
        else:
            self.lowest = ptx.maximum(ptx.sub(self.context_len, shape.sliding_window), 0)
            self.start = ptx.mul(ptx.div(self.lowest, shape.piece), shape.piece)

    def barrier(self, kind: int, slot: Any = 0) -> Any:
        """Kinds: 0 a tile of K is there, 1 a tile of V is there, 2 the slot is free, 3 all partial results are there."""
        at = self.s.barriers_at + 2 * kind * self.s.stages
        return ptx.element(self.words, at + 2 * slot if isinstance(slot, int) else ptx.add(ptx.mul(slot, 2), at))

    def count_tiles(self) -> None:
        """Use the row's length: from here on the thread waits for it."""
        s = self.s
        self.tiles = ptx.div(ptx.add(ptx.sub(self.context_len, self.start), s.tile - 1), s.tile)
        mine = ptx.sub(ptx.add(self.tiles, s.splits - 1), self.split)
        self.count = ptx.div(ptx.maximum(mine, 0), s.splits)  # tiles of this CTA
        self.used = ptx.minimum(self.tiles, s.chains)  # chains that have a tile

    def first_token(self, tile: Any) -> Any:
        """Position of the first token of a tile."""
        return ptx.add(self.start, ptx.mul(tile, self.s.tile))

    def next_tile(self, tile: Any) -> tuple[Any, Any]:
        """The tile after ``tile`` on this CTA's way, and whether it starts another chain."""
        along = ptx.add(tile, self.s.chains)
        ends = ptx.less(ptx.sub(self.tiles, 1), along)
        return ptx.select(ends, ptx.add(ptx.rem(tile, self.s.chains), self.s.splits), along), ends

    def next_slot(self, slot: Any, parity: Any) -> tuple[Any, Any]:
        """The ring's stage after ``slot``, and the parity of the phase to wait for there."""
        wraps = ptx.equal(slot, self.s.stages - 1)
        return ptx.select(wraps, ptx.const(0), ptx.add(slot, 1)), ptx.select(wraps, ptx.xor(parity, 1), parity)
