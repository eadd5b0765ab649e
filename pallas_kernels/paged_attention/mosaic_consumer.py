"""The consumers' part of the decode kernel: scores, online softmax, output, and the merge of a row's chains.

The softmax carries the running maximum along (Milakov and Gimelshein, arXiv:1805.02867), in base 2.
"""

import math
from typing import Any

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref

from pallas_kernels.paged_attention import mosaic_ptx as ptx
from pallas_kernels.paged_attention.mosaic_thread import SWIZZLE, THREADS, Thread

_FA = mgpu.FragmentedArray
_MASKED = -1e30  # finite, so that a difference of two of them is 0 and not NaN
_LOG2E = math.log2(math.e)


class Consumer(Thread):
    """Emits what turns tiles of K and V into output."""

    def compute(self) -> None:
        """Work off this CTA's tiles, then merge and write this CTA's share of the output."""
        s = self.s
        if s.splits > 1:
            ptx.cluster_wait()  # from here on other CTAs' barriers exist
        zero, lowest = (ptx.const(x, ptx.f32()) for x in (0.0, _MASKED))
        o = _FA.splat(zero, (s.H, s.columns), mgpu.WGMMA_LAYOUT)
        m = _FA.splat(lowest, (s.columns,), mgpu.WGMMA_COL_LAYOUT)
        mass = _FA.splat(zero, (s.columns,), mgpu.WGMMA_COL_LAYOUT)  # of this thread's rows alone

        @mgpu.fori(self.count, [o, m, mass, self.split, ptx.const(0), ptx.const(0)])
        def _loop(i: Any, carry: Any) -> Any:
            o, m, mass, tile, slot, parity = carry
            first = self.first_token(tile)
            following, ends = self.next_tile(tile)
            at = arith.index_cast(ir.IndexType.get(), slot)
            ptx.barrier_wait(self.barrier(0, slot), parity)
            scores = self._scores(utils.memref_slice(self.k_s, at), first)
            m_new = m.max(self._across_warps(self._over_rows(scores, _maximum), _maximum, 0))
            alpha = (m - m_new).exp2(approx=True)
            p = (scores - self._columns(m_new, s.tile)).exp2(approx=True)
            p.astype(self.dtype).store_tiled(utils.memref_transpose(self.p_s, (1, 0, 3, 2)), swizzle=SWIZZLE)
            v = utils.memref_slice(self.v_s, at)
            self._clear_unowned(v, first, self.barrier(1, slot), parity)
            mgpu.commit_shared()
            o = o * self._columns(alpha, s.H)
            mass = mass * alpha + self._column_array(self._over_rows(p, arith.addf))
            ptx.barrier_wait(self.barrier(1, slot), parity)
            acc = mgpu.WGMMAAccumulator.from_registers(o)
            acc = mgpu.wgmma(acc, utils.memref_transpose(v, (1, 0, 3, 2)), utils.memref_transpose(self.p_s, (1, 0, 3, 2)), swizzle=SWIZZLE)
            ptx.wgmma_commit_and_wait()
            ptx.barrier_arrive(self.barrier(2, slot), ptx.equal(self.lane, 0))
            with ptx.when(ends):
                self._finish_chain(ptx.rem(tile, s.chains), acc.value, m_new, mass)
            o, m, mass = (_reset(ends, x, y) for x, y in ((acc.value, zero), (m_new, lowest), (mass, zero)))
            return [o, m, mass, following, *self.next_slot(slot, parity)]

        self._merge()

    def _scores(self, k: Any, first: Any) -> Any:
        """Logits [tile, columns] times log2(e), masked outside of what the row attends to."""
        s = self.s
        acc = mgpu.WGMMAAccumulator.zero(s.tile, s.columns)
        acc = mgpu.wgmma(acc, k, utils.memref_transpose(self.q_s, (1, 0, 3, 2)), swizzle=SWIZZLE)
        ptx.wgmma_commit_and_wait()
        scores = acc.value
        if s.soft_cap is None:
            scores = scores * (s.scale * _LOG2E)
        else:
            # tanh(x) = 1 - 2 / (1 + e^2x): the hardware's tanh is good to 2^-11 only.
            grown = (scores * (2 * _LOG2E * s.scale / s.soft_cap)).exp2(approx=True)
            scores = (1.0 - 2.0 / (grown + 1.0)) * (s.soft_cap * _LOG2E)
        whole = (s.tile, s.columns)
        token = _FA.broadcasted_iota(ptx.i32(), whole, 0, mgpu.WGMMA_LAYOUT, is_signed=True)

        def spread(x: Any, signed: bool | None = True) -> Any:
            return _FA.splat(x, whole, mgpu.WGMMA_LAYOUT, is_signed=signed)

        owned = token < spread(ptx.sub(self.context_len, first))
        if s.sliding_window is not None:
            owned = owned & (token >= spread(ptx.sub(self.lowest, first)))
        return owned.select(scores, spread(ptx.const(_MASKED, ptx.f32()), None))

    def _columns(self, x: Any, rows: int) -> Any:
        return x.broadcast_in_dim((rows, self.s.columns), (1,), mgpu.WGMMA_LAYOUT)

    def _column_array(self, registers: Any) -> Any:
        layout = mgpu.WGMMA_COL_LAYOUT
        array = np.empty(len(registers), object)
        array[:] = registers
        return _FA(_registers=array.reshape(layout.registers_shape((self.s.columns,))), _layout=layout, _is_signed=None)

    def _over_rows(self, x: Any, op: Any) -> list[Any]:
        """Combine this thread's rows of ``x [tile, columns]``: a pair of columns for each eight columns."""
        parts = x.registers.reshape(-1, self.s.columns // 8, 2)  # 64 rows, 8 columns, the two rows in 16 of one thread
        result = []
        for n in range(parts.shape[1]):
            values = list(parts[:, n].flat)
            while len(values) > 1:  # a tree, so that the additions do not wait for each other
                values = [op(a, b) for a, b in zip(values[::2], values[1::2], strict=True)]
            result.append(ptx.shuffle_reduce(values[0], op) if op is _maximum else values[0])
        return result

    def _across_warps(self, pairs: list[Any], op: Any, scratch: int) -> Any:
        """Combine what the four warps hold for each column. One barrier: between two uses of a scratch must be another."""
        s = self.s
        two = ir.VectorType.get((2,), ptx.f32())
        rows = ptx.element(self.words, s.warp_rows_at + 4 * s.columns * scratch)
        column = ptx.mul(ptx.rem(self.lane, 4), 2)
        with ptx.when(ptx.less(self.lane, 4)):
            for n, x in enumerate(pairs):
                llvm.store(x, ptx.element(rows, ptx.add(ptx.mul(self.warp, s.columns), ptx.add(column, 8 * n))))
        mgpu.warpgroup_barrier()
        result = []
        for n in range(len(pairs)):
            w = [llvm.load(two, ptx.element(rows, ptx.add(column, warp * s.columns + 8 * n))) for warp in range(4)]
            result.append(op(op(w[0], w[1]), op(w[2], w[3])))
        return self._column_array(result)

    def _clear_unowned(self, v: Any, first: Any, full: Any, parity: Any) -> None:
        """Clear the rows of a tile of V, once it is there, whose tokens the row does not attend to."""
        s = self.s
        end = ptx.sub(self.context_len, first)
        base = utils.memref_ptr(v)
        per_eight_rows = s.H  # chunks of 16 bytes in eight rows

        def clear(begin: Any, stop: Any) -> None:
            def body(c: Any) -> None:
                line = ptx.add(ptx.mul(ptx.div(c, per_eight_rows), 8), ptx.rem(ptx.div(c, 8), 8))
                inside = ptx.both(ptx.less(ptx.sub(begin, 1), line), ptx.less(line, stop))
                ptx.store_16_zero_bytes(ptx.byte(base, ptx.mul(c, 16)), inside)

            def chunk(x: Any) -> Any:
                return ptx.mul(ptx.div(x, 8), per_eight_rows)

            ptx.for_range(ptx.add(chunk(begin), self.thread), chunk(ptx.add(stop, 7)), THREADS, body)

        # Whole blocks behind the context are zero already; the last block may be cut.
        with ptx.when(ptx.both(ptx.less(end, s.tile), ptx.less(ptx.const(0), ptx.rem(end, s.piece)))):
            ptx.barrier_wait(full, parity)
            clear(end, ptx.mul(ptx.div(ptx.add(end, s.piece - 1), s.piece), s.piece))
        if s.sliding_window is not None:
            begin = ptx.sub(self.lowest, first)
            with ptx.when(ptx.less(ptx.const(0), begin)):
                ptx.barrier_wait(full, parity)
                clear(ptx.const(0), begin)

    def _finish_chain(self, chain: Any, o: Any, m: Any, mass: Any) -> None:
        """Normalise a chain's partial result and hand it out, with its log-sum-exp (base 2), to the CTAs that merge it."""
        s = self.s
        mass = self._across_warps([ptx.shuffle_reduce(x, arith.addf) for x in mass.registers.flat], arith.addf, 1)
        o, lse = o / self._columns(mass, s.H), m + mass.log2(approx=True)
        column = ptx.mul(ptx.rem(self.lane, 4), 2)
        line = ptx.add(ptx.mul(self.warp, 16), ptx.div(self.lane, 4))
        registers = o.registers.reshape(-1, s.columns // 8, 2)
        for (chunk, n, half), value in np.ndenumerate(registers):
            h = ptx.add(line, chunk * 64 + half * 8)
            at = ptx.add(ptx.mul(ptx.add(ptx.mul(chain, s.share), ptx.rem(h, s.share)), s.width), ptx.add(column, 8 * n))
            self._send(ptx.div(h, s.share), ptx.element(self.words, at), value, self._is_query(column, n))
        for n, value in enumerate(lse.registers.flat):
            at = ptx.add(ptx.add(ptx.mul(chain, s.width), column), s.lse_at + 8 * n)
            for start in range(0, s.splits, 8):
                to = ptx.add(ptx.div(self.lane, 4), start)
                sends = ptx.both(ptx.both(ptx.equal(self.warp, 0), ptx.less(to, s.splits)), self._is_query(column, n))
                self._send(to, ptx.element(self.words, at), value, sends)

    def _is_query(self, column: Any, n: int) -> Any:
        return ptx.less(column, self.s.G - 8 * n)

    def _send(self, to: Any, ptr: Any, value: Any, predicate: Any) -> None:
        if self.s.splits == 1:
            with ptx.when(predicate):
                llvm.store(value, ptr)
        else:
            ptx.send_pair(ptx.in_cta(ptr, to), *ptx.pair(value), ptx.in_cta(self.barrier(3), to), predicate)

    def _merge(self) -> None:
        s = self.s
        if s.splits == 1:
            mgpu.warpgroup_barrier()
        else:
            ptx.barrier_wait_cluster(self.barrier(3), ptx.const(0))
        index = ir.IndexType.get()
        out_dtype = ir.MemRefType(self.out.type).element_type
        total = s.share * s.G
        for start in range(0, total, THREADS):
            e = ptx.add(self.thread, start)
            with ptx.when(ptx.less(e, total)):
                h, g = ptx.div(e, s.G), ptx.rem(e, s.G)
                used = [ptx.less(ptx.const(c), self.used) for c in range(s.chains)]
                lse = [self._word(ptx.add(g, s.lse_at + c * s.width)) for c in range(s.chains)]
                part = [self._word(ptx.add(ptx.mul(ptx.add(h, c * s.share), s.width), g)) for c in range(s.chains)]
                lse = [ptx.select(u, x, ptx.const(_MASKED, ptx.f32())) for u, x in zip(used, lse, strict=True)]
                part = [ptx.select(u, x, ptx.const(0.0, ptx.f32())) for u, x in zip(used, part, strict=True)]
                top = _tree(_maximum, lse)
                weight = [_exp2(arith.subf(x, top)) for x in lse]
                mass = _tree(arith.addf, weight)
                value = arith.divf(_tree(arith.addf, [arith.mulf(w, x) for w, x in zip(weight, part, strict=True)]), mass)
                at = ptx.add(ptx.add(ptx.mul(self.row, s.N), ptx.mul(self.head, s.G)), g)
                column = ptx.add(ptx.mul(self.split, s.share), h)
                where = [arith.index_cast(index, x) for x in (at, column)]
                memref.store(arith.truncf(out_dtype, value), self.out, where)
                if self.lse is not None and start == 0:
                    with ptx.when(ptx.both(ptx.less(e, s.G), ptx.equal(self.split, 0))):
                        natural = arith.mulf(arith.addf(top, _log2(mass)), ptx.const(math.log(2.0), ptx.f32()))
                        empty = ptx.equal(self.context_len, 0)
                        natural = ptx.select(empty, ptx.const(-math.inf, ptx.f32()), natural)
                        memref.store(natural, self.lse, where[:1])

    def _word(self, at: Any) -> Any:
        return llvm.load(ptx.f32(), ptx.element(self.words, at))


def _reset(condition: Any, x: Any, value: Any) -> Any:
    """``value`` everywhere if ``condition``, else ``x``."""
    return _FA.splat(condition, x.shape, x.layout, is_signed=False).select(_FA.splat(value, x.shape, x.layout), x)


def _maximum(x: Any, y: Any) -> Any:
    return arith.maxnumf(x, y)


def _exp2(x: Any) -> Any:
    return ptx.asm("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], ptx.f32())


def _log2(x: Any) -> Any:
    return ptx.asm("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], ptx.f32())


def _tree(op: Any, values: list[Any]) -> Any:
    while len(values) > 1:
        values = [op(*values[i : i + 2]) if i + 1 < len(values) else values[i] for i in range(0, len(values), 2)]
    return values[0]
