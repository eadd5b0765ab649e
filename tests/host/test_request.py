"""Sampling parameters and requests: what is resolved and what is refused."""

import numpy as np
import pytest

from pagedjax.errors import PagedjaxError, RequestError
from pagedjax.request import SamplingParams, make_request


def request(ids=(1, 2), *, max_model_len=64, eos_ids=(7,), **asked):
    return make_request(ids, SamplingParams(**asked), eos_ids=eos_ids, vocab_size=10, max_model_len=max_model_len, default_seed=5)


def test_what_is_resolved():
    one = request(np.asarray([1, 2]), stop_token_ids=[3, 7], max_tokens=100)
    assert one.prompt_token_ids == (1, 2) and all(type(i) is int for i in one.prompt_token_ids)
    assert one.stop_token_ids == (3, 7)
    assert (one.max_new_tokens, one.max_num_tokens) == (62, 64)
    assert one.params.seed == 5
    assert request(seed=0).params.seed == 0
    assert request(max_tokens=None).max_new_tokens == 62
    assert request(ignore_eos=True).stop_token_ids == ()
    assert request(ignore_eos=True, stop_token_ids=[3]).stop_token_ids == (3,)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (dict(temperature="hot"), "temperature is 'hot'; it must be a finite number"),
        (dict(temperature=True), "temperature is True; it must be a finite number"),
        (dict(temperature=float("inf")), "temperature is inf"),
        (dict(top_p=float("nan")), "top_p is nan; it must be a finite number"),
        (dict(top_p=-0.5), "top_p is -0.5; it must be above 0 and at most 1"),
        (dict(top_k=1.5), "top_k is 1.5; it must be an integer"),
        (dict(max_tokens=True), "max_tokens is True; it must be an integer"),
        (dict(temperature=np.bool_(True)), "temperature is .*True.*; it must be a finite number"),
        (dict(temperature=1e300), r"temperature is 1e\+300; it must be 0 \(greedy\) or more, and at most 1e\+30"),
        (dict(max_tokens=0), "max_tokens is 0; it must be at least 1"),
        (dict(stop_token_ids=[2**31]), r"stop_token_ids is \[2147483648\]; token ids are 0 to 2147483647"),
        (dict(seed=-1), r"seed is -1; it must be from 0 to 2\*\*32 - 1"),
        (dict(logprobs=-1), "logprobs is -1; it must be from 0 to 64, or None for none"),
        (dict(stop_token_ids=5), "stop_token_ids is 5; it must be a sequence of token ids"),
        (dict(stop_token_ids=[-4]), r"stop_token_ids is \[-4\]; token ids are 0 to"),
        (dict(stop_token_ids=["x"]), "stop_token_ids is 'x'; it must be an integer"),
    ],
)
def test_bad_parameters(asked, message):
    with pytest.raises(RequestError, match=message) as caught:
        SamplingParams(**asked)
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, PagedjaxError)


def test_numbers_of_numpy_are_numbers():
    params = SamplingParams(
        temperature=np.float32(0.5), top_p=np.float64(0.5), top_k=np.int64(3), max_tokens=np.int32(2), seed=np.uint32(4)
    )
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens, params.seed) == (0.5, 0.5, 3, 2, 4)
    assert {type(getattr(params, name)) for name in ("top_k", "max_tokens", "seed")} == {int}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (dict(eos_ids=2), "eos_ids is 2; it must be a sequence of token ids"),
        (dict(eos_ids=[2.5]), "eos_ids is 2.5; it must be an integer"),
        (dict(eos_ids=[2**40]), r"eos_ids is \[1099511627776\]; token ids are 0 to"),
        (dict(logprobs=11), "logprobs is 11; the vocabulary has 10 tokens"),
        (dict(ids="12"), "a token id of the prompt is '1'; it must be an integer"),
    ],
)
def test_bad_requests(asked, message):
    with pytest.raises(RequestError, match=message):
        request(**asked)


def test_unknown_parameters_are_not_swallowed():
    with pytest.raises(TypeError, match="frequency_penalty_typo"):
        SamplingParams(frequency_penalty_typo=1.0)
