"""`sample_tokens` and `token_logprobs` against a float64 oracle, and the Triton kernels in Pallas's interpreter against the reference."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import GREEDY_TEMPERATURE, Adjustments, adjusted_logits, sample_tokens, token_logprobs
from pallas_kernels.sampling import HAS_BANNED, HAS_BIAS, HAS_COUNTS
from pallas_kernels.sampling.noise import gumbel, gumbel_of_bits, threefry2x32

KERNEL = "pallas_triton_interpret"
implementations = pytest.mark.parametrize("implementation", ["reference", KERNEL])
# What an oracle's probabilities and sums may differ from float32's: a token this near to a border may fall on either side.
SLACK, TIE = 1e-5, 1e-4
# The interpreter takes seconds for a new shape, so that tests share shapes: batches are filled up to one of these.
SMALL, DRAWS, LARGE, ROWS = 8, 4096, 3000, 96


@dataclasses.dataclass(frozen=True)
class Case:
    """NumPy arguments of one call of `sample_tokens`."""

    logits: np.ndarray
    keys: np.ndarray
    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    adjust: Adjustments | None = None
    vocab_size: int | None = None

    @property
    def arrays(self):
        return tuple(jnp.asarray(x) for x in (self.logits, self.keys, self.temperature, self.top_k, self.top_p, self.min_p))

    @property
    def size(self):
        return self.vocab_size or self.logits.shape[1]

    def rows(self, index):
        """The case with these rows alone, in this order."""
        fields = {name: getattr(self, name)[index] for name in ("logits", "keys", "temperature", "top_k", "top_p", "min_p")}
        adjust = self.adjust
        if adjust is not None:
            by_row = ("flags", "rows", "repetition", "presence", "frequency", "banned_ids")
            adjust = adjust._replace(**{name: getattr(adjust, name)[index] for name in by_row})
        return dataclasses.replace(self, **fields, adjust=adjust)

    def sample(self, implementation, rows=None):
        """Tokens; with `rows` in a batch that its own rows, again and again, fill up to this many."""
        count = len(self.logits)
        case = self if rows is None else self.rows(np.arange(rows) % count)
        adjust = None if case.adjust is None else Adjustments(*map(jnp.asarray, case.adjust))
        tokens = sample_tokens(*case.arrays, adjust=adjust, vocab_size=case.vocab_size, implementation=implementation)
        chex.assert_shape(tokens, case.temperature.shape)
        chex.assert_type(tokens, jnp.int32)
        return np.asarray(tokens)[:count]


def neutral(count, vocab, tables=2, banned=2, **fields):
    """Adjustments that change nothing, save `fields`; what has no flag is filled with what would be seen if it were read."""
    start = dict(
        flags=np.zeros(count, np.int32),
        rows=np.arange(count, dtype=np.int32) % tables,
        bias=np.full((tables, vocab), np.nan, np.float32),
        counts=np.full((tables, vocab), 7, np.int32),
        repetition=np.ones(count, np.float32),
        presence=np.zeros(count, np.float32),
        frequency=np.zeros(count, np.float32),
        banned_ids=np.zeros((count, banned), np.int32),
    )
    return Adjustments(**(start | fields))


def make_case(logits, keys=None, adjust=None, vocab_size=None, seed=0, **settings):
    """A case of `logits`, with settings that are one number or one a row and otherwise off."""
    logits = np.asarray(logits, np.float32)
    rows = len(logits)
    defaults = dict(temperature=(1.0, np.float32), top_k=(0, np.int32), top_p=(1.0, np.float32), min_p=(0.0, np.float32))
    columns = {name: np.broadcast_to(settings.get(name, off), rows).astype(dtype) for name, (off, dtype) in defaults.items()}
    if keys is None:
        keys = np.random.default_rng(seed).integers(0, 2**32, (rows, 2), np.uint32)
    return Case(logits, keys, **columns, adjust=adjust, vocab_size=vocab_size)


def oracle_adjusted(case, row):
    """float64[vocab_size]: logits of a row after bans, then bias, then penalties."""
    x = case.logits[row, : case.size].astype(np.float64)
    if case.adjust is None:
        return x
    adjust, table = case.adjust, case.adjust.rows[row]
    if adjust.flags[row] & HAS_BANNED:
        x[[i for i in adjust.banned_ids[row] if 0 <= i < len(x)]] = -np.inf
    if adjust.flags[row] & HAS_BIAS:
        x += adjust.bias[table, : len(x)]
    if adjust.flags[row] & HAS_COUNTS:
        in_output, in_prompt = divmod(adjust.counts[table, : len(x)], 2)
        for i in np.flatnonzero((in_output > 0) | (in_prompt > 0)):
            x[i] = x[i] / adjust.repetition[row] if x[i] > 0 else x[i] * adjust.repetition[row]
            if in_output[i]:
                x[i] -= adjust.presence[row] + adjust.frequency[row] * in_output[i]
    return x


def oracle_kept(x, temperature, top_k, top_p, min_p):
    """Two bool[V], what the filters leave of ``x float64[V]``: with all that is within `SLACK` of a border, and without."""
    order = np.argsort(-x, kind="stable")  # the likeliest first, the lower id first among ties
    weights = np.exp((x[order] - x.max()) / float(temperature))
    top = np.ones(len(x), bool)
    if 1 <= top_k < len(x):
        top[top_k:] = False
    share = np.where(top, weights, 0) / weights[top].sum()
    before = np.cumsum(share) - share
    both = []
    for slack in (SLACK, -SLACK):
        keep = top & (weights >= float(min_p) * (1 - slack))
        if top_p < 1:
            keep &= before < float(top_p) + slack
        keep[0] = True
        kept = np.zeros(len(x), bool)
        kept[order[keep]] = True
        both.append(kept & (x > -np.inf))
    return both


def check(case, tokens):
    """Every token is kept, and of what is kept the one with the largest sum of scaled logit and noise."""
    noise = np.asarray(gumbel(jnp.asarray(case.keys), case.size), np.float64)
    for row, token in enumerate(tokens):
        x = oracle_adjusted(case, row)
        if case.temperature[row] <= GREEDY_TEMPERATURE or x.max() == -np.inf:
            assert token == np.argmax(x), f"row {row}"
            continue
        settings = case.temperature[row], case.top_k[row], case.top_p[row], case.min_p[row]
        perhaps, surely = oracle_kept(x, *settings)
        assert perhaps[token], f"row {row}: {token} is filtered"
        value = (x - x.max()) / settings[0] + noise[row]
        best = value[surely].max()
        assert value[token] > best - TIE, f"row {row}: {token} has {value[token]}, the best {best}"


def draws(logits, implementation, count=DRAWS, rows=DRAWS, vocab_size=None, seed=0, **settings):
    """Tokens of `count` draws from one row, filled up with columns that may not come."""
    logits = np.asarray(logits, np.float32)
    width = SMALL if vocab_size is None else vocab_size
    row = np.concatenate([logits, np.full(width - len(logits), -np.inf, np.float32)])
    case = make_case(np.tile(row, (count, 1)), adjust=neutral(count, width), seed=seed, **settings)
    return case.sample(implementation, rows)


LOG = np.log([0.1, 0.2, 0.3, 0.4])
FLAT = np.zeros(SMALL)


@implementations
@pytest.mark.parametrize(
    ("logits", "settings", "expected"),
    [
        ([3, 2, 1], dict(temperature=0.5, top_p=0.8), {0}),  # softmax of [6, 4, 2] is [.867, .117, .016]
        (LOG, dict(top_k=2, top_p=0.5), {3}),  # the two left are .571 and .429
        (LOG, dict(top_p=0.6), {3, 2}),
        (LOG, dict(top_p=1e-9), {3}),
        (LOG, dict(top_p=0.0), {3}),
        (LOG, dict(top_k=3), {1, 2, 3}),
        (LOG, dict(top_k=1), {3}),
        (LOG, {}, {0, 1, 2, 3}),
        (LOG, dict(top_p=1.5, top_k=-3), {0, 1, 2, 3}),
        ([2, 1, 0, -1], dict(min_p=0.2), {0, 1}),  # relative to the likeliest: 1, .37, .14, .05
        ([2, 1, 0, -1], dict(min_p=0.2, temperature=2.0), {0, 1, 2, 3}),  # ... 1, .61, .37, .22
        ([2, 1, 0, -1], dict(min_p=1.0), {0}),
        ([1, 2, 2, 2, 3], dict(top_k=3), {1, 2, 4}),  # exactly three, lower ids first among ties
        ([1, 2, 2, 2, 3], dict(top_k=2), {1, 4}),
        (FLAT, dict(top_p=0.25), {0, 1}),  # the second reaches it exactly, and so the third is not needed
        (FLAT, dict(top_p=0.26), {0, 1, 2}),
        (FLAT, dict(top_k=5), {0, 1, 2, 3, 4}),
        (FLAT, dict(top_k=4, top_p=0.5), {0, 1}),  # half of what top-k left
        ([3, 3, 1], dict(min_p=1.0), {0, 1}),
        ([0, 0, 0, -1, -1], dict(top_p=0.9, min_p=0.5), {0, 1, 2}),
        (LOG, dict(top_k=3, top_p=0.7, min_p=0.9), {3}),
        (LOG, dict(top_k=3, top_p=0.78, min_p=0.6), {3, 2}),  # .444 .333 .222 of three: all but the third; .75 and .5 of the likeliest
    ],
)
def test_support(implementation, logits, settings, expected):
    assert set(draws(logits, implementation, count=512, **settings).tolist()) == expected


@implementations
@pytest.mark.parametrize("top_k", [0, -1, 8, 100])
def test_a_flat_row_without_filters_is_uniform(implementation, top_k):
    counts = np.bincount(draws(FLAT, implementation, 4000, top_k=top_k, seed=1), minlength=SMALL)
    assert len(counts) == SMALL
    assert ((counts - 500) ** 2 / 500).sum() < 24.32  # chi-square of 7 degrees of freedom at 0.001


@implementations
def test_what_the_filters_leave_keeps_its_proportions(implementation):
    counts = np.bincount(draws(LOG, implementation, 4000, top_k=3, top_p=0.95, seed=2), minlength=4)
    want = 4000 * np.asarray([2, 3, 4]) / 9
    assert counts[0] == 0
    assert ((counts[1:] - want) ** 2 / want).sum() < 13.82  # 2 degrees of freedom at 0.001


@implementations
@pytest.mark.parametrize("temperature", [0, 1e-6, 1e-4, 1e-2])
def test_cold_rows_take_the_argmax_beside_hot_ones(implementation, temperature):
    rng = np.random.default_rng(3)
    logits = np.round(rng.standard_normal((256, SMALL)) * 40) * 64  # numbers of bfloat16, whose neighbours at 1e4 are 64 apart
    logits[:3] = [[1e4, 9984, -1e4, 0, 0, 0, 0, 0], [-1e4] * 8, [0, 1, 1, 0, -1e4, 0, 1, 0]]
    logits = np.asarray(jnp.asarray(logits, jnp.bfloat16).astype(jnp.float32))
    alone = make_case(logits, adjust=neutral(256, SMALL), temperature=temperature, top_p=0.9)
    tokens = alone.sample(implementation, DRAWS)
    check(alone, tokens)
    assert (logits[np.arange(256), tokens] == logits.max(1)).all(), "the next is 6400 temperatures below"
    mixed = dataclasses.replace(alone, temperature=np.where(np.arange(256) % 2, 2.0, alone.temperature).astype(np.float32))
    np.testing.assert_array_equal(mixed.sample(implementation, DRAWS)[::2], tokens[::2])


@implementations
def test_greedy_takes_the_lowest_id_among_ties_whatever_its_filters(implementation):
    case = make_case(
        np.tile([1, 3, 3, 2, 3, 0, 0, 3.0], (64, 1)),
        adjust=neutral(64, SMALL),
        temperature=np.tile([0, 1e-5, -1.0, 5e-6], 16),
        top_k=np.repeat([0, 2, 100, -1], 16),
        top_p=0.01,
        min_p=0.5,
    )
    assert (case.sample(implementation, DRAWS) == 1).all()


@pytest.mark.parametrize("padding", [np.nan, np.inf, 1e30, -np.inf])
@implementations
def test_top_k_survivors_are_the_same_at_any_padding_and_batch_size(implementation, padding):
    narrow = make_case(np.tile([1, 2, 2, 2, 3], (128, 1)), top_k=np.repeat([3, 0], 64), temperature=2.0)
    want = narrow.sample(implementation)
    assert set(want[:64].tolist()) == {1, 2, 4}
    assert set(want[64:].tolist()) == {0, 1, 2, 3, 4}
    wide = np.pad(narrow.logits, ((0, 0), (0, 1500)), constant_values=padding)
    got = dataclasses.replace(narrow, logits=wide, vocab_size=5).sample(implementation)
    np.testing.assert_array_equal(got, want, err_msg="one noise an id, whatever the width")
    if implementation == "reference":  # the kernel's batch sizes: test_a_row_alone_is_the_row_in_a_batch
        np.testing.assert_array_equal(narrow.rows(slice(7, 8)).sample(implementation), want[7:8])


def adjusted_case(logits, expected, flags, counts=0, bias=0.0, **fields):
    """256 draws from a row with adjustments (in table row 1), and the same draws from the logits that they should make of it."""
    rows, fill = 256, [-50.0] * (SMALL - len(logits))
    tables = {"counts": np.zeros((2, SMALL), np.int32), "bias": np.zeros((2, SMALL), np.float32)}
    tables["counts"][1, : np.size(counts)], tables["bias"][1, : np.size(bias)] = counts, bias
    banned = np.tile(np.asarray(fields.pop("banned_ids", [0, 0]), np.int32), (rows, 1))
    columns = {name: np.full(rows, value, np.float32) for name, value in fields.items()}
    flags = np.full(rows, flags, np.int32)
    adjust = neutral(rows, SMALL, flags=flags, rows=np.ones(rows, np.int32), banned_ids=banned, **tables, **columns)
    case, plain = (np.tile([*x, *fill], (rows, 1)) for x in (logits, expected))
    settings = dict(temperature=np.tile([0.0, 1.0, 3.0, 3.0], 64), top_p=np.tile([1.0, 1.0, 1.0, 0.9], 64))
    return make_case(case, adjust=adjust, **settings), make_case(plain, adjust=neutral(rows, SMALL), **settings)


INF = float("inf")


@pytest.mark.parametrize(
    ("logits", "expected", "how"),
    [
        # id 0 in the prompt, 1 in the output
        ([2, -2, 1, 0.5], [1, -4, 1, 0.5], dict(flags=HAS_COUNTS, counts=[1, 2], repetition=2.0)),
        # ... and both in both: once all the same
        ([2, -2, 1, 0.5], [1, -4, 1, 0.5], dict(flags=HAS_COUNTS, counts=[3, 5], repetition=2.0)),
        # id 1 twice in the output: .5 + 2 * .25
        ([2, -2, 1, 0.5], [2, -3, 1, 0.5], dict(flags=HAS_COUNTS, counts=[1, 4], presence=0.5, frequency=0.25)),
        # repetition is first: 2 / 2 - .5
        ([2, 1, 1, 0.5], [0.5, 1, 1, 0.5], dict(flags=HAS_COUNTS, counts=[2], repetition=2.0, presence=0.25, frequency=0.25)),
        # and bias before it: (1 - 3) * 2, (-1 + 2) / 2
        ([1, -1, 1], [-4, 0.5, 1], dict(flags=HAS_COUNTS | HAS_BIAS, counts=[2, 1], bias=[-3, 2], repetition=2.0)),
        ([1, 2, 0], [4, 2, 0], dict(flags=HAS_BIAS, bias=[3, 0, 0])),
        ([1, 2, 0], [1, -INF, -INF], dict(flags=HAS_BIAS, bias=[0, -INF, -INF])),
        # banned is banned, whatever the bias and however negative the penalties
        ([1, 2, 0], [1, -INF, 0], dict(flags=HAS_BIAS | HAS_BANNED, bias=[0, 9, 0], banned_ids=[1, -1])),
        (
            [1, 2, 0],
            [-INF, 7, 0],
            dict(flags=HAS_COUNTS | HAS_BANNED, counts=[2, 2], presence=-5.0, banned_ids=[0, SMALL + 3]),
        ),
        # no flag, no change
        ([1, 2, 0], [1, 2, 0], dict(flags=0, counts=[9, 9], bias=[9, -9], repetition=3.0, banned_ids=[1, 2])),
        ([1, 2, 0], [10, 2, 0], dict(flags=HAS_BIAS, counts=[9, 9], bias=[9], repetition=3.0, banned_ids=[1, 2])),
    ],
)
def test_adjustments(logits, expected, how):
    case, plain = adjusted_case(logits, expected, **how)
    got = adjusted_logits(jnp.asarray(case.logits), Adjustments(*map(jnp.asarray, case.adjust)))
    np.testing.assert_array_equal(np.asarray(got), plain.logits)
    want = plain.sample("reference", DRAWS)
    check(plain, want)
    for implementation in ("reference", KERNEL):
        np.testing.assert_array_equal(case.sample(implementation, DRAWS), want, err_msg=implementation)


# (temperature, top_k, top_p, min_p): greedy, k that is picked id by id and k that is not, p, min-p, all three, none
MIX = [
    (0, 5, 0.5, 0.5),
    (1, 0, 1, 0),
    (0.7, -1, 1, 0),
    (1.3, 10**6, 2.0, 0),
    (1, 1, 1, 0),
    (0.7, 5, 1, 0),
    (1.5, 64, 1, 0),
    (1.5, 65, 1, 0),
    (2, 700, 1, 0),
    (1, 0, 0.9, 0),
    (2, 0, 0.3, 0),
    (1, 0, 1e-9, 0),
    (1, 0, 0.999, 0),
    (1.5, 0, 1, 0.1),
    (1, 0, 1, 1),
    (1.2, 40, 0.9, 0.05),
    (3, 40, 0.5, 0),
    (2, 700, 0.8, 0.01),
    (3, 300, 0.4, 0),
    (1, LARGE - 1, 0.5, 0),
    (5, 100, 1, 0.5),
    (0.02, 80, 0.7, 0.3),
    (1e-6, 0, 1, 0),
    (50, 0, 0.5, 0),
]
MIX_LOGITS = ("plain", "nearly flat", "ties", "few left")


def mixed(vocab=LARGE, vocab_size=None, adjust=False, rows=ROWS, seed=4):
    """Every setting on every sort of logits, which NaN follows beyond `vocab_size`."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((rows, vocab)).astype(np.float32)
    sort = np.arange(rows) // len(MIX) % len(MIX_LOGITS)
    logits *= np.asarray([3, 0.01, 2, 1], np.float32)[sort][:, None]
    logits[sort == 2] = np.round(logits[sort == 2])
    logits[(sort == 3)[:, None] & (rng.random(logits.shape) > 30 / vocab)] = -np.inf
    logits[:, vocab_size or vocab :] = np.nan
    names = ("temperature", "top_k", "top_p", "min_p")
    settings = dict(zip(names, np.asarray(MIX)[np.arange(rows) % len(MIX)].T, strict=True))
    likeliest = logits[:, : vocab_size or vocab].argmax(1)
    return make_case(logits, adjust=mixed_adjustments(likeliest, vocab) if adjust else None, vocab_size=vocab_size, seed=seed, **settings)


