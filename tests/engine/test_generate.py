"""`generate()`: a ladder of equalities, exact ids in float32, and what happens at its edges."""

import dataclasses

import jax
import numpy as np
import pytest

from pagedjax import generate
from pagedjax.errors import RequestError
from pagedjax.generation import Run, RunOptions
from pagedjax.request import SamplingParams, make_request
from tests.helpers import TINY, dense_greedy, dense_logits, prompt, tiny_params, variant

LENGTHS = (1, 15, 16, 17, 31, 32, 33)
PROMPTS = [prompt(n, seed=i) for i, n in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def params():
    return tiny_params()


@pytest.fixture(scope="module")
def batch(params):
    """All prompts at once, greedy, 20 new tokens each."""
    return generate(params, TINY, PROMPTS, 20)


def test_greedy_equals_dense(params, batch):
    for ids, new in zip(PROMPTS, batch.token_ids, strict=True):
        assert new == dense_greedy(params, ids, 20, TINY)
    assert batch.lengths == [20] * len(PROMPTS)
    assert batch.finish_reasons == ["length"] * len(PROMPTS)


@pytest.mark.parametrize("row", [0, 3, 6])
def test_batch_equals_alone(params, batch, row):
    assert generate(params, TINY, [PROMPTS[row]], 20).token_ids == [batch.token_ids[row]]


@pytest.mark.parametrize("budget", [1, 7, 16, 33, 40])
def test_chunked_equals_whole(params, batch, budget):
    prompts = PROMPTS[-3:] if budget == 1 else PROMPTS
    got = generate(params, TINY, prompts, 20, options=RunOptions(token_budget=budget))
    assert got.token_ids == batch.token_ids[-len(prompts) :]


@pytest.mark.parametrize("block_size", [8, 32])
def test_any_block_size(params, batch, block_size):
    assert generate(params, TINY, PROMPTS, 20, options=RunOptions(block_size=block_size)).token_ids == batch.token_ids


@pytest.mark.parametrize("window", [2, 8, 32])
def test_a_window_of_steps_equals_one_at_a_time(params, batch, window):
    assert generate(params, TINY, PROMPTS, 20, options=RunOptions(window=window)).token_ids == batch.token_ids


@pytest.mark.parametrize("window", [1, 8])
@pytest.mark.parametrize("at", [0, 1, 2, 7, 8, 15])
def test_end_tokens_end_a_row_and_no_other(params, batch, at, window):
    ends = [batch.token_ids[2][at], 96]
    got = generate(params, TINY, PROMPTS, 20, eos_ids=ends, options=RunOptions(window=window))
    stopped = 0
    for new, whole, reason in zip(got.token_ids, batch.token_ids, got.finish_reasons, strict=True):
        first = next((i for i, t in enumerate(whole) if t in ends), None)
        assert new == (whole if first is None else whole[: first + 1])
        assert reason == ("length" if first is None else "stop")
        stopped += first is not None
    assert stopped and got.finish_reasons[2] == "stop"


def test_a_limit_for_each_prompt(params, batch):
    limits = [1, 2, 3, 8, 9, 17, 20]
    got = generate(params, TINY, PROMPTS, limits, options=RunOptions(window=8))
    assert got.lengths == limits
    assert got.token_ids == [ids[:n] for ids, n in zip(batch.token_ids, limits, strict=True)]


def test_sampling_equals_alone_and_in_another_row(params):
    ask = dict(temperature=1.5, top_k=20, top_p=0.9, seed=7)
    together = generate(params, TINY, PROMPTS, 12, **ask)
    turned = generate(params, TINY, PROMPTS[::-1], 12, options=RunOptions(token_budget=9, window=4), **ask)
    assert turned.token_ids == together.token_ids[::-1]
    assert generate(params, TINY, [PROMPTS[4]], 12, **ask).token_ids == [together.token_ids[4]]
    assert generate(params, TINY, PROMPTS, 12, **ask | {"seed": 8}).token_ids != together.token_ids


def test_rows_with_different_settings_in_one_batch(params, batch):
    def request(ids, **asked):
        one = SamplingParams(max_tokens=10, **asked)
        return make_request(ids, one, eos_ids=(), vocab_size=97, max_model_len=256, default_seed=3)

    asked = [dict(temperature=0.0), dict(temperature=2.0, seed=1), dict(temperature=0.7, top_k=5, seed=2), dict(temperature=1.0, top_p=0.5)]
    rows = Run(params, TINY, [request(PROMPTS[3], **a) for a in asked]).finish()
    assert rows[0].token_ids == batch.token_ids[3][:10]
    for row, a in zip(rows, asked, strict=True):
        assert Run(params, TINY, [request(PROMPTS[3], **a)]).finish()[0].token_ids == row.token_ids
    assert len({tuple(row.token_ids) for row in rows}) > 2


def test_logprobs_are_the_model_s_own(params):
    got = generate(params, TINY, PROMPTS[:3], 5, logprobs=3)
    for ids, new, logprobs in zip(PROMPTS, got.token_ids, got.logprobs, strict=False):
        want = np.asarray(jax.nn.log_softmax(dense_logits(params, ids + new, TINY), axis=-1))[len(ids) - 1 : -1]
        assert len(logprobs) == 5
        for step, (token, at) in enumerate(zip(new, logprobs, strict=True)):
            # Logits of up to about 30 in float32.
            assert at.logprob == pytest.approx(want[step, token], abs=64 * 2**-23 * 32)
            assert at.rank == 1 and at.top[0][0] == token
            assert [i for i, _ in at.top] == list(np.argsort(-want[step], kind="stable")[:3])


def test_the_model_s_length_is_the_limit(params):
    config = dataclasses.replace(TINY, max_model_len=32)
    got = generate(params, config, [prompt(30), prompt(5)], 100)
    assert got.lengths == [2, 27]
    assert got.finish_reasons == ["length", "length"]


def test_streaming_gives_the_same_tokens(params, batch):
    for window in (1, 4):
        requests = [
            make_request(ids, SamplingParams(temperature=0, max_tokens=20), eos_ids=(), vocab_size=97, max_model_len=256, default_seed=0)
            for ids in PROMPTS
        ]
        pieces = list(Run(params, TINY, requests, RunOptions(window=window)).stream(num_steps=4))
        assert [[t for piece in pieces for t in piece[row]] for row in range(len(PROMPTS))] == batch.token_ids
        assert [len(piece[0]) for piece in pieces] == [1, 4, 4, 4, 4, 3]


def test_generate_through_interpreted_kernels(params):
    names = RunOptions(implementation="pallas_triton_interpret")
    want = generate(params, TINY, PROMPTS[1:4], 4)
    assert generate(params, TINY, PROMPTS[1:4], 4, options=names).token_ids == want.token_ids


def test_no_prompts(params):
    assert generate(params, TINY, []).token_ids == []


@pytest.mark.parametrize(
    ("prompts", "asked", "message"),
    [
        ([[]], {}, "a prompt is empty; it needs at least one token"),
        ([[1], [3, 97]], {}, "token id 97 at position 1 of a prompt is out of range; ids are 0 to 96"),
        ([[-1]], {}, "token id -1 at position 0"),
        ([[1.5]], {}, "a prompt's token id is 1.5; it must be an integer"),
        ([5], {}, "a prompt is 5; it must be a sequence of token ids"),
        ([[1] * 256], {}, "a prompt has 256 tokens; with max_model_len 256 it may have at most 255"),
        ([[1]], {"max_new_tokens": 0}, "max_tokens is 0; it must be at least 1"),
        ([[1]], {"max_new_tokens": -3}, "max_tokens is -3"),
        ([[1]], {"max_new_tokens": 2.0}, "max_tokens is 2.0; it must be an integer"),
        ([[1]], {"temperature": float("nan")}, "temperature is nan; it must be a finite number"),
        ([[1]], {"temperature": -0.1}, "temperature is -0.1; it must be 0"),
        ([[1]], {"top_p": 0.0}, "top_p is 0.0; it must be above 0 and at most 1"),
        ([[1]], {"top_p": 1.1}, "top_p is 1.1"),
        ([[1]], {"top_k": -2}, "top_k is -2; it must be 1 or more, or 0 or -1 for off"),
        ([[1]], {"seed": 2**32}, "seed is 4294967296; it must be from 0 to"),
        ([[1]], {"logprobs": 65}, "logprobs is 65; it must be from 0 to 64"),
    ],
)
def test_bad_input_is_one_clear_error_and_the_process_goes_on(params, batch, prompts, asked, message):
    with pytest.raises(RequestError, match=message):
        generate(params, TINY, prompts, **asked)
    assert generate(params, TINY, PROMPTS[:1], 20).token_ids == batch.token_ids[:1]


def test_lists_of_different_lengths_are_refused(params):
    with pytest.raises(ValueError, match="max_new_tokens has 2 entries for 1 prompts"):
        generate(params, TINY, [[1]], [1, 2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(window=3), "window is 3; it must be a power of two"),
        (dict(block_size=12), "block_size is 12; it must be a power of two"),
        (dict(token_budget=0), "token_budget is 0"),
    ],
)
def test_bad_options(params, options, message):
    with pytest.raises(ValueError, match=message):
        generate(params, TINY, [[1, 2]], options=RunOptions(**options))


def test_grouped_heads_and_tied_embeddings():
    config = variant(num_heads=6, tie_word_embeddings=True)
    params = tiny_params(config)
    assert generate(params, config, [PROMPTS[3]], 8).token_ids == [dense_greedy(params, PROMPTS[3], 8, config)]
