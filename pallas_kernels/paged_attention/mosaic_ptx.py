"""Hopper instructions that Pallas does not expose, as small functions over MLIR values of one thread.

The decode kernel keeps its own memory barriers: a tile of K or V then costs one arrival (Pallas's barriers count 128 for
each copied block), and a thread of another CTA can complete bytes on them. Every value here is one thread's: an ``i32``
may differ from lane to lane. Semantics of the instructions: NVIDIA, "Parallel Thread Execution ISA", sections on
``mbarrier``, ``st.async``, ``mapa`` and ``barrier.cluster``.
"""

from collections.abc import Sequence
from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf

Value = Any  # ir.Value: jaxlib ships no types for its MLIR bindings
_SPIN_TICKS = 10_000_000  # how long one try_wait may sleep before it looks again; no time-out


def i32() -> Any:
    """MLIR's ``i32``."""
    return ir.IntegerType.get_signless(32)


def f32() -> Any:
    """MLIR's ``f32``."""
    return ir.F32Type.get()


def const(x: int | float, ty: Any = None) -> Value:
    """A constant, ``i32`` by default."""
    return utils.c(x, i32() if ty is None else ty)


def _value(x: Value | int) -> Value:
    return const(x) if isinstance(x, int) else x


def add(x: Value, y: Value | int) -> Value:
    """``x + y``."""
    return arith.addi(x, _value(y))


def sub(x: Value, y: Value | int) -> Value:
    """``x - y``."""
    return arith.subi(_value(x), _value(y))


def mul(x: Value, y: Value | int) -> Value:
    """``x * y``."""
    return arith.muli(x, _value(y))


def div(x: Value, y: int) -> Value:
    """``x // y`` for ``x >= 0``."""
    return arith.divui(x, const(y))


def rem(x: Value, y: int) -> Value:
    """``x % y`` for ``x >= 0``."""
    return arith.remui(x, const(y))


def xor(x: Value, y: Value | int) -> Value:
    """``x ^ y``."""
    return arith.xori(x, _value(y))


def minimum(x: Value, y: Value | int) -> Value:
    """Signed minimum."""
    return arith.minsi(x, _value(y))


def maximum(x: Value, y: Value | int) -> Value:
    """Signed maximum."""
    return arith.maxsi(x, _value(y))


def less(x: Value, y: Value | int) -> Value:
    """Signed ``x < y``, an ``i1``."""
    return arith.cmpi(arith.CmpIPredicate.slt, x, _value(y))


def equal(x: Value, y: Value | int) -> Value:
    """``x == y``, an ``i1``."""
    return arith.cmpi(arith.CmpIPredicate.eq, x, _value(y))


def both(x: Value, y: Value) -> Value:
    """Logical and of two ``i1``."""
    return arith.andi(x, y)


def select(condition: Value, x: Value, y: Value) -> Value:
    """``x if condition else y``."""
    return arith.select(condition, x, y)


def asm(ptx: str, constraints: str, operands: Sequence[Value], result: Any = None) -> Value:
    """Inline assembly that neither moves nor disappears, and that memory accesses do not cross."""
    return llvm.inline_asm(
        ir.Type.parse("!llvm.void") if result is None else result,
        list(operands),
        ptx,
        constraints + (",~{memory}" if constraints else "~{memory}"),
        has_side_effects=True,
    )


def element(ptr: Value, index: Value | int, ty: Any = None) -> Value:
    """Address of element ``index`` of type ``ty`` (``f32`` by default) behind ``ptr``."""
    return utils.getelementptr(ptr, [index], f32() if ty is None else ty)


def byte(ptr: Value, offset: Value | int) -> Value:
    """Address ``offset`` bytes behind ``ptr``."""
    return utils.getelementptr(ptr, [offset], ir.IntegerType.get_signless(8))


def load_i32(ref: Value, index: Value) -> Value:
    """``ref[index]`` of an int32 array in global memory, at this place in the program."""
    ptr = utils.memref_ptr(ref)
    address = llvm.ptrtoint(ir.IntegerType.get_signless(64), element(ptr, index, i32()))
    return asm("ld.global.b32 $0, [$1];", "=r,l", [address], i32())


def barrier_init(barrier: Value, arrivals: int) -> None:
    """Make the eight bytes at ``barrier`` a memory barrier whose phase ends after ``arrivals`` arrivals."""
    asm(f"mbarrier.init.shared::cta.b64 [$0], {arrivals};", "r", [barrier])