def mixed_adjustments(likeliest, vocab, tables=5, seed=5):
    """All mixtures of flags; rows share tables. Penalties are quarters, so that a fused multiply-add changes no bit."""
    rng, rows = np.random.default_rng(seed), len(likeliest)
    bias = np.where(rng.random((tables, vocab)) < 0.5, rng.integers(-8, 8, (tables, vocab)) / 4, 0)
    return Adjustments(
        flags=rng.permutation(np.arange(rows) % 8).astype(np.int32),
        rows=rng.integers(0, tables, rows).astype(np.int32),
        bias=np.where(rng.random((tables, vocab)) < 0.1, -np.inf, bias).astype(np.float32),
        counts=np.where(rng.random((tables, vocab)) < 0.6, rng.integers(0, 9, (tables, vocab)), 0).astype(np.int32),
        repetition=rng.choice([0.5, 1, 1.25, 2], rows).astype(np.float32),
        presence=rng.choice([-0.5, 0, 0.25, 1], rows).astype(np.float32),
        frequency=rng.choice([-0.25, 0, 0.25], rows).astype(np.float32),
        banned_ids=np.stack([rng.integers(0, 40, rows), likeliest, np.full(rows, -1)], 1).astype(np.int32),
    )


ADJUSTED = dict(vocab_size=2500, adjust=True)  # one shape of several tests


