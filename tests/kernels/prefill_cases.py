"""Ragged prefill batches with NaN wherever nobody may look, and what attention over them is, in NumPy float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import paged_prefill_attention

ANYWHERE = ("reference", "pallas_triton_interpret")
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
    left_behind=None,
):
    """Random rows in shuffled blocks. NaN is in every cell that no row owns, in the null block and in the pads' queries.

    With `left_behind`, a sliding window's size, NaN is also in the cells that it has left behind, and their blocks are gone.
    """
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
        lowest = max(0, length - query_lens[row] - left_behind + 1) if left_behind and query_lens[row] else 0
        gone = lowest // block_size
        tables[row, gone:num_blocks] = ids[gone:]
        cells = np.arange(lowest, length)
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
        if sliding_window is not None:
            k, v = (x.copy() for x in (k, v))
            for x in (k, v):
                x[:, : max(0, context - num - sliding_window + 1)] = 0
        queries = q[mine].reshape(num, kv_heads, -1, size).transpose(1, 2, 0, 3)
        logits = queries @ k[:, None].swapaxes(2, 3) * scale
        if soft_cap is not None:
            logits = soft_cap * np.tanh(logits / soft_cap)
        query, key = np.arange(context - num, context)[:, None], np.arange(context)[None, :]
        visible = (key <= query) & (key > query - (sliding_window or context))
        logits = np.where(visible, logits, -np.inf)
        top = logits.max(-1, keepdims=True)
        weights = np.exp(logits - top)
        total = weights.sum(-1, keepdims=True)
        out[mine] = (weights @ v[:, None] / total).transpose(2, 0, 1, 3).reshape(num, heads, size)
        lse[mine] = (top + np.log(total))[..., 0].transpose(2, 0, 1).reshape(num, heads)
    return out, lse


def check(case, implementation, **options):
    """The op agrees with the oracle: values, log-sum-exp, and exact zeros where there is nothing to attend to."""
    tolerance = float32_tolerance(max(case.context_lens)) if case.q.dtype == jnp.float32 else NARROW_TOLERANCE
    got, got_lse = paged_prefill_attention(*case.arrays, **options, return_lse=True, implementation=implementation)
    assert got.dtype == case.q.dtype
    assert got_lse.dtype == jnp.float32
    got, got_lse = np.asarray(got.astype(jnp.float32)), np.asarray(got_lse)
    want, want_lse = oracle(case, **options)
    nothing = np.isneginf(want_lse)
    np.testing.assert_array_equal(np.isneginf(got_lse), nothing)
    np.testing.assert_array_equal(got[nothing], 0)
    assert np.linalg.norm(got - want) <= tolerance * np.linalg.norm(want)
    # The log-sum-exp of exact inputs is float32 work whatever the dtype: a few eps of the largest logit. Tensor cores cut off
    # the partial sums of a logit, once in 16 products, and no partial sum exceeds |q| |k|.
    atol = 5e-6
    if case.q.dtype != jnp.float32:
        size = case.q.shape[2]
        longest = [float(np.sqrt(np.nansum(np.asarray(x.astype(jnp.float32)) ** 2, axis=-1)).max()) for x in (case.q, case.k_pool)]
        atol += 2**-23 * (size / 16) * options.get("scale", size**-0.5) * longest[0] * longest[1]
    np.testing.assert_allclose(got_lse[~nothing], want_lse[~nothing], rtol=2e-6, atol=atol)
