"""`generate()`: a ladder of equalities, exact ids in float32, and what happens at its edges."""

import dataclasses
from collections import deque
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax import generate, generation
from pagedjax.allocator import BlockAllocator
from pagedjax.errors import ConfigError, RequestError
from pagedjax.generation import Run, RunOptions
from pagedjax.kv_cache import make_cache
from pagedjax.request import SamplingParams, make_request
from tests.helpers import TINY, dense_greedy, dense_logits, prompt, tiny_params, variant

LENGTHS = (1, 15, 16, 17, 31, 32, 33)
PROMPTS = [prompt(n, seed=i) for i, n in enumerate(LENGTHS)]


class Shuffled(BlockAllocator):
    """Gives blocks out in an order that no row would notice unless it forgot the table; remembers who got which."""

    given: ClassVar[list[list[int]]] = []

    def __init__(self, num_blocks):
        super().__init__(num_blocks)
        self._free = deque(int(i) for i in np.random.default_rng(0).permutation(self._free))
        Shuffled.given.clear()

    def allocate(self, n):
        ids = super().allocate(n)
        Shuffled.given.append(ids)
        return ids


@pytest.fixture(scope="module", autouse=True)
def scattered_blocks_among_nan():
    """Every test here runs on blocks in random order, and in a cache that holds NaN wherever nothing was written."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generation, "BlockAllocator", Shuffled)
        patch.setattr(generation, "make_cache", lambda *args: jax.tree.map(lambda pool: jnp.full_like(pool, jnp.nan), make_cache(*args)))
        yield


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


@pytest.mark.parametrize("row", range(len(LENGTHS)))
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


@pytest.mark.parametrize("window", [1, 8])
def test_a_finished_row_writes_nothing(params, monkeypatch, window):
    """Afterwards exactly the cells of computed tokens are finite: the last new token is never fed back, and nothing after an end is."""
    caches = []
    loop = generation._decode_loop

    def spy(*args, **kwargs):
        result = loop(*args, **kwargs)
        caches.append(jax.device_get(result[1]))
        return result

    monkeypatch.setattr(generation, "_decode_loop", spy)
    limits = [3, 20, 5, 20, 7, 20, 20]
    generate(params, TINY, PROMPTS, limits, options=RunOptions(window=window))
    pool = np.asarray(caches[-1].keys[0])
    want = np.zeros((pool.shape[0], 16), bool)
    for blocks, length, limit in zip(Shuffled.given, LENGTHS, limits, strict=True):
        for position in range(length + limit - 1):
            want[blocks[position // 16], position % 16] = True
    for layer in (*caches[-1].keys, *caches[-1].values):
        np.testing.assert_array_equal(np.isfinite(layer).all(axis=(1, 3)), want)


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


def test_numbers_of_numpy(params, batch):
    assert generate(params, TINY, PROMPTS[:2], np.int64(3), top_k=10**12).token_ids == [ids[:3] for ids in batch.token_ids[:2]]
    assert generate(params, TINY, np.asarray([PROMPTS[1]]), np.asarray([2])).token_ids == [batch.token_ids[1][:2]]


def test_no_prompts(params):
    assert generate(params, TINY, []).token_ids == []


@pytest.mark.parametrize(
    ("prompts", "asked", "message"),
    [
        ([[]], {}, r"prompts\[0\] is empty; it needs at least one token"),
        ([[1], [3, 97]], {}, r"token id 97 at position 1 of prompts\[1\] is out of range; ids are 0 to 96"),
        ([[-1]], {}, "token id -1 at position 0"),
        ([[1.5]], {}, r"a token id of prompts\[0\] is 1.5; it must be an integer"),
        ([5], {}, r"prompts\[0\] is 5; it must be a sequence of token ids"),
        ([[1] * 256], {}, r"prompts\[0\] has 256 tokens; with max_model_len 256 it may have at most 255"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens is 0; it must be at least 1"),
        ([[1]], {"max_new_tokens": -3}, "max_new_tokens is -3"),
        ([[1]], {"max_new_tokens": 2.0}, "max_new_tokens is 2.0; it must be an integer"),
        ([[1]], {"eos_ids": 2}, "eos_ids is 2; it must be a sequence of token ids"),
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
    with pytest.raises(RequestError, match="max_new_tokens has 2 entries for 1 prompts"):
        generate(params, TINY, [[1]], [1, 2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(window=3), "window is 3; it must be a power of two"),
        (dict(block_size=12), "block_size is 12; it must be a power of two"),
        (dict(token_budget=0), "token_budget is 0; it must be a positive integer"),
        (dict(window=2.0), "window is 2.0; it must be a positive integer"),
        (dict(block_size=True), "block_size is True; it must be a positive integer"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ConfigError, match=message):
        RunOptions(**options)


def test_grouped_heads_and_tied_embeddings():
    config = variant(num_heads=6, tie_word_embeddings=True)
    params = tiny_params(config)
    assert generate(params, config, [PROMPTS[3]], 8).token_ids == [dense_greedy(params, PROMPTS[3], 8, config)]