@pytest.mark.parametrize(
    "how",
    [
        {},
        ADJUSTED,
        dict(vocab=9000, vocab_size=8200, adjust=True),  # several tiles of every sweep, and a last one that is nearly empty
        dict(vocab=700, vocab_size=699),
    ],
)
def test_kernel_and_reference_are_the_oracle_token_for_token(how):
    case = mixed(**how)
    want = case.sample("reference")
    check(case, want)
    np.testing.assert_array_equal(case.sample(KERNEL), want)


def test_adjustments_of_the_mixture_matter():
    """Otherwise the test above would show little of them."""
    case = mixed(**ADJUSTED)
    plain = dataclasses.replace(case, adjust=None).sample("reference")
    changed = case.sample("reference") != plain
    flags = case.adjust.flags
    assert not changed[flags == 0].any()
    for flag in (HAS_BANNED, HAS_BIAS, HAS_COUNTS):
        assert changed[flags == flag].sum() >= 3, flag


@implementations
def test_a_row_alone_is_the_row_in_a_batch(implementation):
    case = mixed(**ADJUSTED)
    together = case.sample(implementation)
    shuffled = np.random.default_rng(6).permutation(ROWS)
    np.testing.assert_array_equal(case.rows(shuffled).sample(implementation), together[shuffled])
    for row in range(0, ROWS, 5):
        np.testing.assert_array_equal(case.rows(slice(row, row + 1)).sample(implementation), together[row : row + 1])


