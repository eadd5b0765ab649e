"""The sampling and log-probability kernels on a GPU, at a real vocabulary, against the float64 oracle and the reference."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import token_logprobs
from tests.kernels.test_sampling import MIX, bad_rows, check, check_logprobs, logprobs_case, make_case, mixed

pytestmark = [
    pytest.mark.gpu,
    # JAX announces since 0.11 that Pallas will drop this lowering: the reason why each op has another backend too.
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]
KERNEL, VOCAB = "pallas_triton", 128_256
implementations = pytest.mark.parametrize("implementation", ["reference", KERNEL])


def both(case, batch=64):
    """Tokens of the kernel, which the oracle accepts, and how many the reference, which it accepts as well, chose otherwise."""
    batches = [case.rows(slice(start, start + batch)) for start in range(0, len(case.logits), batch)]
    got, want = (np.concatenate([rows.sample(name) for rows in batches]) for name in (KERNEL, "reference"))
    check(case, got)
    differ = np.flatnonzero(got != want)
    if differ.size:  # sums of float32 in two orders: near-ties alone, which `check` tells
        check(case.rows(differ), want[differ])
    return got, differ


def test_the_kernels_are_chosen():
    for op in ("sample_tokens", "token_logprobs"):
        support = pallas_kernels.support(op)
        capable = (support.device.compute_capability or (0, 0)) >= (8, 0)
        assert support.implementation == (KERNEL if capable else "reference")


@pytest.mark.parametrize("how", [{}, dict(vocab_size=128_000, adjust=True)])
def test_token_for_token(how):
    case = mixed(vocab=VOCAB, rows=128, **how)
    _, differ = both(case)
    assert len(differ) <= 1, f"rows {differ} differ: more than near-ties explain"


@pytest.mark.parametrize("deviation", [0.01, 3.0])
def test_top_p(deviation):
    rows = 64
    logits = np.random.default_rng(1).standard_normal((rows, VOCAB)).astype(np.float32) * np.float32(deviation)
    case = make_case(logits, top_p=np.resize([0.1, 0.5, 0.8, 0.9, 0.95, 0.99, 0.999, 1e-4], rows), temperature=np.repeat([0.7, 1.0], 32))
    tokens, differ = both(case)
    assert len(differ) <= 1, f"rows {differ} differ: more than near-ties explain"
    assert len(set(tokens.tolist())) > rows // 2


@pytest.mark.parametrize("top_k", [64, 65, 1000, 100_000])
def test_top_k_and_then_top_p(top_k):
    logits = np.random.default_rng(2).standard_normal((16, VOCAB)).astype(np.float32)
    logits[8:] = np.round(logits[8:] * 4) / 4  # the k-th is one of thousands as likely
    _, differ = both(make_case(logits, top_k=top_k, top_p=np.resize([1.0, 0.9, 0.5], 16), temperature=2.0))
    assert len(differ) <= 1, f"rows {differ} differ: more than near-ties explain"


@pytest.mark.parametrize("top_k", [0, -1, 8, 100])
def test_a_flat_row_without_filters_is_uniform(top_k):
    tokens = make_case(np.zeros((4000, 8)), top_k=top_k).sample(KERNEL)
    counts = np.bincount(tokens, minlength=8)
    assert ((counts - 500) ** 2 / 500).sum() < 24.32  # chi-square of 7 degrees of freedom at 0.001


def test_a_row_alone_is_the_row_in_a_batch():
    case = mixed(vocab=VOCAB, vocab_size=128_000, adjust=True, rows=256)
    together = case.sample(KERNEL)
    np.testing.assert_array_equal(case.sample(KERNEL), together, err_msg="twice the same")
    for row in [*range(0, 256, 11), 255]:
        np.testing.assert_array_equal(case.rows(slice(row, row + 1)).sample(KERNEL), together[row : row + 1])
    some = np.random.default_rng(3).permutation(256)[:63]
    np.testing.assert_array_equal(case.rows(some).sample(KERNEL), together[some])
    narrow = dataclasses.replace(case, logits=case.logits[:, :128_000].copy(), vocab_size=None)
    cut = {name: getattr(case.adjust, name)[:, :128_000] for name in ("bias", "counts")}
    np.testing.assert_array_equal(dataclasses.replace(narrow, adjust=case.adjust._replace(**cut)).sample(KERNEL), together)


def test_rows_of_no_numbers_give_some_id_and_harm_no_other():
    logits, settings = bad_rows(VOCAB)
    good = mixed(vocab=VOCAB, rows=len(MIX))
    columns = dict(zip(("temperature", "top_k", "top_p", "min_p"), settings, strict=True))
    case = make_case(logits, **columns)
    mine = ("logits", "keys", *columns)
    case = dataclasses.replace(case, **{name: np.concatenate([getattr(case, name), getattr(good, name)]) for name in mine})
    tokens = case.sample(KERNEL)
    assert ((tokens >= 0) & (tokens < VOCAB)).all()
    np.testing.assert_array_equal(tokens[len(logits) :], good.sample(KERNEL))


@implementations
@pytest.mark.parametrize(("vocab_size", "num_top"), [(VOCAB, 0), (128_000, 5), (VOCAB, 20)])
def test_logprobs(implementation, vocab_size, num_top):
    logits, token, wanted = logprobs_case(64, VOCAB, vocab_size)
    arrays = map(jnp.asarray, (logits, token, wanted))
    reported = token_logprobs(*arrays, num_top=num_top, vocab_size=vocab_size, implementation=implementation)
    check_logprobs(reported, logits, token, wanted, num_top, vocab_size, 1e-4)
