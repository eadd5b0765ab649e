"""The demo model against transformers, live: ids, logits at every step, tokens and chat text."""

import chex
import jax
import numpy as np
import pytest

from pagedjax.generation import generate
from tests.parity.prompts import CHATS, NUM_NEW_TOKENS, TOKENIZER_TEXTS
from tests.parity.teacher import paged_logits, whole_logits

pytestmark = pytest.mark.parity

# Float32 sums of up to 1536 terms through 30 layers, in another order, on logits up to 43: an error of
# 1536**.5 * 43 * 2**-24 = 1e-4 a sum if it is random, and room for a few layers' worth of them.
ATOL = 1e-3
# What rounding activations to bfloat16 in 30 layers may turn: a choice that float32 makes by less than this.
BFLOAT16_MARGIN = 0.25


def margins(logits):
    top = np.sort(logits, axis=-1)
    return top[..., -1] - top[..., -2]


def test_prompts_are_tokenized_alike(ours, expected):
    assert [ours.tokenizer.encode_chat(chat) for chat in CHATS] == expected.prompts[-len(CHATS) :]


@pytest.mark.parametrize("text", TOKENIZER_TEXTS, ids=lambda text: ascii(text)[1:20])
def test_tokenizer_equals_transformers(ours, reference, text):
    ids = reference.tokenizer(text)["input_ids"]
    assert ours.tokenizer.encode(text) == ids
    for skip in (True, False):
        want = reference.tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert ours.tokenizer.decode(ids, skip_special_tokens=skip) == want


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("chat", CHATS, ids=lambda chat: f"{len(chat)} messages")
def test_chat_template_equals_transformers(ours, reference, chat, add_generation_prompt):
    want = reference.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=add_generation_prompt)
    assert ours.tokenizer.apply_chat_template(chat, add_generation_prompt=add_generation_prompt) == want


def test_greedy_ids_equal_transformers(ours, expected):
    result = generate(*ours.in_float32(), expected.prompts, NUM_NEW_TOKENS)
    assert result.token_ids == expected.ids


@pytest.mark.parametrize("run", [paged_logits, whole_logits])
def test_logits_equal_transformers_at_every_step(ours, expected, run):
    got = run(*ours.in_float32(), expected.prompts, expected.ids)
    chex.assert_tree_all_finite(got)
    np.testing.assert_allclose(got, expected.logits, rtol=0, atol=ATOL)
    np.testing.assert_array_equal(got.argmax(-1), expected.ids)


@pytest.mark.parametrize("run", [paged_logits, whole_logits])
def test_bfloat16_chooses_alike_unless_it_is_close(ours, expected, run):
    got = run(ours.params, ours.config, expected.prompts, expected.ids)
    differs = got.argmax(-1) != np.asarray(expected.ids)
    close = margins(expected.logits) < BFLOAT16_MARGIN
    assert not np.any(differs & ~close), f"margins where bfloat16 chose otherwise: {margins(expected.logits)[differs & ~close]}"
    # Guards the comparison itself: were bfloat16 never used, nothing would differ at all.
    assert jax.tree.leaves(ours.params)[0].dtype == "bfloat16"
    assert np.max(np.abs(got - expected.logits)) > ATOL
