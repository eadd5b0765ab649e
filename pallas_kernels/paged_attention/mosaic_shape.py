"""What the decode kernel for Hopper is compiled for, and what that takes of shared memory. Plain numbers, no JAX."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """Static description of one compiled kernel. Letters as everywhere: B, N, P, K, Z, H, M."""

    B: int
    N: int
    P: int
    K: int
    Z: int
    H: int
    M: int
    tile: int
    stages: int
    chains: int
    splits: int
    scale: float
    sliding_window: int | None
    soft_cap: float | None
    return_lse: bool

    @property
    def G(self) -> int:  # noqa: N802  (a shape letter like the fields)
        """Query heads per KV head."""
        return self.N // self.K

    @property
    def columns(self) -> int:
        """Columns of the accumulators: wgmma's N is a multiple of 8."""
        return -(-self.G // 8) * 8

    @property
    def piece(self) -> int:
        """Tokens that one TMA instruction copies."""
        return min(self.Z, self.tile)

    @property
    def share(self) -> int:
        """How much of H one CTA of a cluster merges and writes."""
        return self.H // self.splits

    @property
    def width(self) -> int:
        """Columns of partial results that are kept: columns travel in pairs."""
        return -(-self.G // 2) * 2

    # Shared memory that is neither tiled nor swizzled, in float32 words: this CTA's share of the chains' partial results, the
    # chains' log-sum-exps, two scratch rows for each warp, and the barriers (two words each).
    @property
    def lse_at(self) -> int:
        """First word of the log-sum-exps."""
        return self.chains * self.share * self.width

    @property
    def warp_rows_at(self) -> int:
        """First word of the warps' scratch rows."""
        return self.lse_at + self.chains * self.width

    @property
    def barriers_at(self) -> int:
        """First word of the barriers."""
        return self.warp_rows_at + 8 * self.columns

    @property
    def words(self) -> int:
        """Words of that buffer."""
        return self.barriers_at + 2 * (3 * self.stages + 1)

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory of one CTA: queries, weights, the ring of K and V tiles, and those words."""
        tiles = self.columns * (self.H + self.tile) + 2 * self.stages * self.tile * self.H
        return -(-(2 * tiles + 4 * self.words) // 1024) * 1024
