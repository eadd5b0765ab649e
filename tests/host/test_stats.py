"""Rates and times, on a clock that the test holds."""

import pytest

from pagedjax.stats import Meter, RequestTimes


def test_tokens_a_second_over_the_last_ten():
    meter = Meter()
    assert meter.tokens_per_s(5.0) == 0
    meter.tokens(100.0, 50)
    assert meter.tokens_per_s(100.0) == 0  # nothing is known yet: these came before the interval that begins with them
    meter.tokens(101.0, 8)
    meter.tokens(102.0, 8)
    assert meter.tokens_per_s(104.0) == pytest.approx(16 / 4)
    assert meter.tokens_per_s(111.5) == 0  # one entry is left, and the interval begins with it
    assert meter.tokens_per_s(200.0) == 0
    meter.tokens(200.0, 0)
    assert meter.num_generated_tokens == 66


def test_what_is_kept_does_not_grow():
    meter = Meter()
    for i in range(5000):
        meter.tokens(i * 0.1, 1)
        meter.finished(RequestTimes(0.0, 1.0, 2.0), 3)
    assert len(meter._recent) <= 102 and len(meter._first) == len(meter._each) == 1000


def test_times_of_requests():
    meter = Meter()
    assert meter.time_to_first_token_s() is None and meter.time_per_token_s() is None
    meter.finished(RequestTimes(10.0), 0)  # aborted before its first token
    assert meter.time_to_first_token_s() is None
    meter.finished(RequestTimes(10.0, 10.5, 10.5), 1)
    assert (meter.time_to_first_token_s(), meter.time_per_token_s()) == (0.5, None)
    meter.finished(RequestTimes(10.0, 11.5, 13.5), 5)
    assert (meter.time_to_first_token_s(), meter.time_per_token_s()) == (1.0, 0.5)
