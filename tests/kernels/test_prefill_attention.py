"""Paged prefill attention against a NumPy float64 oracle: the reference, and the Triton kernel in the interpreter, by name."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_prefill_attention
from pallas_kernels.prefill_attention.tiles import num_query_tiles, packed_index, query_tiles
from tests.kernels.prefill_cases import ANYWHERE, NARROW_TOLERANCE, check, make_case, oracle

# First chunk, row without anything, prefix hit with one query, later chunk, row that ends on a block border, idle row.
MIXED = {"query_lens": [5, 0, 1, 21, 9, 0], "context_lens": [5, 0, 40, 47, 48, 7], "num_tokens": 40}


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8, 16])
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
    check(make_case(**MIXED, left_behind=options.get("sliding_window")), implementation, **options)


# Rows of several tiles of queries and of keys, whose windows start, end and lie within a tile.
@pytest.mark.parametrize("sliding_window", [None, 5, 33, 64, 150])
@pytest.mark.parametrize("implementation", ANYWHERE)
def test_rows_of_many_tiles(implementation, sliding_window):
    case = make_case([70, 1, 40], [70, 130, 163], num_tokens=120, group=4, kv_heads=1, left_behind=sliding_window)
    check(case, implementation, sliding_window=sliding_window)


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


@pytest.mark.parametrize(
    ("head_size", "block_size", "dtype"),
    [(80, 16, "float32"), (64, 32, "bfloat16"), (96, 8, "float16"), (128, 128, "bfloat16"), (256, 64, "float32")],
)
@pytest.mark.parametrize("implementation", ANYWHERE)
def test_head_sizes_block_sizes_and_dtypes(implementation, head_size, block_size, dtype):
    case = make_case([33, 3], [70, 3], num_tokens=40, head_size=head_size, block_size=block_size, dtype=dtype)
    check(case, implementation)


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


def test_a_row_is_bit_equal_in_batches_of_any_size():
    """Other buckets of tokens and of rows: the kernel's tiles do not follow them. (The reference's do.)"""
    rng = np.random.default_rng(4)
    queries = rng.integers(1, 9, 16)
    case = make_case(queries.tolist(), (queries + rng.integers(0, 60, 16)).tolist(), kv_heads=1)
    q, k, v, tables, start, contexts = case.arrays
    whole = paged_prefill_attention(*case.arrays, implementation="pallas_triton_interpret")
    for rows in (1, 2, 7):
        end = int(start[rows])
        arrays = q[:end], k, v, tables[:rows], start[: rows + 1], contexts[:rows]
        np.testing.assert_array_equal(paged_prefill_attention(*arrays, implementation="pallas_triton_interpret"), whole[:end])


@pytest.mark.parametrize("implementation", ANYWHERE)
def test_a_context_beyond_the_table_ends_with_it(implementation):
    q, k, v, tables, start, contexts = make_case([4, 2], [24, 16], width=3).arrays
    at_most, more = (
        paged_prefill_attention(q, k, v, tables, start, lens, implementation=implementation)
        for lens in (contexts, contexts.at[0].set(2**31 - 1))
    )
    np.testing.assert_array_equal(at_most, more)


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
        row, first, count, position, context_len = (np.asarray(x) for x in tiles)
        seen = np.concatenate([np.arange(f, f + n) for f, n in zip(first, count, strict=True)])
        np.testing.assert_array_equal(np.sort(seen), np.arange(tokens))
        for c, f, n, p, context in zip(row, first, count, position, context_len, strict=True):
            if n and f < start[-1]:
                assert start[c] <= f
                assert f + n <= start[c + 1]
                assert p == contexts[c] - (start[c + 1] - f)
                assert context == contexts[c]
            elif n:
                assert p + n <= 0  # pads see nothing
                assert context == 0
        place = np.asarray(find(start))
        np.testing.assert_array_equal(first[place // tile] + place % tile, np.arange(tokens))
