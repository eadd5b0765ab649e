"""Log-probabilities of prompts against transformers' log_softmax: lengths around block borders, cold and hot cache, chunked and whole."""

import numpy as np
import pytest

from pagedjax.engine import Engine
from pagedjax.engine_config import EngineConfig
from pagedjax.request import SamplingParams

pytestmark = pytest.mark.parity

LENGTHS = (15, 16, 17, 31, 32, 33)
TEMPERATURE = 0.6
NUM_TOP = 5
# Logits agree within 1e-3 (test_smollm2.py); a log-probability is the difference of one of them and a mean of all, over the temperature.
ATOL = {"raw": 2e-3, "processed": 2e-3 / TEMPERATURE}
TEXT = (
    "The old lighthouse keeper climbed the stairs every evening at six, lit the lamp, and wrote the weather into a book that nobody "
    "had asked him to keep; on the last page he had drawn a map of the rocks."
)


@pytest.fixture(scope="module")
def wanted(reference):
    """Log-probabilities f64[S, V] of each length's prompt at a temperature, by transformers' logits."""
    ids = reference.tokenizer(TEXT)["input_ids"]
    assert len(ids) >= max(LENGTHS)
    logits = {n: reference.logits(ids[:n]).astype(np.float64) for n in LENGTHS}

    def at(length, temperature):
        x = logits[length] / temperature
        x -= x.max(-1, keepdims=True)
        return ids[:length], x - np.log(np.exp(x).sum(-1, keepdims=True))

    return at


@pytest.mark.parametrize("budget", [64, 7], ids=["whole", "chunked"])
@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_prompt_logprobs_equal_transformers(ours, wanted, mode, budget):
    params, config = ours.in_float32()
    settings = EngineConfig(
        max_num_seqs=2,
        max_model_len=64,
        num_kv_blocks=64,
        token_budget=budget,
        logprobs_mode=mode,
        row_buckets=(2,),
        mixed_row_buckets=(2,),
        token_buckets=(64,) if budget == 64 else (16,),
        width_buckets=(4,),
    )
    engine = Engine(params, config, settings)
    plain = SamplingParams(temperature=TEMPERATURE, seed=1, max_tokens=2)
    asked = SamplingParams(temperature=TEMPERATURE, seed=1, max_tokens=2, prompt_logprobs=NUM_TOP)
    for length in LENGTHS:
        ids, want = wanted(length, 1.0 if mode == "raw" else TEMPERATURE)
        for hot in (False, True):
            # A salt of its own keeps a prompt from finding the shorter one that it begins with.
            salt = f"{length}"
            if hot:
                (before,) = engine.generate([ids], plain, cache_salts=[salt], use_tqdm=False)
                assert before.num_cached_tokens == (length - 1) // 16 * 16  # the cache is hot: who may read it does
            (got,) = engine.generate([ids], asked, cache_salts=[salt], use_tqdm=False)
            assert got.num_cached_tokens == 0 and len(got.prompt_logprobs) == length
            first, *others = got.prompt_logprobs
            assert first is None
            np.testing.assert_allclose(
                [lp.logprob for lp in others], want[np.arange(length - 1), ids[1:]], rtol=0, atol=ATOL[mode], err_msg=f"{length}, {hot}"
            )
            for i, lp in enumerate(others):
                top = np.sort(want[i])[::-1][:NUM_TOP]
                np.testing.assert_allclose([p for _, p in lp.top], top, rtol=0, atol=ATOL[mode])
                np.testing.assert_allclose([want[i, token] for token, _ in lp.top], top, rtol=0, atol=ATOL[mode])
                # The rank is right up to tokens as close as the tolerance.
                better = (want[i] > want[i, ids[i + 1]] + ATOL[mode]).sum()
                maybe = (want[i] >= want[i, ids[i + 1]] - ATOL[mode]).sum()
                assert better < lp.rank <= maybe
