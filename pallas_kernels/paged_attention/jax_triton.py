"""Paged decode attention through the official Triton bindings (``jax_triton``): the algorithm of ``pallas_triton.py``.

It runs only when it is named, and stands in for the day on which Pallas drops its Triton lowering. Needs the packages
``jax-triton`` and ``triton`` (0.3.1 and 3.6 work together with jax 0.11.2).
"""

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: ANN001, ANN202  (Triton gives annotations of a kernel's parameters a meaning of its own)

import jax
import jax.numpy as jnp

try:
    import jax_triton as jt
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError(f"{error}; pip install jax-triton==0.3.1 triton==3.6.0") from error

from pallas_kernels._dispatch import Device, current_device
from pallas_kernels.paged_attention import DecodeProblem, pallas_triton
from pallas_kernels.paged_attention.split import MIN_DOT, TileConfig, most_splits, most_tokens, next_power_of_two, shrink, tile_config

_NEG = tl.constexpr(-1e30)
_MERGE = tl.constexpr(16)


def why_not(problem: DecodeProblem | None, device: Device, *, interpret: bool) -> str | None:
    """Needs an NVIDIA GPU; serves the same shapes as ``pallas_triton``."""
    reason = pallas_triton.why_not(problem, device, interpret=False)
    return reason.partition(";")[0] if reason and problem is None else reason


def run(
    problem: DecodeProblem,
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    *,
    interpret: bool,
    config: TileConfig | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """See ``pallas_kernels.paged_attention``; ``config`` overrides the tuned settings."""
    rows, heads, head_size = q.shape
    pool, options, device = problem.pool, problem.options, current_device()
    config = shrink(config or tile_config(problem, device, "pallas_triton"), most_tokens(problem))
    splits = most_splits(most_tokens(problem), config)
    whole = [jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((rows, heads), jnp.float32)]
    parts = [jax.ShapeDtypeStruct((rows, heads, splits, head_size), jnp.float32), jax.ShapeDtypeStruct((rows, heads, splits), jnp.float32)]
    if splits == 1:  # the kernel has parameters for them and never touches them
        parts = [jax.ShapeDtypeStruct((1,), jnp.float32)] * 2
    assert device.compute_capability is not None  # why_not saw to it
    major, minor = device.compute_capability
    shared = {
        "compute_capability": 10 * major + minor,
        "CAPACITY": problem.table_width * pool.block_size,
        "WINDOW": options.sliding_window or 0,
        "STEP": min(pool.block_size, config.tile),
        "TILE": config.tile,
        "DIRECT": config.direct,
        "CHUNK": config.chunk,
        "MAX_SPLITS": config.max_splits,
        "SPLITS": splits,
        "N": heads,
        "H": head_size,
        "WIDTH": next_power_of_two(max(head_size, MIN_DOT)),
    }
    out, lse, *partial = jt.triton_call(
        q,
        k_pool,
        v_pool,
        block_tables,
        context_lens,
        kernel=_attend,
        name="paged_attention_jax_triton",
        out_shape=[*whole, *parts],
        grid=(pool.num_kv_heads, splits, rows),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        K=pool.num_kv_heads,
        M=problem.table_width,
        Z=pool.block_size,
        ROWS=MIN_DOT,
        SCALE=options.scale,
        SOFT_CAP=options.soft_cap or 0.0,
        PRECISION="ieee" if pool.dtype == "float32" else "tf32",
        **shared,
    )
    if splits > 1:
        out, lse = jt.triton_call(
            *partial,
            context_lens,
            out,
            lse,
            kernel=_merge,
            name="paged_attention_merge_jax_triton",
            out_shape=whole,
            grid=(heads, rows, 1),
            input_output_aliases={3: 0, 4: 1},
            num_warps=4,
            num_stages=1,
            **shared,
        )
    return out, lse if options.return_lse else None


@triton.jit
def _span(lens, row, CAPACITY: tl.constexpr, WINDOW: tl.constexpr, STEP: tl.constexpr):
    """First visible token, first token to read and the context length of a row; see ``pallas_triton._span``."""
    context_len = tl.minimum(tl.load(lens + row), CAPACITY)
    first = context_len * 0
    if WINDOW > 0:
        first = tl.maximum(context_len - WINDOW, 0)
    return first, first // STEP * STEP, context_len


@triton.jit
def _share(tokens, TILE: tl.constexpr, DIRECT: tl.constexpr, CHUNK: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """Tokens per split; see ``split.tokens_per_split``."""
    splits = tl.minimum(tl.maximum((tokens + CHUNK - 1) // CHUNK, 1), MAX_SPLITS)
    splits = tl.where(tokens <= DIRECT, 1, splits)
    return tl.maximum(((tokens + splits - 1) // splits + TILE - 1) // TILE * TILE, TILE)


@triton.jit
def _attend(
    q,
    k_pool,
    v_pool,
    table,
    lens,
    out,
    lse,
    part,
    part_lse,
    CAPACITY: tl.constexpr,
    WINDOW: tl.constexpr,
    STEP: tl.constexpr,
    TILE: tl.constexpr,
    DIRECT: tl.constexpr,
    CHUNK: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    SPLITS: tl.constexpr,
    N: tl.constexpr,
    H: tl.constexpr,
    WIDTH: tl.constexpr,
    K: tl.constexpr,
    M: tl.constexpr,
    Z: tl.constexpr,
    ROWS: tl.constexpr,
    SCALE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    kv_head, split, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    G: tl.constexpr = N // K
    first_seen, origin, context_len = _span(lens, row, CAPACITY, WINDOW, STEP)
    share = _share(context_len - origin, TILE, DIRECT, CHUNK, MAX_SPLITS)
    start = origin + split * share
    end = tl.minimum(start + share, context_len)
    lane = tl.arange(0, WIDTH)[None, :]
    g = tl.arange(0, ROWS)
    cell = tl.arange(0, TILE)
    live = (g < G)[:, None] & (lane < H)
    head = row * N + kv_head * G + g
    if start < context_len:
        queries = tl.load(q + head[:, None] * H + lane, mask=live, other=0.0)
        acc = tl.zeros((ROWS, WIDTH), tl.float32)
        top = tl.full((ROWS,), _NEG, tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        token = start + cell
        ids = tl.load(table + row * M + token // Z, mask=token < end, other=0)
        for i in range((end - start + TILE - 1) // TILE):
            token = start + i * TILE + cell
            after = token + TILE
            # One step ahead: see the module docstring of pallas_triton.
            next_ids = tl.load(table + row * M + after // Z, mask=after < end, other=0)
            seen = (token >= first_seen) & (token < end)
            at = (ids.to(tl.int64) * K + kv_head) * (Z * H) + token % Z * H
            mask = seen[:, None] & (lane < H)
            k = tl.load(k_pool + at[:, None] + lane, mask=mask, other=0.0)
            logits = tl.dot(queries, tl.trans(k), input_precision=PRECISION) * SCALE
            if SOFT_CAP > 0:
                logits = SOFT_CAP * (1 - 2 / (tl.exp(2 * logits / SOFT_CAP) + 1))  # tanh
            logits = tl.where(seen[None, :], logits * 1.4426950408889634, _NEG)
            new_top = tl.maximum(top, tl.max(logits, 1))
            decay = tl.exp2(top - new_top)
            p = tl.exp2(logits - new_top[:, None])
            v = tl.load(v_pool + at[:, None] + lane, mask=mask, other=0.0)
            acc = acc * decay[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
            total = total * decay + tl.sum(p, 1)
            top = new_top
            ids = next_ids
        acc = acc / total[:, None]
        lse2 = top + tl.log2(total)
        if (split == 0) & (end == context_len):
            tl.store(out + head[:, None] * H + lane, acc.to(out.dtype.element_ty), mask=live)
            tl.store(lse + head, lse2 * 0.6931471805599453, mask=g < G)
        elif SPLITS > 1:
            at_part = head * SPLITS + split
            tl.store(part + at_part[:, None] * H + lane, acc, mask=live)
            tl.store(part_lse + at_part, lse2, mask=g < G)
    elif (split == 0) & (context_len <= 0):
        tl.store(out + head[:, None] * H + lane, tl.zeros((ROWS, WIDTH), out.dtype.element_ty), mask=live)
        tl.store(lse + head, tl.full((ROWS,), float("-inf"), tl.float32), mask=g < G)


@triton.jit
def _merge(
    part,
    part_lse,
    lens,
    out_in,  # the same memory as out
    lse_in,
    out,
    lse,
    CAPACITY: tl.constexpr,
    WINDOW: tl.constexpr,
    STEP: tl.constexpr,
    TILE: tl.constexpr,
    DIRECT: tl.constexpr,
    CHUNK: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    SPLITS: tl.constexpr,
    N: tl.constexpr,
    H: tl.constexpr,
    WIDTH: tl.constexpr,
):
    head, row = tl.program_id(0), tl.program_id(1)
    _, origin, context_len = _span(lens, row, CAPACITY, WINDOW, STEP)
    share = _share(context_len - origin, TILE, DIRECT, CHUNK, MAX_SPLITS)
    splits = (context_len - origin + share - 1) // share
    lane = tl.arange(0, WIDTH)
    at = (row * N + head) * SPLITS
    if splits > 1:
        acc = tl.zeros((WIDTH,), tl.float32)
        top = tl.full((), _NEG, tl.float32)
        total = tl.zeros((), tl.float32)
        for i in range((splits + _MERGE - 1) // _MERGE):
            split = i * _MERGE + tl.arange(0, _MERGE)
            lse2 = tl.load(part_lse + at + split, mask=split < splits, other=_NEG)
            mask = (split < splits)[:, None] & (lane < H)[None, :]
            x = tl.load(part + (at + split)[:, None] * H + lane[None, :], mask=mask, other=0.0)
            new_top = tl.maximum(top, tl.max(lse2, 0))
            decay = tl.exp2(top - new_top)
            weight = tl.exp2(lse2 - new_top)
            acc = acc * decay + tl.sum(weight[:, None] * x, 0)
            total = total * decay + tl.sum(weight, 0)
            top = new_top
        tl.store(out + (row * N + head) * H + lane, (acc / total).to(out.dtype.element_ty), mask=lane < H)
        tl.store(lse + row * N + head, (top + tl.log2(total)) * 0.6931471805599453)