def bad_rows(vocab):
    """Logits of a model gone wrong, under every setting of the mixture."""
    rng = np.random.default_rng(7)
    some = rng.standard_normal((6, vocab)).astype(np.float32)
    some[0], some[1] = -np.inf, np.nan
    some[2, ::3] = np.nan
    some[3, [5, 700]] = np.inf
    some[4, [3, 9]], some[4, 11::2] = (np.inf, np.nan), -np.inf
    some[5] = np.inf
    return np.repeat(some, len(MIX), 0), np.tile(np.asarray(MIX).T, 6)


@implementations
@pytest.mark.parametrize("adjust", [False, True])
def test_a_row_of_no_numbers_gives_some_id_and_harms_no_other(implementation, adjust):
    logits, settings = bad_rows(LARGE)
    size = 2500 if adjust else LARGE
    good = mixed(**(ADJUSTED if adjust else {}))
    want = good.sample(implementation)
    for bad in np.split(np.arange(len(logits)), 3):  # half of the batch at a time
        at = np.arange(len(bad)) * 2
        case = dataclasses.replace(good, logits=good.logits.copy())
        case.logits[at] = logits[bad]
        for name, column in zip(("temperature", "top_k", "top_p", "min_p"), settings[:, bad], strict=True):
            mine = getattr(case, name).copy()
            mine[at] = column
            case = dataclasses.replace(case, **{name: mine})
        tokens = case.sample(implementation)
        assert ((tokens >= 0) & (tokens < size)).all()
        np.testing.assert_array_equal(tokens[1::2], want[1::2])


