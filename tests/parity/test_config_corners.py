"""A random tiny Llama for each corner of the config, written by transformers, read by our folder loader: equal logits."""

import json

import numpy as np
import pytest

from pagedjax.checkpoint import open_checkpoint
from pagedjax.load import load_config, load_params
from tests.helpers import prompt
from tests.parity.teacher import paged_logits, whole_logits

pytestmark = pytest.mark.parity

BASE = {
    "vocab_size": 160,
    "hidden_size": 48,  # divisible by 4, 6 and 8 heads, as transformers demands even where head_dim is given
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,  # small, so that wavelengths fall on both sides of both limits and between
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}
CORNERS = {
    "group-1": {"num_key_value_heads": 4},
    "group-2": {},
    "group-3": {"num_attention_heads": 6, "num_key_value_heads": 2},
    "group-8": {"num_attention_heads": 8, "num_key_value_heads": 1},
    "head-8": {"head_dim": 8},
    "head-64": {"head_dim": 64},
    "head-128": {"head_dim": 128},
    "head-absent": {"head_dim": None},
    "head-not-a-quotient": {"head_dim": 24},
    "rope-llama3": {"rope_parameters": LLAMA3},
    "rope-linear": {"rope_parameters": LINEAR},
    "rope-theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 123.0}},
    "untied": {"tie_word_embeddings": False},
    "attention-bias": {"attention_bias": True},
    "mlp-bias": {"mlp_bias": True},
    "norm-eps": {"rms_norm_eps": 0.1},
    "everything": {
        "num_attention_heads": 6,
        "head_dim": 64,
        "rope_parameters": LLAMA3,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "mlp_bias": True,
    },
}
LENGTHS, NUM_ANSWER = (1, 17, 90), 8


def check(folder, reference):
    """Load the folder in float32 and compare with `reference`, through blocks and in one step."""
    with open_checkpoint(folder) as checkpoint:
        config = load_config(checkpoint, dtype="float32")
        params = load_params(checkpoint, config)
    sequences = [prompt(n + NUM_ANSWER, seed=n, vocab_size=config.vocab_size) for n in LENGTHS]
    prompts, answers = [s[:-NUM_ANSWER] for s in sequences], [s[-NUM_ANSWER:] for s in sequences]
    want = np.stack([reference.logits(s)[len(s) - NUM_ANSWER - 1 : -1] for s in sequences])
    # Sums of up to 768 terms in another order, five in a row a layer: 64 units in the last place of the largest logit.
    atol = 64 * 2**-23 * np.abs(want).max()
    for run in (paged_logits, whole_logits):
        np.testing.assert_allclose(run(params, config, prompts, answers), want, rtol=0, atol=atol, err_msg=run.__name__)


@pytest.fixture
def torch_side():
    from tests.parity import transformers_reference

    return transformers_reference


@pytest.mark.parametrize("corner", CORNERS)
def test_corner_equals_transformers(torch_side, tmp_path, corner):
    reference = torch_side.random_llama(BASE | CORNERS[corner])
    torch_side.save(reference, tmp_path)
    check(tmp_path, reference)


def test_shards_equal_transformers(torch_side, tmp_path):
    reference = torch_side.random_llama(BASE)
    torch_side.save(reference, tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert (tmp_path / "model.safetensors.index.json").exists()
    check(tmp_path, reference)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_file_equals_transformers(torch_side, tmp_path, dtype):
    torch_side.save(torch_side.random_llama(BASE), tmp_path, dtype=dtype)
    with open_checkpoint(tmp_path) as checkpoint:
        assert load_config(checkpoint).dtype == dtype
    check(tmp_path, torch_side.load_folder(tmp_path))


@pytest.mark.parametrize("kind", [LLAMA3, LINEAR], ids=lambda kind: kind["rope_type"])
@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_older_spelling_of_the_config_equals_transformers(torch_side, tmp_path, kind, key):
    """transformers 4 wrote ``rope_theta`` beside ``rope_scaling``, whose kind was once called ``type``, and ``torch_dtype``."""
    torch_side.save(torch_side.random_llama(BASE | {"rope_parameters": kind}), tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = {key: rope.pop("rope_type"), **rope}
    config["torch_dtype"] = config.pop("dtype")
    path.write_text(json.dumps(config))
    check(tmp_path, torch_side.load_folder(tmp_path))
