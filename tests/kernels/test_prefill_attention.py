"""Paged prefill attention against a NumPy float64 oracle, for every implementation by name."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import paged_prefill_attention
from pallas_kernels.prefill_attention import describe
from pallas_kernels.prefill_attention.tiles import num_query_tiles, packed_index, query_tiles
from tests.kernels.h200 import compile_for_h200, needs_compiler

ANYWHERE = ("reference", "pallas_triton_interpret")
KERNELS = ("pallas_triton", "mosaic_gpu")
# Relative error in norm. float32: each logit and each sum carries some eps (1.2e-7); errors of a sum grow like its root.
# bfloat16 and float16: inputs are exact here, the weights are rounded once to eps / 2 = 2e-3 and averaged.
NARROW_TOLERANCE = 5e-3


def float32_tolerance(context):
    return 2e-6 * np.sqrt(max(context, 1))


@dataclasses.dataclass(frozen=True)
class Case:
    """Arguments of the op, and what the oracle needs."""

    q: jax.Array
    k_pool: jax.Array
    v_pool: jax.Array
    block_tables: np.ndarray
    query_start_loc: np.ndarray
    context_lens: np.ndarray

    @property
    def arrays(self):
        return tuple(jnp.asarray(x) for x in (self.q, self.k_pool, self.v_pool, self.block_tables, self.query_start_loc, self.context_lens))


def make_case(
    query_lens,
    context_lens,
    *,
    num_tokens=None,
    group=2,
    kv_heads=2,
    head_size=16,
    block_size=8,
    width=None,
    dtype="float32",
    seed=0,
    factor=1.0,
):
    """Random rows in shuffled blocks. NaN is in every cell that no row owns, in the null block and in the pads' queries."""
    rng = np.random.default_rng(seed)
    start = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    num_tokens = int(start[-1]) if num_tokens is None else num_tokens
    needed = [-(-n // block_size) for n in context_lens]
    width = width or max(1, *needed)
    order = rng.permutation(np.arange(1, sum(needed) + 3)).astype(np.int32)
    pool_shape = (sum(needed) + 3, kv_heads, block_size, head_size)
    q = rng.standard_normal((num_tokens, kv_heads * group, head_size)) * factor
    k, v = rng.standard_normal(pool_shape), rng.standard_normal(pool_shape)
    tables = np.zeros((len(query_lens), width), np.int32)
    owned = np.zeros((pool_shape[0], block_size), bool)
    for row, (num_blocks, length) in enumerate(zip(needed, context_lens, strict=True)):
        ids, order = order[:num_blocks], order[num_blocks:]
        tables[row, :num_blocks] = ids
        cells = np.arange(length)
        owned[ids[cells // block_size], cells % block_size] = True
    mask = owned[:, None, :, None]
    q[start[-1] :] = np.nan
    arrays = (jnp.asarray(x, dtype) for x in (q, np.where(mask, k, np.nan), np.where(mask, v, np.nan)))
    return Case(*arrays, tables, start, np.asarray(context_lens, np.int32))


def oracle(case, *, scale=None, sliding_window=None, soft_cap=None):
    """out [T, N, H] and lse [T, N] in float64, row by row on the dense keys of each."""
    q, k_pool, v_pool = (np.asarray(x.astype(jnp.float32)).astype(np.float64) for x in (case.q, case.k_pool, case.v_pool))
    tokens, heads, size = q.shape
    kv_heads = k_pool.shape[1]
    scale = size**-0.5 if scale is None else scale
    out, lse = np.zeros(q.shape), np.full((tokens, heads), -np.inf)
    for row, context in enumerate(case.context_lens):
        mine = slice(case.query_start_loc[row], case.query_start_loc[row + 1])
        num = mine.stop - mine.start
        if num == 0 or context == 0:
            continue
        k, v = (np.moveaxis(x[case.block_tables[row]], 1, 0).reshape(kv_heads, -1, size)[:, :context] for x in (k_pool, v_pool))
        logits = np.einsum("tkgh,ksh->kgts", q[mine].reshape(num, kv_heads, -1, size), k) * scale
        if soft_cap is not None:
            logits = soft_cap * np.tanh(logits / soft_cap)
        query, key = np.arange(context - num, context)[:, None], np.arange(context)[None, :]
        visible = (key <= query) & (key > query - (sliding_window or context))
        logits = np.where(visible, logits, -np.inf)
        top = logits.max(-1, keepdims=True)
        weights = np.exp(logits - top)
        total = weights.sum(-1, keepdims=True)
        out[mine] = (np.einsum("kgts,ksh->kgth", weights, v) / total).transpose(2, 0, 1, 3).reshape(num, heads, size)
        lse[mine] = (top + np.log(total))[..., 0].transpose(2, 0, 1).reshape(num, heads)
    return out, lse


def check(case, implementation, tolerance=None, **options):
    """The op agrees with the oracle: values, log-sum-exp, and exact zeros where there is nothing to attend to."""
    tolerance = tolerance or float32_tolerance(max(case.context_lens))
    got, got_lse = paged_prefill_attention(*case.arrays, **options, return_lse=True, implementation=implementation)
    assert got.dtype == case.q.dtype
    assert got_lse.dtype == jnp.float32
    got, got_lse = np.asarray(got.astype(jnp.float32)), np.asarray(got_lse)
    want, want_lse = oracle(case, **options)
    nothing = np.isneginf(want_lse)
    np.testing.assert_array_equal(np.isneginf(got_lse), nothing)
    np.testing.assert_array_equal(got[nothing], 0)
    assert np.linalg.norm(got - want) <= tolerance * np.linalg.norm(want)
    # The log-sum-exp of exact inputs is float32 work whatever the dtype: a few eps of the largest logit.
    np.testing.assert_allclose(got_lse[~nothing], want_lse[~nothing], rtol=2e-6, atol=5e-6)


# First chunk, row without anything, prefix hit with one query, later chunk, row that ends on a block border, idle row.
MIXED = {"query_lens": [5, 0, 1, 21, 9, 0], "context_lens": [5, 0, 40, 47, 48, 7], "num_tokens": 40}


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("implementation", ANYWHERE)
def test_every_group(implementation, group):
    check(make_case(**MIXED, group=group, kv_heads=1 if group > 4 else 2), implementation)


@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": 1},
        {"sliding_window": 8, "scale": 0.5},
        {"soft_cap": 1.5},
        {"sliding_window": 19, "soft_cap": 3.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("implementation", ANYWHERE)
def test_options(implementation, options):
    check(make_case(**MIXED), implementation, **options)


@pytest.mark.parametrize("implementation", ANYWHERE)
def test_block_borders_first_chunks_later_chunks_and_prefix_hits(implementation):
    contexts = [1, 7, 8, 9, 48] * 2
    queries = [1, 7, 8, 9, 48, 1, 1, 1, 2, 9]
    case = make_case(queries, contexts, width=6)
    assert case.context_lens[4] == case.block_tables.shape[1] * 8  # a full table
    check(case, implementation)


@pytest.mark.parametrize(("tokens", "context", "pads"), [(1, 1, 0), (1, 30, 16)])
@pytest.mark.parametrize("implementation", ANYWHERE)
def test_one_row(implementation, tokens, context, pads):
    check(make_case([tokens], [context], num_tokens=tokens + pads), implementation)


@pytest.mark.parametrize(("head_size", "block_size", "dtype"), [(80, 16, "float32"), (64, 32, "bfloat16"), (96, 8, "float16")])
@pytest.mark.parametrize("implementation", ANYWHERE)
def test_head_sizes_block_sizes_and_dtypes(implementation, head_size, block_size, dtype):
    case = make_case([33, 3], [70, 3], num_tokens=40, head_size=head_size, block_size=block_size, dtype=dtype)
    check(case, implementation, None if dtype == "float32" else NARROW_TOLERANCE)


@pytest.mark.parametrize("implementation", ANYWHERE)
def test_huge_logits_stay_finite(implementation):
    case = make_case(**MIXED, factor=3e3)  # logits up to about 1e4, where float32 resolves 1e-3
    got = paged_prefill_attention(*case.arrays, implementation=implementation)
    want, _ = oracle(case)
    assert np.linalg.norm(np.asarray(got) - want) < NARROW_TOLERANCE * np.linalg.norm(want)


@pytest.mark.parametrize("implementation", ANYWHERE)
def test_nothing_to_do(implementation):
    for queries, contexts in (([0, 0], [0, 9]), ([0], [0])):
        case = make_case(queries, contexts, num_tokens=5)
        out, lse = paged_prefill_attention(*case.arrays, return_lse=True, implementation=implementation)
        np.testing.assert_array_equal(out, 0)
        np.testing.assert_array_equal(lse, -np.inf)
    case = make_case([3], [3])
    q, k, v, tables, start, contexts = case.arrays
    assert paged_prefill_attention(q[:0], k, v, tables, start * 0, contexts).shape == (0, 4, 16)
    out, lse = paged_prefill_attention(q, k, v, tables[:0], start[:1], contexts[:0], return_lse=True)
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(lse, -np.inf)


@pytest.mark.parametrize("implementation", ANYWHERE)
def test_renamed_blocks_change_no_bit(implementation):
    case = make_case(**MIXED)
    order = np.random.default_rng(5).permutation(np.arange(1, case.k_pool.shape[0]))
    new_of_old = np.concatenate([[0], order]).astype(np.int32)
    old_of_new = np.argsort(new_of_old)
    renamed = dataclasses.replace(
        case, k_pool=case.k_pool[old_of_new], v_pool=case.v_pool[old_of_new], block_tables=new_of_old[case.block_tables]
    )
    first, second = (paged_prefill_attention(*c.arrays, implementation=implementation) for c in (case, renamed))
    assert np.isfinite(first).all()
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("implementation", ANYWHERE)
def test_a_row_does_not_depend_on_the_others(implementation):
    case = make_case(**MIXED)
    q, k, v, tables, start, contexts = case.arrays
    whole = paged_prefill_attention(*case.arrays, implementation=implementation)
    for row in (2, 3):  # alone in the same buckets, at another place in the packing
        mine = slice(int(start[row]), int(start[row + 1]))
        num = mine.stop - mine.start
        alone_q = jnp.full_like(q, jnp.nan).at[:num].set(q[mine])
        alone_start = jnp.full_like(start, num).at[0].set(0)
        alone_tables = jnp.zeros_like(tables).at[0].set(tables[row])
        alone_contexts = jnp.zeros_like(contexts).at[0].set(contexts[row])
        alone = paged_prefill_attention(alone_q, k, v, alone_tables, alone_start, alone_contexts, implementation=implementation)
        np.testing.assert_array_equal(alone[:num], whole[mine])


@pytest.mark.parametrize("implementation", ANYWHERE)
def test_rows_may_share_blocks(implementation):
    case = make_case([4, 4], [24, 24], width=4)
    shared = dataclasses.replace(case, block_tables=np.stack([case.block_tables[0], case.block_tables[0]]))
    q, *rest = shared.arrays
    out = paged_prefill_attention(q.at[4:].set(q[:4]), *rest, implementation=implementation)
    np.testing.assert_array_equal(out[:4], out[4:])
    check(shared, implementation)


@pytest.mark.parametrize("implementation", ANYWHERE)
def test_chunks_equal_the_whole(implementation):
    case = make_case([40], [40])
    q, k, v, tables, _, _ = case.arrays
    whole = paged_prefill_attention(*case.arrays, implementation=implementation)
    parts, done = [], 0
    for chunk in (1, 8, 15, 16):
        here = np.full((16, *q.shape[1:]), np.nan, np.float32)
        here[:chunk] = q[done : done + chunk]
        start, context = jnp.asarray([0, chunk], jnp.int32), jnp.asarray([done + chunk], jnp.int32)
        parts.append(paged_prefill_attention(here, k, v, tables, start, context, implementation=implementation)[:chunk])
        done += chunk
    assert done == 40
    # Other chunks are other matrix products, which may sum in another order: some eps of values around 1.
    np.testing.assert_allclose(jnp.concatenate(parts), whole, rtol=0, atol=4e-6)


@pytest.mark.parametrize(
    ("implementation", "options"), [("reference", {}), ("pallas_triton_interpret", {"sliding_window": 9, "soft_cap": 2.0})], ids=str
)
def test_gradient_is_the_dense_one(implementation, options):
    case = make_case([3, 0, 8], [3, 0, 14], num_tokens=12)
    q, k_pool, v_pool, *rest = case.arrays
    weights = jnp.asarray(np.random.default_rng(9).standard_normal(q.shape), jnp.float32)
    window, cap = options.get("sliding_window", 1000), options.get("soft_cap")

    def dense(q, k_pool, v_pool):
        total, lse_total = 0.0, 0.0
        for row, context in enumerate(case.context_lens.tolist()):
            mine = slice(int(case.query_start_loc[row]), int(case.query_start_loc[row + 1]))
            num = mine.stop - mine.start
            if num == 0:
                continue
            cells = np.arange(context)
            ids = case.block_tables[row][cells // 8]
            k, v = k_pool[ids, :, cells % 8], v_pool[ids, :, cells % 8]
            logits = jnp.einsum("tkgh,skh->kgts", q[mine].reshape(num, 2, 2, 16), k, precision="highest") * 16**-0.5
            logits = logits if cap is None else cap * jnp.tanh(logits / cap)
            query, key = np.arange(context - num, context)[:, None], np.arange(context)[None, :]
            logits = jnp.where(jnp.asarray((key <= query) & (key > query - window))[None, None], logits, -jnp.inf)
            out = jnp.einsum("kgts,skh->tkgh", jax.nn.softmax(logits, -1), v, precision="highest").reshape(num, 4, 16)
            total += (out * weights[mine]).sum()
            lse_total += jax.nn.logsumexp(logits, -1).sum()
        return total + 0.1 * lse_total

    def paged(q, k_pool, v_pool):
        out, lse = paged_prefill_attention(q, k_pool, v_pool, *rest, **options, return_lse=True, implementation=implementation)
        return (out * weights).sum() + 0.1 * jnp.where(jnp.isneginf(lse), 0.0, lse).sum()

    got = jax.jit(jax.grad(paged, argnums=(0, 1, 2)))(q, k_pool, v_pool)
    want = jax.jit(jax.grad(dense, argnums=(0, 1, 2)))(q, k_pool, v_pool)
    for g, w in zip(got, want, strict=True):  # float32 sums of at most 14 terms around 1, in two different orders
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tile", [1, 4, 16])
def test_tiles_hold_each_token_once(tile):
    rng = np.random.default_rng(tile)
    rows, tokens = 5, 40
    cut = jax.jit(lambda start, contexts: query_tiles(start, contexts, num_tokens=tokens, tile=tile))
    find = jax.jit(lambda start: packed_index(start, num_tokens=tokens, tile=tile))
    for _ in range(20):
        lens = rng.integers(0, 9, rows) * rng.integers(0, 2, rows)
        start = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
        contexts = (lens + rng.integers(0, 5, rows)).astype(np.int32)
        tiles = cut(start, contexts)
        assert tiles.row.shape == (num_query_tiles(tokens, rows, tile),)
        row, first, count, position = (np.asarray(x) for x in tiles)
        seen = np.concatenate([np.arange(f, f + n) for f, n in zip(first, count, strict=True)])
        np.testing.assert_array_equal(np.sort(seen), np.arange(tokens))
        for c, f, n, p in zip(row, first, count, position, strict=True):
            if n and f < start[-1]:
                assert start[c] <= f
                assert f + n <= start[c + 1]
                assert p == contexts[c] - (start[c + 1] - f)
            elif n:
                assert p + n <= 0  # pads see nothing
        place = np.asarray(find(start))
        np.testing.assert_array_equal(first[place // tile] + place % tile, np.arange(tokens))


def bad(**changes):
    q, k, v, tables, start, contexts = make_case([3, 2], [9, 2]).arrays
    arguments = {"q": q, "k_pool": k, "v_pool": v, "block_tables": tables, "query_start_loc": start, "context_lens": contexts}
    return {**arguments, **{name: change(arguments[name]) if callable(change) else change for name, change in changes.items()}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": lambda q: q[0]}, r"q must be \[T, N, H\] \(rank 3\), got shape \(4, 16\)"),
        ({"q": lambda q: q[..., :8]}, r"q must have H = 16, got 8"),
        ({"q": lambda q: q[:, :3]}, r"query heads must be a multiple of key/value heads, got 3 and 2"),
        ({"q": lambda q: q.astype(jnp.bfloat16)}, r"q must be float32, got bfloat16"),
        ({"v_pool": lambda v: v[:-1]}, r"k_pool and v_pool must have one shape"),
        ({"block_tables": lambda t: t.astype(jnp.int16)}, r"block_tables must be int32, got int16"),
        ({"block_tables": lambda t: t[:, :0]}, r"block_tables must have at least one column, got shape \(2, 0\)"),
        ({"query_start_loc": lambda s: s[:-1]}, r"query_start_loc must have C1 = 3, got 2"),
        ({"context_lens": lambda c: c[:-1]}, r"context_lens must have C = 2, got 1"),
        ({"sliding_window": 0}, r"sliding_window must be at least 1, got 0"),
        ({"soft_cap": 0.0}, r"soft_cap must be positive and finite, got 0.0"),
        ({"scale": float("nan")}, r"scale must be finite, got nan"),
        ({"implementation": "flash"}, r"has no implementation 'flash'; it has reference, pallas_triton"),
    ],
)
def test_wrong_arguments(changes, message):
    with pytest.raises(ValueError, match=message):
        paged_prefill_attention(**bad(**changes))


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="asks for what a CPU cannot do")
@pytest.mark.parametrize(
    ("implementation", "message"),
    [("pallas_triton", "needs an NVIDIA GPU of compute capability 8.0"), ("mosaic_gpu", "needs a Hopper GPU")],
)
def test_kernels_need_their_device(implementation, message):
    with pytest.raises(NotImplementedError, match=message):
        paged_prefill_attention(**bad(), implementation=implementation)


def specs(*, dtype="bfloat16", head_size=128, block_size=16, group=4, tokens=256, **options):
    spec = jax.ShapeDtypeStruct
    pool = spec((64, 2, block_size, head_size), dtype)
    q = spec((tokens, 2 * group, head_size), dtype)
    return (q, pool, pool, spec((3, 8), jnp.int32), spec((4,), jnp.int32), spec((3,), jnp.int32)), options


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mosaic_gpu", {"dtype": "float32"}, "computes in bfloat16 or float16, got float32"),
        ("mosaic_gpu", {"head_size": 80}, "head sizes 64, 128 and 256 are supported, got 80"),
        ("mosaic_gpu", {"block_size": 4}, "block sizes 8 to 128 are supported, got 4"),
        ("mosaic_gpu", {"tokens": 8}, "at least 64 packed queries are needed, got 8"),
        ("mosaic_gpu", {"scale": -1.0}, "the scale must be positive, got -1.0"),
        ("pallas_triton", {"scale": 0.0}, "the scale must be positive, got 0.0"),
        ("pallas_triton", {"head_size": 512}, "head sizes up to 256 are supported, got 512"),
        ("pallas_triton", {"group": 256}, "up to 128 query heads per key/value head are supported, got 256"),
    ],
)
def test_what_a_kernel_does_not_serve(name, changes, message):
    arrays, options = specs(**changes)
    with pallas_kernels.compiling_for(pallas_kernels.H200):
        assert message in pallas_kernels.support("paged_prefill_attention", None, *arrays, **options).reasons[name]


@pytest.mark.parametrize(
    ("changes", "name"),
    [({}, "mosaic_gpu"), ({"head_size": 80}, "pallas_triton"), ({"dtype": "float32"}, "pallas_triton"), ({"scale": -1.0}, "reference")],
)
def test_the_choice_for_an_h200(changes, name):
    arrays, options = specs(**changes)
    with pallas_kernels.compiling_for(pallas_kernels.H200):
        assert pallas_kernels.support("paged_prefill_attention", None, *arrays, **options).implementation == name
    assert describe(*arrays, **options).group == 4


@needs_compiler
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    "changes",
    [
        {"implementation": "pallas_triton", "head_size": 80, "group": 3, "sliding_window": 100, "soft_cap": 20.0},
        {"implementation": "mosaic_gpu", "head_size": 128},
        {"implementation": "mosaic_gpu", "head_size": 64, "block_size": 64, "group": 7, "sliding_window": 100, "soft_cap": 20.0},
    ],
)
def test_kernels_compile_for_an_h200(changes):
    arrays, options = specs(**changes)
    compile_for_h200(lambda *a: paged_prefill_attention(*a, return_lse=True, **options), *arrays)


REAL = {"query_lens": [130, 0, 1, 64, 300, 5, 0, 70], "context_lens": [130, 0, 700, 1000, 1024, 5, 9, 70], "num_tokens": 700}


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    ("head_size", "group", "block_size", "dtype", "options"),
    [
        (128, 4, 16, "bfloat16", {}),
        (64, 7, 8, "float16", {"sliding_window": 100, "soft_cap": 20.0}),
        (256, 2, 128, "bfloat16", {}),
        (64, 1, 64, "bfloat16", {"sliding_window": 300}),
        (80, 3, 32, "bfloat16", {"sliding_window": 33}),
        (128, 4, 16, "float32", {"soft_cap": 30.0}),
    ],
)
@pytest.mark.parametrize("implementation", KERNELS)
def test_real_shapes(implementation, head_size, group, block_size, dtype, options):
    if implementation == "mosaic_gpu" and (head_size == 80 or dtype == "float32"):
        pytest.skip("Triton's shapes")
    case = make_case(**REAL, head_size=head_size, group=group, block_size=block_size, dtype=dtype, factor=2.0)
    check(case, implementation, None if dtype == "float32" else NARROW_TOLERANCE, **options)
    first, second = (paged_prefill_attention(*case.arrays, **options, implementation=implementation) for _ in range(2))
    np.testing.assert_array_equal(first, second)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize("implementation", KERNELS)
def test_pools_beyond_32_bit_offsets(implementation):
    """Blocks at the far end of a pool of more than 2**31 numbers: an offset that wrapped would read elsewhere."""
    small = make_case([100], [200], head_size=128, kv_heads=8, block_size=16, dtype="bfloat16")
    blocks = 2**31 // (8 * 16 * 128) + small.k_pool.shape[0]
    at = blocks - small.k_pool.shape[0]
    grow = jax.jit(lambda pool: jnp.zeros((blocks, *pool.shape[1:]), pool.dtype).at[at:].set(pool))
    large = dataclasses.replace(small, k_pool=grow(small.k_pool), v_pool=grow(small.v_pool), block_tables=small.block_tables + np.int32(at))
    near, far = (paged_prefill_attention(*c.arrays, implementation=implementation) for c in (small, large))
    np.testing.assert_array_equal(near, far)