@implementations
def test_a_row_of_which_nothing_is_left_gives_id_0(implementation):
    case = mixed(**ADJUSTED)
    adjust = case.adjust._replace(flags=np.full(ROWS, HAS_BIAS | HAS_COUNTS, np.int32), bias=np.full_like(case.adjust.bias, -np.inf))
    assert not dataclasses.replace(case, adjust=adjust).sample(implementation).any()


@implementations
def test_all_banned_by_id_gives_id_0(implementation):
    case = make_case(
        np.tile([3, 1] + [-INF] * 6, (len(MIX), 1)),
        adjust=neutral(len(MIX), SMALL, flags=np.full(len(MIX), HAS_BANNED, np.int32), banned_ids=np.tile(np.int32([1, 0]), (len(MIX), 1))),
        **dict(zip(("temperature", "top_k", "top_p", "min_p"), np.asarray(MIX).T, strict=True)),
    )
    assert not case.sample(implementation, DRAWS).any()


@implementations
def test_no_rows(implementation):
    tokens = make_case(np.zeros((0, 5))).sample(implementation)
    chex.assert_shape(tokens, (0,))
    reported = token_logprobs(jnp.zeros((0, 5)), jnp.zeros(0, jnp.int32), jnp.zeros(0, bool), num_top=2, implementation=implementation)
    chex.assert_shape(reported, [(0,), (0,), (0, 2), (0, 2)])


