"""The demo model against golden files that ``tests/make_goldens.py`` made with transformers. Needs no torch."""

import dataclasses
import json
import pathlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax import SamplingParams
from tests.parity.teacher import paged_logits, whole_logits

# The same bound as in tests/parity/test_smollm2.py, and for the same reason; the file keeps five decimals.
ATOL = 1e-3
# Rounding activations to bfloat16 in 30 layers may turn a choice that float32 makes by less than this.
BFLOAT16_MARGIN = 0.25


@pytest.fixture(scope="module")
def golden():
    return json.loads((pathlib.Path(__file__).parent.parent / "golden" / "smollm2.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def in_bfloat16(llm):
    return jax.tree.map(lambda w: w.astype(jnp.bfloat16), llm.params), dataclasses.replace(llm.config, dtype="bfloat16")


def column(rows, name):
    return np.asarray([row[name] for row in rows])


def test_tokens_and_chat_text(llm, golden):
    for case in golden["tokenizer"]:
        assert llm.tokenizer.encode(case["text"]) == case["ids"]
    assert [llm.tokenizer.apply_chat_template(chat) for chat in golden["chats"]] == golden["chat_texts"]
    prompts = [llm.tokenizer.encode(text) for text in golden["texts"]] + [llm.tokenizer.encode_chat(chat) for chat in golden["chats"]]
    assert prompts == golden["prompt_token_ids"]


def test_llm_continues_like_transformers(llm, golden):
    """Ids and text, and through the two likeliest tokens' log-probabilities the margin of each choice."""
    rows = golden["float32"]
    params = SamplingParams(temperature=0.0, max_tokens=len(rows[0]["token_ids"]), ignore_eos=True, logprobs=2)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in golden["prompt_token_ids"]], params, use_tqdm=False)
    for output, row in zip(outputs, rows, strict=True):
        [completion] = output.outputs
        assert list(completion.token_ids) == row["token_ids"]
        assert completion.text == row["text"]
        assert completion.finish_reason == "length"
        likeliest = [sorted((p.logprob for p in step.values()), reverse=True)[:2] for step in completion.logprobs]
        np.testing.assert_allclose([first - second for first, second in likeliest], row["margins"], rtol=0, atol=2 * ATOL)


def test_llm_answers_the_chat_question(llm, golden):
    """One row, stopped by the end token."""
    [output] = llm.chat(golden["chats"][0], SamplingParams(temperature=0.0, max_tokens=32), use_tqdm=False)
    [completion] = output.outputs
    want = golden["float32"][len(golden["texts"])]["token_ids"]
    assert list(completion.token_ids) == want[: want.index(2) + 1]
    assert completion.text == "The capital of France is Paris."
    assert completion.finish_reason == "stop"


def test_logits_at_every_step(in_bfloat16, golden):
    """Teacher-forced through prefill and decode steps: bfloat16-rounded weights held in float32."""
    params, config = in_bfloat16
    params, config = jax.tree.map(lambda w: w.astype(jnp.float32), params), dataclasses.replace(config, dtype="float32")
    rows = golden["bfloat16_weights_in_float32"]
    ids = column(rows, "token_ids")
    got = paged_logits(params, config, golden["prompt_token_ids"], ids.tolist())
    chex.assert_tree_all_finite(got)
    np.testing.assert_array_equal(got.argmax(-1), ids)
    top = np.sort(got, axis=-1)[..., -2:]
    np.testing.assert_allclose(top[..., 1], column(rows, "top_logits"), rtol=0, atol=ATOL)
    np.testing.assert_allclose(top[..., 1] - top[..., 0], column(rows, "margins"), rtol=0, atol=2 * ATOL)
    np.testing.assert_allclose(got[..., golden["probe_ids"]], column(rows, "probe_logits"), rtol=0, atol=ATOL)


def test_bfloat16_chooses_alike_unless_it_is_close(in_bfloat16, golden):
    rows = golden["bfloat16_weights_in_float32"]
    ids, margins = column(rows, "token_ids"), column(rows, "margins")
    got = whole_logits(*in_bfloat16, golden["prompt_token_ids"], ids.tolist())
    differs = got.argmax(-1) != ids
    assert not np.any(differs & (margins >= BFLOAT16_MARGIN)), f"margins where bfloat16 chose otherwise: {margins[differs]}"
    assert np.max(np.abs(got[..., golden["probe_ids"]] - column(rows, "probe_logits"))) > ATOL  # it did run in bfloat16
