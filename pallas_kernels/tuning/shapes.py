"""The named shapes that benchmarks and the tuner measure, and that GPU tests run: one table."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class DecodeShape:
    """One call of ``paged_attention``: ``batch`` rows of ``context`` tokens (0: ragged, see ``contexts``)."""

    batch: int
    context: int
    head_size: int
    num_heads: int = 32
    num_kv_heads: int = 8
    block_size: int = 16
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        """Such as ``decode-h64-8x2048``."""
        default = DecodeShape(1, 1, 1)
        extra = [] if self.block_size == default.block_size else [f"z{self.block_size}"]
        if (self.num_heads, self.num_kv_heads) != (default.num_heads, default.num_kv_heads):
            extra.append(f"n{self.num_heads}k{self.num_kv_heads}")
        if self.dtype != default.dtype:
            extra.append(self.dtype)
        return "-".join([f"decode-h{self.head_size}-{self.batch}x{self.context or 'ragged'}", *extra])

    @property
    def contexts(self) -> np.ndarray:
        """Context lengths ``int32[batch]``."""
        if self.context:
            return np.full(self.batch, self.context, np.int32)
        return np.random.default_rng(0).integers(16, 4097, self.batch).astype(np.int32)

    @property
    def table_width(self) -> int:
        """Logical blocks per row, M."""
        return -(-int(self.contexts.max()) // self.block_size)

    @property
    def bytes_needed(self) -> int:
        """Bytes that the op must move once: keys and values in the contexts, queries, outputs and the table's used entries."""
        itemsize = 4 if self.dtype == "float32" else 2
        cells = int(self.contexts.sum()) * self.num_kv_heads * self.head_size
        table = int((-(-self.contexts // self.block_size)).sum()) * 4
        return 2 * itemsize * (cells + self.batch * self.num_heads * self.head_size) + table


@dataclass(frozen=True)
class WriteShape:
    """One call of ``write_kv``: ``tokens`` tokens into shuffled slots."""

    tokens: int
    head_size: int = 128
    num_kv_heads: int = 8
    block_size: int = 16
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        """Such as ``write-h128-8192``."""
        return f"write-h{self.head_size}-{self.tokens}"

    @property
    def bytes_needed(self) -> int:
        """Bytes that the op must move once: keys and values in and out, and the slots."""
        itemsize = 4 if self.dtype == "float32" else 2
        return self.tokens * (4 * self.num_kv_heads * self.head_size * itemsize + 4)


@dataclass(frozen=True)
class PrefillShape:
    """One call of ``paged_prefill_attention``: ``rows`` rows of ``new`` query tokens on ``cached`` cached ones."""

    rows: int
    new: int
    cached: int
    head_size: int = 128
    num_heads: int = 32
    num_kv_heads: int = 8
    block_size: int = 16
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        """Such as ``prefill-h128-64x128+1024``."""
        return f"prefill-h{self.head_size}-{self.rows}x{self.new}+{self.cached}"

    @property
    def table_width(self) -> int:
        """Logical blocks per row, M."""
        return -(-(self.new + self.cached) // self.block_size)

    @property
    def flops(self) -> int:
        """Floating-point operations of both products over the causal part."""
        pairs = self.rows * (self.new * self.cached + self.new * (self.new + 1) // 2)
        return 4 * pairs * self.num_heads * self.head_size


@dataclass(frozen=True)
class MixedShape:
    """The attention of one step: decode rows, then prefill rows."""

    decode: DecodeShape
    prefill: PrefillShape

    @property
    def name(self) -> str:
        """Such as ``mixed-h128-64x2048-and-1x2048+0``."""
        decode, prefill = (shape.name.split("-", 2)[2] for shape in (self.decode, self.prefill))
        return f"mixed-h{self.decode.head_size}-{decode}-and-{prefill}"


# The products of a decode step of Llama-3.2-1B: outputs (gates and what they open count once), inputs, and what stands around them.
_PRODUCTS = {
    "qkv": (3072, 2048, ("norm",)),
    "o": (2048, 2048, ("residual", "next_norm")),
    "gate_up": (8192, 2048, ("norm", "gate_up")),
    "down": (2048, 8192, ("residual", "next_norm")),
    "head": (128256, 2048, ("norm",)),
    "small": (64, 128, ("norm", "gate_up")),  # for a CPU
}


@dataclass(frozen=True)
class MatmulShape:
    """One call of ``skinny_matmul``: ``rows`` rows in one of the products of a decode step."""

    product: str
    rows: int

    @property
    def name(self) -> str:
        """Such as ``matmul-gate_up-8``."""
        return f"matmul-{self.product}-{self.rows}"

    @property
    def num_outputs(self) -> int:
        """N; the weight has twice as many rows with a gate."""
        return _PRODUCTS[self.product][0]

    @property
    def num_inputs(self) -> int:
        """D."""
        return _PRODUCTS[self.product][1]

    @property
    def parts(self) -> tuple[str, ...]:
        """Of ``norm``, ``gate_up``, ``residual`` and ``next_norm``, what the call has."""
        return _PRODUCTS[self.product][2]

    @property
    def bytes_needed(self) -> int:
        """Bytes that the op must move once: the weight; a few rows do not count."""
        return 2 * self.num_inputs * self.num_outputs * (2 if "gate_up" in self.parts else 1)


@dataclass(frozen=True)
class RopeShape:
    """One call of ``rope_write_kv``: ``tokens`` tokens of Llama-3.2-1B into shuffled slots."""

    tokens: int
    head_size: int = 64
    num_heads: int = 32
    num_kv_heads: int = 8
    block_size: int = 16
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        """Such as ``rope-h64-8``."""
        return f"rope-h{self.head_size}-{self.tokens}"

    @property
    def bytes_needed(self) -> int:
        """Bytes that the op must move once: projections in, queries, keys and values out, angles and slots."""
        heads = self.num_heads + 2 * self.num_kv_heads
        return self.tokens * (2 * heads * self.head_size * 2 + 2 * self.head_size * 2 + 4)


Shape = DecodeShape | WriteShape | PrefillShape | MixedShape | MatmulShape | RopeShape

DECODE = (
    *(DecodeShape(batch, context, 64) for batch in (1, 8, 32, 128) for context in (512, 2048, 8192)),
    *(DecodeShape(batch, context, 128) for batch in (1, 8, 32, 128) for context in (512, 2048, 8192)),
    DecodeShape(1, 65536, 128),
    DecodeShape(64, 0, 64),
    DecodeShape(64, 0, 128),
)
BLOCK_SIZES = tuple(DecodeShape(batch, 2048, head, block_size=z) for head in (64, 128) for batch in (8, 128) for z in (8, 16, 32, 64, 128))
GROUPS = tuple(DecodeShape(32, 2048, 128, num_heads=n, num_kv_heads=k) for n, k in ((8, 8), (24, 8), (64, 8), (32, 2)))
WRITE = (WriteShape(256), WriteShape(8192))
PREFILL = (PrefillShape(1, 8192, 0), PrefillShape(64, 128, 1024))
MIXED = (MixedShape(DecodeShape(64, 2048, 128), PrefillShape(1, 2048, 0)),)
MATMUL = tuple(MatmulShape(product, rows) for product in ("qkv", "o", "gate_up", "down", "head") for rows in (1, 8, 16))
ROPE = (RopeShape(1), RopeShape(8), RopeShape(256))
# Small enough for a CPU: what the bench's own test runs.
SMALL = (
    MatmulShape("small", 1),
    MatmulShape("small", 3),
    RopeShape(3, 16, 4, 2, 8),
    DecodeShape(2, 40, 16, num_heads=4, num_kv_heads=2, block_size=8, dtype="float32"),
)


def named(pattern: str) -> tuple[Shape, ...]:
    """Every shape of the table whose name contains ``pattern``."""
    shapes: tuple[Shape, ...] = (*DECODE, *BLOCK_SIZES, *GROUPS, *WRITE, *PREFILL, *MIXED, *MATMUL, *ROPE, *SMALL)
    return tuple(dict.fromkeys(shape for shape in shapes if pattern in shape.name))
