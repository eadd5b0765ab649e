"""Paged decode attention in Pallas Mosaic GPU: Hopper (TMA, wgmma, clusters), bfloat16 and float16.

Here: what the kernel serves, which settings it gets and the call. The kernel is in ``mosaic_decode.py``, the instructions
that Pallas does not expose are in ``mosaic_ptx.py``. Both are imported when they are needed: they want a new jax.

A row's result is the same bits for every batch that the row is in: the settings that numbers depend on (``Tiling``) follow
from the head size alone.
"""

import dataclasses
import functools
import math
from typing import Any

import jax

from pallas_kernels import tuning
from pallas_kernels._dispatch import Device, current_device
from pallas_kernels.paged_attention import DecodeProblem
from pallas_kernels.paged_attention.mosaic_shape import Shape

MAX_GROUP = 16
MAX_HEAD = 256
_OLDEST_JAX = (0, 11, 2)
_NUM_SMS = 132
_SHARED_MEMORY = 228 << 10  # of one multiprocessor, in bytes
_RESERVED = 1 << 10  # of it, for each CTA


@dataclasses.dataclass(frozen=True)
class Tiling:
    """What a row's numbers depend on; static. One for each head size, so that a row's bits do not depend on its batch.

    Attributes:
        tile: tokens per loop step, a multiple of 64.
        chains: parts of a row that are summed apart.
    """

    tile: int
    chains: int

    def __post_init__(self) -> None:
        if self.tile < 64 or self.tile > 256 or self.tile & (self.tile - 1):
            raise ValueError(f"tile must be 64, 128 or 256, got {self.tile}")
        if not 1 <= self.chains <= 16:
            raise ValueError(f"chains must be 1 to 16, got {self.chains}")


@dataclasses.dataclass(frozen=True)
class Config(Tiling):
    """All settings of the kernel; static.

    Attributes:
        splits: CTAs that share a row and KV head, a divisor of ``chains``; at most 8, a cluster's portable size.
        stages: tiles of K and of V in shared memory.
    """

    splits: int
    stages: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.splits <= 8 or self.chains % self.splits:
            raise ValueError(f"splits must be 1 to 8 and divide chains, got splits {self.splits} and chains {self.chains}")
        if not 2 <= self.stages <= 8:
            raise ValueError(f"stages must be 2 to 8, got {self.stages}")

    def shared_memory(self, group: int, head_size: int) -> int:
        """Bytes of shared memory that a CTA takes."""
        settings: dict[str, Any] = dataclasses.asdict(self)
        sizes = {"B": 1, "N": group, "P": 1, "K": 1, "Z": 8, "H": head_size, "M": 1}
        return Shape(**settings, **sizes, scale=1.0, sliding_window=None, soft_cap=None, return_lse=False).shared_memory

    def fits(self, group: int, head_size: int, ctas: int = 1) -> bool:
        """Whether so many CTAs fit into the shared memory of one multiprocessor."""
        return ctas * (self.shared_memory(group, head_size) + _RESERVED) <= _SHARED_MEMORY


def tiling_for(head_size: int, device: Device) -> Tiling:
    """The tuned tiling for this device and head size, else what is best on an H200."""
    tuned = tuning.lookup(device.kind, "paged_attention", "mosaic_gpu", head_size=head_size, itemsize=2)
    if tuned is not None:
        return Tiling(**tuned)
    return Tiling(128, 8) if head_size <= 64 else Tiling(64, 8)


# CTAs for each (row, KV head) that were fastest where there are more of these than multiprocessors, up to so many times more:
# the aim is that no multiprocessor gets much more to do than others. Beyond, one.
_SPLITS = ((4 / 3, 4), (1.6, 2), (2.0, 1), (4.0, 2), (math.inf, 1))


def config_for(num_rows: int, num_kv_heads: int, head_size: int, group: int, tiling: Tiling) -> Config:
    """Settings for a batch of ``num_rows`` (B), measured on an H200 at G = 4 and Z = 16; see the README of pallas_kernels.

    Few rows get as many CTAs each as do not make more than one for each multiprocessor, many rows what ``_SPLITS`` says. Two
    stages are enough where a multiprocessor has several CTAs, and more of them fit.
    """
    items = num_rows * num_kv_heads
    wanted = _NUM_SMS // items or next(splits for bound, splits in _SPLITS if items <= bound * _NUM_SMS)
    splits = max(n for n in (1, 2, 4, 8) if tiling.chains % n == 0 and n <= wanted)
    config = Config(tiling.tile, tiling.chains, splits, 3 if items * splits <= _NUM_SMS else 2)
    if not config.fits(group, head_size):
        config = dataclasses.replace(config, stages=2)
    while not config.fits(group, head_size) and config.splits < 8 and tiling.chains % (2 * config.splits) == 0:
        config = dataclasses.replace(config, splits=2 * config.splits)
    return config


