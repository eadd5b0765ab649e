"""NumPy float64 oracles that know nothing of the kernels, and the cases that the tests feed to both."""

import dataclasses

import jax.numpy as jnp
import numpy as np


def decode(q, k_pool, v_pool, block_tables, context_lens, *, scale=None, sliding_window=None, soft_cap=None):
    """Attention of one query token a row: out float64[B, N, H] and natural log-sum-exp float64[B, N]."""
    q, k_pool, v_pool = (np.asarray(x, np.float64) for x in (q, k_pool, v_pool))
    rows, heads, head_size = q.shape
    _, kv_heads, block_size, _ = k_pool.shape
    out, lse = np.zeros(q.shape), np.full((rows, heads), -np.inf)
    for b in range(rows):
        end = int(context_lens[b])
        positions = np.arange(0 if sliding_window is None else max(0, end - sliding_window), end)
        if not len(positions):
            continue
        blocks, offsets = np.asarray(block_tables)[b, positions // block_size], positions % block_size
        for n in range(heads):
            k, v = (pool[blocks, n // (heads // kv_heads), offsets] for pool in (k_pool, v_pool))
            logits = k @ q[b, n] * (head_size**-0.5 if scale is None else scale)
            if soft_cap is not None:
                logits = soft_cap * np.tanh(logits / soft_cap)
            weights = np.exp(logits - logits.max())
            out[b, n] = weights @ v / weights.sum()
            lse[b, n] = logits.max() + np.log(weights.sum())
    return out, lse


@dataclasses.dataclass(frozen=True)
class Case:
    """Arguments of one decode call, in float32; `cast` gives the arrays that the op sees."""

    q: np.ndarray
    k_pool: np.ndarray
    v_pool: np.ndarray
    block_tables: np.ndarray
    context_lens: np.ndarray

    def arrays(self, dtype="float32", poison=True):
        """jax arrays; with `poison` every cell that no row reaches holds NaN."""
        k_pool, v_pool = self.k_pool, self.v_pool
        if poison:
            owned = owned_cells(self.block_tables, self.context_lens, k_pool.shape[0], k_pool.shape[2])
            k_pool, v_pool = (np.where(owned[:, None, :, None], pool, np.nan) for pool in (k_pool, v_pool))
        floats = (jnp.asarray(x, jnp.dtype(dtype)) for x in (self.q, k_pool, v_pool))
        return (*floats, jnp.asarray(self.block_tables), jnp.asarray(self.context_lens))

    def rounded(self, dtype):
        """The same case with floats rounded to `dtype`, for the oracle."""
        return dataclasses.replace(self, **{name: _round(getattr(self, name), dtype) for name in ("q", "k_pool", "v_pool")})

    def rows(self, index):
        """The case with these rows alone."""
        return dataclasses.replace(self, **{name: getattr(self, name)[index] for name in ("q", "block_tables", "context_lens")})

    def oracle(self, dtype="float32", **options):
        case = self.rounded(dtype)
        return decode(case.q, case.k_pool, case.v_pool, case.block_tables, case.context_lens, **options)


def _round(x, dtype):
    return np.asarray(jnp.asarray(x, jnp.dtype(dtype)).astype(jnp.float32))


def owned_cells(block_tables, context_lens, num_blocks, block_size):
    """bool[P, Z]: the cells that some row's context reaches."""
    owned = np.zeros((num_blocks, block_size), bool)
    for table, context in zip(block_tables, context_lens, strict=True):
        positions = np.arange(context)
        owned[table[positions // block_size], positions % block_size] = True
    return owned


def make_case(contexts, *, heads, kv_heads, head_size, block_size, width=None, q_scale=1.0, seed=0):
    """Random data behind shuffled tables. Table entries that no context reaches name the null block."""
    rng = np.random.default_rng(seed)
    contexts = np.asarray(contexts, np.int32)
    rows, used = len(contexts), -(-contexts // block_size)
    width = width or max(1, int(used.max()))
    num_blocks = 1 + int(used.sum()) + 1
    tables, ids, at = np.zeros((rows, width), np.int32), rng.permutation(np.arange(1, num_blocks)), 0
    for b, count in enumerate(used):
        tables[b, :count] = ids[at : at + count]
        at += count
    pool = (num_blocks, kv_heads, block_size, head_size)
    q = rng.standard_normal((rows, heads, head_size)) * q_scale
    k, v = rng.standard_normal(pool), rng.standard_normal(pool)
    return Case(*(x.astype(np.float32) for x in (q, k, v)), tables, contexts)


def relative_error(got, want):
    """|got - want| / |want| in the 2-norm; NaN or infinity where `want` has none never passes."""
    got, want = np.asarray(jnp.asarray(got).astype(jnp.float32), np.float64), np.asarray(want, np.float64)
    return np.linalg.norm(got - want) / np.linalg.norm(want)