def test_threefry_is_that_of_its_authors_and_of_jax():
    # the known answers of Random123: key, counter, result
    for key, counter, want in [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ]:
        assert tuple(map(int, jax.jit(threefry2x32)(*map(jnp.uint32, (*key, *counter))))) == want
    words = jnp.asarray(np.random.default_rng(8).integers(0, 2**32, (2, 500), np.uint32))
    key = jnp.asarray([7, 2**31 + 5], jnp.uint32)
    got = jnp.concatenate(jax.jit(threefry2x32)(key[0], key[1], words[0], words[1]))
    chex.assert_trees_all_equal(got, jax.extend.random.threefry_2x32(key, words.reshape(-1)))


def test_noise_is_a_function_of_key_and_id():
    # XLA's CPU backend computes a logarithm in vectors and in what remains of them, an ulp apart; another id is another number.
    near = functools.partial(chex.assert_trees_all_close, rtol=1e-6, atol=1e-6)
    keys = jnp.asarray(np.random.default_rng(9).integers(0, 2**32, (3, 2), np.uint32))
    noise = jax.jit(gumbel, static_argnums=1)
    wide = noise(keys, 5000)
    chex.assert_shape(wide, (3, 5000))
    for vocab in (1, 513, 1024, 3000):
        near(noise(keys, vocab), wide[:, :vocab])
    near(noise(keys[1:2], 5000), wide[1:2])
    for token in (0, 511, 512, 1023, 1024, 4607, 4999):
        words = jax.jit(threefry2x32)(keys[:, 0], keys[:, 1], jnp.uint32(token // 1024), jnp.uint32(token % 512))
        near(wide[:, token], gumbel_of_bits(words[token // 512 % 2]))


def test_noise_is_gumbel():
    noise = np.asarray(gumbel(jnp.asarray([[1, 2], [3, 4]], jnp.uint32), 200_000), np.float64)
    assert abs(noise.mean() - 0.5772) < 0.01  # the error of the mean is .002
    assert abs(noise.var() - 1.6449) < 0.03
    for x in (-1.0, 0.0, 1.0, 3.0):
        assert abs((noise < x).mean() - np.exp(-np.exp(-x))) < 0.004
    assert abs(np.corrcoef(noise)[0, 1]) < 0.01
    chex.assert_tree_all_finite(gumbel_of_bits(jnp.asarray([0, 1, 2**31, 2**32 - 1], jnp.uint32)))


def oracle_logprobs(logits, token, num_top):
    """Log-probability and rank of `token`, ids and log-probabilities of the likeliest, of ``logits[V]``, in float64."""
    logits = np.asarray(logits, np.float64)
    logprobs = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
    top = np.lexsort((np.arange(len(logits)), -logits))[:num_top]
    return logprobs[token], 1 + (logits > logits[token]).sum(), top, logprobs[top]


def check_logprobs(reported, logits, token, wanted, num_top, vocab_size, tolerance):
    rows = len(logits)
    chex.assert_shape(reported, [(rows,), (rows,), (rows, num_top), (rows, num_top)])
    chex.assert_type(reported, [jnp.float32, jnp.int32, jnp.int32, jnp.float32])
    reported = [np.asarray(x) for x in reported]
    assert not any(x[~wanted].any() for x in reported)
    for row in np.flatnonzero(wanted):
        logprob, rank, top, top_logprobs = oracle_logprobs(logits[row, :vocab_size], token[row], num_top)
        assert reported[1][row] == rank
        np.testing.assert_array_equal(reported[2][row], top)
        np.testing.assert_allclose(reported[0][row], logprob, rtol=0, atol=tolerance)
        np.testing.assert_allclose(reported[3][row], top_logprobs, rtol=0, atol=tolerance)


def logprobs_case(rows, vocab, vocab_size, seed=10):
    """Plain, flat, tied, large and mostly infinite logits; tokens of every rank, the likeliest among them; NaN beyond `vocab_size`."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((rows, vocab)).astype(np.float32) * 3
    logits[1::6] *= 0.003
    logits[2::6] = np.round(logits[2::6])
    logits[3::6] += 200
    logits[4::6, np.arange(vocab) % 1000 != 7] = -np.inf  # fewer numbers than are asked for
    logits[5::6] = 1.5
    logits[:, vocab_size:] = np.nan
    token = rng.integers(0, vocab_size, rows).astype(np.int32)
    token[::3] = logits[::3, :vocab_size].argmax(1)
    return logits, token, rng.random(rows) < 0.8


@implementations
@pytest.mark.parametrize(("vocab", "vocab_size", "num_top"), [(3000, 2500, 0), (3000, 2500, 5), (9000, None, 20), (8, 8, 8)])
def test_logprobs(implementation, vocab, vocab_size, num_top):
    logits, token, wanted = logprobs_case(24, vocab, vocab_size or vocab)
    call = functools.partial(token_logprobs, num_top=num_top, vocab_size=vocab_size, implementation=implementation)
    reported = call(*map(jnp.asarray, (logits, token, wanted)))
    check_logprobs(reported, logits, token, wanted, num_top, vocab_size or vocab, 3e-5)  # logits of 200 are 1.5e-5 apart
    chex.assert_trees_all_equal(call(*map(jnp.asarray, (logits, token, np.zeros_like(wanted)))), jax.tree.map(jnp.zeros_like, reported))


@implementations
def test_logprobs_worked_out_by_hand(implementation):
    x = jnp.asarray([[0, 2, 2, 1, 2, -INF, -INF, -INF]] * 24, jnp.float32) + np.float32(0.5)
    token = jnp.asarray([0, 1, 2, 3, 4, 5] * 4, jnp.int32)
    logprob, rank, top_ids, top_logprobs = token_logprobs(
        x, token, jnp.ones(24, bool), num_top=8, vocab_size=8, implementation=implementation
    )
    total = np.log(1 + 3 * np.e**2 + np.e)
    np.testing.assert_array_equal(np.asarray(rank)[:6], [5, 1, 1, 4, 1, 6])
    np.testing.assert_allclose(np.asarray(logprob)[:6], [-total, 2 - total, 2 - total, 1 - total, 2 - total, -INF], atol=1e-6)
    np.testing.assert_array_equal(np.asarray(top_ids), [[1, 2, 4, 3, 0, 5, 6, 7]] * 24)
    np.testing.assert_allclose(np.asarray(top_logprobs)[0], np.asarray([2, 2, 2, 1, 0] + [-INF] * 3) - total, atol=1e-6)


SAMPLE_ARGS = (
    np.zeros((2, 9), np.float32),
    np.zeros((2, 2), np.uint32),
    *(np.zeros(2, dtype) for dtype in (np.float32, np.int32, np.float32, np.float32)),
)


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (0, np.zeros((2, 9), np.float16), "logits must be float32, got float16"),
        (0, np.zeros(9, np.float32), r"logits must be \[B, V\] \(rank 2\), got shape \(9,\)"),
        (1, np.zeros((2, 2), np.int32), "keys must be uint32, got int32"),
        (1, np.zeros((2, 4), np.uint32), "keys must have two = 2, got 4"),
        (1, np.zeros((3, 2), np.uint32), "keys must have B = 2, got 3"),
        (2, np.zeros(3, np.float32), "temperature must have B = 2, got 3"),
        (3, np.zeros(2, np.float32), "top_k must be int32, got float32"),
        (4, np.zeros((2, 1), np.float32), r"top_p must be \[B\] \(rank 1\), got shape \(2, 1\)"),
        (5, np.zeros(2, np.float64), "min_p must be float32, got float64"),
    ],
)
def test_wrong_arguments(index, value, message):
    args = list(SAMPLE_ARGS)
    args[index] = value
    with pytest.raises(ValueError, match=message):
        sample_tokens(*args)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("flags", np.zeros(3, np.int32), "adjust.flags must have B = 2, got 3"),
        ("rows", np.zeros(2, np.uint32), "adjust.rows must be int32, got uint32"),
        ("bias", np.zeros((2, 8), np.float32), "adjust.bias must have V = 9, got 8"),
        ("counts", np.zeros((3, 9), np.int32), "adjust.counts must have S = 2, got 3"),
        ("repetition", np.zeros(2, np.int32), "adjust.repetition must be float32, got int32"),
        ("frequency", np.zeros((), np.float32), r"adjust.frequency must be \[B\] \(rank 1\), got shape \(\)"),
        ("banned_ids", np.zeros((1, 3), np.int32), "adjust.banned_ids must have B = 2, got 1"),
    ],
)
def test_wrong_adjustments(field, value, message):
    with pytest.raises(ValueError, match=message):
        sample_tokens(*SAMPLE_ARGS, adjust=neutral(2, 9)._replace(**{field: value}))


@pytest.mark.parametrize("vocab_size", [0, -1, 10])
def test_wrong_vocab_size(vocab_size):
    message = f"vocab_size is {vocab_size}; the logits have 9 columns"
    with pytest.raises(ValueError, match=message):
        sample_tokens(*SAMPLE_ARGS, vocab_size=vocab_size)
    with pytest.raises(ValueError, match=message):
        token_logprobs(SAMPLE_ARGS[0], np.zeros(2, np.int32), np.ones(2, bool), num_top=1, vocab_size=vocab_size)


@pytest.mark.parametrize(
    ("index", "value", "options", "message"),
    [
        (0, np.zeros((2, 9), np.int32), {}, "logits must be float32, got int32"),
        (1, np.zeros(2, np.uint32), {}, "token must be int32, got uint32"),
        (1, np.zeros(3, np.int32), {}, "token must have B = 2, got 3"),
        (2, np.zeros(2, np.int32), {}, "wanted must be bool, got int32"),
        (2, np.ones((2, 2), bool), {}, r"wanted must be \[B\] \(rank 1\), got shape \(2, 2\)"),
        (2, np.ones(2, bool), dict(num_top=10), "num_top is 10; it must be from 0 to the vocabulary's 9"),
        (2, np.ones(2, bool), dict(num_top=7, vocab_size=6), "num_top is 7; it must be from 0 to the vocabulary's 6"),
        (2, np.ones(2, bool), dict(num_top=-1), "num_top is -1; it must be from 0 to the vocabulary's 9"),
    ],
)
def test_wrong_logprobs_arguments(index, value, options, message):
    args = [SAMPLE_ARGS[0], np.zeros(2, np.int32), np.ones(2, bool)]
    args[index] = value
    with pytest.raises(ValueError, match=message):
        token_logprobs(*args, **(dict(num_top=1) | options))


def test_unknown_and_unsupported_implementations():
    calls = {
        "sample_tokens": functools.partial(sample_tokens, *SAMPLE_ARGS),
        "token_logprobs": functools.partial(token_logprobs, SAMPLE_ARGS[0], np.zeros(2, np.int32), np.ones(2, bool), num_top=1),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=f"{name} has no implementation 'mosaic_gpu'; it has reference, pallas_triton"):
            call(implementation="mosaic_gpu")
        if jax.default_backend() != "gpu":
            with pytest.raises(NotImplementedError, match=f"{name}: pallas_triton does not run on cpu: it needs an NVIDIA GPU"):
                call(implementation="pallas_triton")
            assert pallas_kernels.support(name).implementation == "reference"