def supports(problem: DecodeProblem) -> str | None:
    """Why the kernel does not serve a problem on a Hopper GPU; ``None`` if it does."""
    pool = problem.pool
    if pool.dtype not in ("bfloat16", "float16"):
        return f"it serves bfloat16 and float16, got {pool.dtype}; 'pallas_triton' serves float32"
    if pool.head_size % 64 or pool.head_size > MAX_HEAD:
        return f"it serves head sizes 64, 128, 192 and 256, got {pool.head_size}; 'pallas_triton' serves others"
    if problem.group > MAX_GROUP:
        return f"it serves at most {MAX_GROUP} query heads per key/value head, got {problem.group}; 'reference' serves any number"
    if pool.block_size < 8:
        return f"it serves blocks of 8 tokens and more, got {pool.block_size}; 'pallas_triton' serves smaller ones"
    rows = pool.num_physical_blocks * pool.num_kv_heads * pool.block_size
    if rows >= 1 << 31:
        return f"it serves pools of fewer than 2^31 vectors, got {rows}"
    if problem.num_rows * problem.num_heads * pool.head_size >= 1 << 30 or problem.num_rows * problem.table_width >= 1 << 31:
        return f"it serves q of fewer than 2^30 and tables of fewer than 2^31 numbers, got {problem.num_rows} rows"
    return None


def why_not(problem: DecodeProblem | None, device: Device, *, interpret: bool) -> str | None:
    """Needs compute capability 9.0 and a new jax; no interpreter knows wgmma."""
    if interpret:
        return "wgmma cannot be interpreted; 'pallas_triton_interpret' can"
    if device.compute_capability is None or device.compute_capability[0] != 9:
        return "it needs a Hopper GPU (compute capability 9.0); 'pallas_triton' serves other NVIDIA GPUs"
    if jax.__version_info__ < _OLDEST_JAX:
        return f"it needs jax {'.'.join(map(str, _OLDEST_JAX))} or newer, this is {jax.__version__}; 'pallas_triton' serves older ones"
    return None if problem is None else supports(problem)


def run(
    problem: DecodeProblem,
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    *,
    interpret: bool = False,
    config: Tiling | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """See ``pallas_kernels.paged_attention``; ``config`` (a ``Config``, or a ``Tiling`` for the rest to follow) overrides."""
    options, pool = problem.options, problem.pool
    tiling = config or tiling_for(pool.head_size, current_device())
    if not isinstance(tiling, Config):
        tiling = config_for(problem.num_rows, pool.num_kv_heads, pool.head_size, problem.group, tiling)
    out, *lse = paged_attention(
        q,
        k_pool,
        v_pool,
        block_tables,
        context_lens,
        scale=options.scale,
        sliding_window=options.sliding_window,
        soft_cap=options.soft_cap,
        return_lse=options.return_lse,
        config=tiling,
    )
    return out, lse[0] if lse else None


# A jit of its own: a model that calls the kernel once a layer lowers it once.
@functools.partial(jax.jit, static_argnames=("scale", "sliding_window", "soft_cap", "return_lse", "config"))
def paged_attention(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    *,
    config: Config,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    return_lse: bool = False,
) -> tuple[jax.Array, ...]:
    """The kernel, for arguments that ``pallas_kernels.paged_attention`` has validated and ``supports`` lets pass.

    Args:
        q: ``[B, N, H]``, bfloat16 or float16.
        k_pool: ``[P, K, Z, H]``, of q's dtype.
        v_pool: ``[P, K, Z, H]``.
        block_tables: ``int32[B, M]``; entries behind a row's context are not used.
        context_lens: ``int32[B]``.
        config: settings.
        scale: factor on the logits.
        sliding_window: attend to the last so many tokens only.
        soft_cap: bound of the logits.
        return_lse: return the log-sum-exp too.

    Returns:
        ``(out [B, N, H],)`` or ``(out, lse float32[B, N])``.

    Raises:
        ValueError: ``config`` needs more shared memory than there is.
    """
    # Only here: it needs a jax that has Mosaic GPU.
    from pallas_kernels.paged_attention import mosaic_decode

    rows, heads, head_size = q.shape
    blocks, kv_heads, block_size, _ = k_pool.shape
    group = heads // kv_heads
    if not config.fits(group, head_size):
        raise ValueError(
            f"{config} needs {config.shared_memory(group, head_size)} bytes of shared memory for head size {head_size} and group "
            f"{group}; a CTA has {_SHARED_MEMORY - _RESERVED}"
        )
    shape = Shape(
        B=rows,
        N=heads,
        P=blocks,
        K=kv_heads,
        Z=block_size,
        H=head_size,
        M=block_tables.shape[1],
        tile=config.tile,
        stages=config.stages,
        chains=config.chains,
        splits=config.splits,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        return_lse=return_lse,
    )
    return mosaic_decode.call(shape, q, k_pool, v_pool, block_tables, context_lens)