def fence_barrier_init() -> None:
    """Let the copy engine and other CTAs of the cluster see initialised barriers (after a barrier of threads)."""
    asm("fence.mbarrier_init.release.cluster;", "", [])
    fence_async()


def fence_async() -> None:
    """Let wgmma and the copy engine see what this thread has stored in shared memory (after a barrier of threads)."""
    asm("fence.proxy.async.shared::cta;", "", [])


def barrier_arrive(barrier: Value, predicate: Value) -> None:
    """One arrival, by the threads where ``predicate`` holds."""
    asm("@$1 mbarrier.arrive.release.cta.shared::cta.b64 _, [$0];", "r,b", [barrier, predicate])


def barrier_expect(barrier: Value, num_bytes: Value | int, predicate: Value) -> None:
    """One arrival that also says how many bytes this phase waits for."""
    asm("@$1 mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [$0], $2;", "r,b,r", [barrier, predicate, _value(num_bytes)])


def barrier_wait(barrier: Value, parity: Value) -> None:
    """Wait for the end of the phase of that parity (0 is the first phase's)."""
    asm(
        "{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [$0], $1, $2;\n"
        "@done bra.uni READY;\nbra.uni AGAIN;\nREADY:\n}",
        "r,r,r",
        [barrier, parity, const(_SPIN_TICKS)],
    )


def barrier_wait_cluster(barrier: Value, parity: Value) -> None:
    """``barrier_wait`` for bytes that other CTAs of the cluster wrote."""
    asm(
        "{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [$0], $1, $2;\n"
        "@done bra.uni READY;\nbra.uni AGAIN;\nREADY:\n}",
        "r,r,r",
        [barrier, parity, const(_SPIN_TICKS)],
    )


def cta_barrier() -> None:
    """All threads of the CTA."""
    asm("bar.sync 0;", "", [])


def cluster_arrive() -> None:
    """First half of the barrier of all threads of the cluster. Of memory it orders only what ``fence_barrier_init`` did."""
    asm("barrier.cluster.arrive.relaxed.aligned;", "", [])


def cluster_wait() -> None:
    """Second half of the barrier of all threads of the cluster."""
    asm("barrier.cluster.wait.acquire.aligned;", "", [])


def in_cta(ptr: Value, rank: Value) -> Value:
    """Where CTA ``rank`` of the cluster keeps what this CTA keeps at ``ptr``: a ``shared::cluster`` address, an ``i32``."""
    return asm("mapa.shared::cluster.u32 $0, $1, $2;", "=r,r,r", [ptr, rank], i32())


def send_pair(address: Value, x: Value, y: Value, barrier: Value, predicate: Value) -> None:
    """Store two floats in another CTA and complete eight bytes on a barrier there (both are ``shared::cluster`` addresses)."""
    asm(
        "@$4 st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [$0], {$1, $2}, [$3];",
        "r,f,f,r,b",
        [address, x, y, barrier, predicate],
    )


def store_16_zero_bytes(ptr: Value, predicate: Value) -> None:
    """Clear 16 bytes of shared memory."""
    asm("@$1 st.shared.v4.b32 [$0], {$2, $2, $2, $2};", "r,b,r", [ptr, predicate, const(0)])


def wgmma_commit_and_wait() -> None:
    """Close the group of wgmma instructions and wait for it."""
    asm("wgmma.commit_group.sync.aligned;", "", [])
    asm("wgmma.wait_group.sync.aligned 0;", "", [])


def pair(vector: Value) -> tuple[Value, Value]:
    """Both halves of a ``vector<2xf32>``."""
    return llvm.extractelement(vector, const(0)), llvm.extractelement(vector, const(1))


def for_range(start: Value, stop: Value, step: int, body: Any) -> None:
    """``for i in range(start, stop, step): body(i)``; the bounds may differ from thread to thread."""
    loop = scf.ForOp(start, stop, const(step), [])
    with ir.InsertionPoint(loop.body):
        body(loop.induction_variable)
        scf.YieldOp([])


def shuffle_reduce(x: Value, op: Any) -> Value:
    """Combine the eight lanes that hold the same columns of a wgmma accumulator; all of them get the result."""
    for distance in (4, 8, 16):
        x = op(x, utils.shfl_bfly(x, distance))
    return x


when = mgpu.when
