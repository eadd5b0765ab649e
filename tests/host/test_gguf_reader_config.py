"""A GGUF's metadata as a Hugging Face config: what is translated, what is refused, and Llama 3's rope rule recovered from its divisors."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pagedjax.checkpoint import GgufCheckpoint
from pagedjax.checkpoint.gguf_rope import recover_llama3
from pagedjax.config import ModelConfig
from pagedjax.errors import CheckpointError, UnsupportedModelError
from tests.host.gguf_files import D, F, H, K, N, V, hf_weights, write_gguf


def open_gguf(tmp_path, weights=None, metadata=None, **kwargs):
    with GgufCheckpoint(write_gguf(tmp_path / "m.gguf", weights, metadata, **kwargs)) as checkpoint:
        return checkpoint


def test_config_in_full(tmp_path):
    checkpoint = open_gguf(tmp_path, metadata={"tokenizer.ggml.padding_token_id": 0})
    assert checkpoint.config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": V,
        "hidden_size": D,
        "intermediate_size": F,
        "num_hidden_layers": 1,
        "num_attention_heads": N,
        "num_key_value_heads": K,
        "head_dim": H,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    assert checkpoint.generation_config == {"bos_token_id": 1, "eos_token_id": 2}
    assert ModelConfig.from_hf(checkpoint.config).head_size == H  # the strict reader takes every key


def test_every_end_of_answer_id_once(tmp_path):
    ends = {f"tokenizer.ggml.{name}_token_id": token for name, token in (("eos", 2), ("eot", 5), ("eom", 2))}
    assert open_gguf(tmp_path, metadata=ends).generation_config["eos_token_id"] == [2, 5]
    none = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.bos_token_id")
    checkpoint = open_gguf(tmp_path, drop=none)
    assert checkpoint.generation_config == {}
    assert "eos_token_id" not in checkpoint.config


def test_no_head_means_tied(tmp_path):
    checkpoint = open_gguf(tmp_path, hf_weights(tied=True))
    assert checkpoint.config["tie_word_embeddings"] is True
    assert "lm_head.weight" not in checkpoint.names()


@pytest.mark.parametrize(
    "drop", [("llama.attention.key_length", "llama.attention.value_length"), ("llama.rope.dimension_count",), ("tokenizer.ggml.tokens",)]
)
def test_head_and_vocabulary_size_from_what_is_there(tmp_path, drop):
    config = open_gguf(tmp_path, drop=drop).config
    assert (config["head_dim"], config["vocab_size"]) == (H, V)


def test_head_size_from_the_width_when_nothing_says_it(tmp_path):
    drop = ("llama.attention.key_length", "llama.attention.value_length", "llama.rope.dimension_count")
    assert open_gguf(tmp_path, drop=drop).config["head_dim"] == D // N


def test_defaults_for_absent_keys(tmp_path):
    weights = {name: array for name, array in hf_weights().items() if "attn_k" not in name}
    config = open_gguf(tmp_path, weights, drop=("llama.attention.head_count_kv", "llama.rope.freq_base")).config
    assert config["num_key_value_heads"] == N
    assert config["rope_theta"] == 10000.0


def test_mlp_bias(tmp_path):
    extra = {f"blk.0.ffn_{part}.bias": np.zeros(n, np.float32) for part, n in (("gate", F), ("up", F), ("down", D))}
    assert open_gguf(tmp_path, hf_weights() | extra).config["mlp_bias"] is True
    del extra["blk.0.ffn_up.bias"]
    with pytest.raises(UnsupportedModelError, match="has biases on ffn_gate, ffn_down but not on all of ffn_gate, ffn_up, ffn_down"):
        open_gguf(tmp_path, hf_weights() | extra)


@pytest.mark.parametrize(
    "metadata",
    [
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
        {"llama.rope.scaling.factor": 4.0},
        {"llama.rope.scale_linear": 4.0},
    ],
)
def test_linear_rope(tmp_path, metadata):
    config = open_gguf(tmp_path, metadata=metadata).config
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    assert ModelConfig.from_hf(config).rope.factor == 4.0


@pytest.mark.parametrize(
    "metadata",
    [
        {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0},  # llama.cpp ignores the factor then
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 1.0},
        {"llama.rope.scaling.type": "linear"},
        {"llama.rope.scaling.finetuned": True, "llama.rope.scaling.original_context_length": 64},
        {"llama.expert_count": 0, "llama.attention.causal": True, "llama.logit_scale": 1.0},
        {"llama.attention.head_count": [N], "llama.feed_forward_length": [F, F]},
        {"split.count": 1, "general.type": "model", "other.expert_count": 8},
    ],
)
def test_neutral_metadata(tmp_path, metadata):
    assert open_gguf(tmp_path, metadata=metadata).config == open_gguf(tmp_path).config


@pytest.mark.parametrize(
    ("metadata", "match"),
    [
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}, r"llama\.rope\.scaling\.type='yarn' is not built"),
        ({"llama.expert_count": 8}, r"metadata llama\.expert_count=8 changes the computation"),
        ({"llama.attention.sliding_window": 4096}, r"metadata llama\.attention\.sliding_window=4096 changes the computation"),
        ({"llama.attention.causal": False}, r"llama\.attention\.causal=False changes"),
        ({"llama.logit_scale": 0.5}, r"llama\.logit_scale=0\.5 changes"),
        ({"llama.new_idea": 3}, r"unknown metadata llama\.new_idea=3; it may change the computation"),
        ({"llama.rope.scaling.yarn_beta_fast": 32.0}, r"unknown metadata llama\.rope\.scaling\.yarn_beta_fast"),
        ({"llama.rope.dimension_count": 4}, r"llama\.rope\.dimension_count=4 turns part of a head of 8"),
        ({"llama.attention.value_length": 16}, r"llama\.attention\.value_length=16 differs from the key's 8"),
        ({"llama.feed_forward_length": [64, 32]}, r"llama\.feed_forward_length differs between layers"),
        ({"general.type": "adapter"}, "holds a GGUF of type 'adapter', not a model"),
        ({"split.count": 3}, "is one of 3 parts of a split GGUF"),
    ],
)
def test_what_is_not_built_is_named(tmp_path, metadata, match):
    with pytest.raises(UnsupportedModelError, match=r"m\.gguf: .*" + match):
        open_gguf(tmp_path, metadata=metadata)


@pytest.mark.parametrize("architecture", ["qwen2", "gemma", "llama4"])
def test_other_architectures_are_named(tmp_path, architecture):
    with pytest.raises(UnsupportedModelError, match=f"GGUF architecture '{architecture}' is not built; built is 'llama'"):
        open_gguf(tmp_path, architecture=architecture)


@pytest.mark.parametrize(
    ("metadata", "match"),
    [
        ({"llama.embedding_length": 0}, r"metadata llama\.embedding_length is 0; it must be a positive integer"),
        ({"llama.context_length": "long"}, r"metadata llama\.context_length is 'long'; it must be a positive integer"),
        ({"llama.rope.freq_base": float("nan")}, r"metadata llama\.rope\.freq_base is nan; it must be a finite number"),
        ({"tokenizer.ggml.eos_token_id": "</s>"}, r"tokenizer\.ggml\.eos_token_id is '</s>'; it must be a token id"),
        ({"tokenizer.ggml.tokens": ["x"] * (V + 1)}, f"has {V + 1} tokens but 'token_embd.weight' has {V} rows"),
        ({"tokenizer.ggml.tokens": 5}, r"has metadata tokenizer\.ggml\.tokens=5 but"),
        (
            {"llama.attention.key_length": 7, "llama.attention.value_length": 7, "llama.rope.dimension_count": 7},
            "the head size is 7, which is odd",
        ),
    ],
)
def test_contradictions(tmp_path, metadata, match):
    with pytest.raises(CheckpointError, match=r"m\.gguf: .*" + match):
        open_gguf(tmp_path, metadata=metadata)


@pytest.mark.parametrize("key", ["llama.block_count", "llama.context_length", "llama.attention.layer_norm_rms_epsilon"])
def test_missing_keys_are_named(tmp_path, key):
    with pytest.raises(CheckpointError, match=f"has no metadata '{key}'"):
        open_gguf(tmp_path, drop=(key,))


def test_missing_architecture_and_embedding(tmp_path):
    path = write_gguf(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes().replace(b"general.architecture", b"general.architectur_"))
    with pytest.raises(CheckpointError, match=r"has no metadata 'general\.architecture'"):
        GgufCheckpoint(path)
    with pytest.raises(CheckpointError, match=r"has no tensor 'token_embd\.weight'"):
        open_gguf(tmp_path, drop=("token_embd.weight",))


def test_partial_attention_bias_is_refused(tmp_path):
    weights = hf_weights(bias=True)
    del weights["blk.0.attn_output.bias"]
    with pytest.raises(UnsupportedModelError, match="has biases on attn_q, attn_k, attn_v but not on all of"):
        open_gguf(tmp_path, weights)


def divisors(theta, head_size, factor, low, high, original):
    """What llama.cpp's converter writes: the rule in float32 frequencies, one divisor for each."""
    frequencies = np.float32(1) / np.power(np.float32(theta), np.arange(0, head_size, 2, dtype=np.float32) / np.float32(head_size))
    out = []
    for frequency in frequencies:
        wavelength = 2 * math.pi / float(frequency)
        if wavelength < original / high:
            out.append(1.0)
        elif wavelength > original / low:
            out.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            out.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(out, np.float32)


LLAMA31 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LLAMA32 = LLAMA31 | {"factor": 32.0}


@pytest.mark.parametrize(
    ("head_size", "theta", "rule"),
    [
        (128, 5e5, LLAMA31),
        (64, 5e5, LLAMA32),
        (128, 5e5, LLAMA32),
        (128, 5e5, LLAMA31 | {"high_freq_factor": 8.0, "original_max_position_embeddings": 4096}),
        (64, 1e6, LLAMA31 | {"factor": 2.5, "original_max_position_embeddings": 2048}),
        (128, 1e4, LLAMA31 | {"high_freq_factor": 2.5, "original_max_position_embeddings": 1024}),
    ],
)
def test_llama3_rope_is_recovered(head_size, theta, rule):
    written = divisors(
        theta, head_size, rule["factor"], rule["low_freq_factor"], rule["high_freq_factor"], rule["original_max_position_embeddings"]
    )
    assert recover_llama3(written, theta, head_size) == {"rope_type": "llama3"} | rule


def test_a_common_factor_of_the_lengths_changes_nothing():
    # (2, 8, 16384) and (1, 4, 8192) are the same rule.
    assert recover_llama3(divisors(5e5, 64, 32.0, 2.0, 8.0, 16384), 5e5, 64) == {"rope_type": "llama3"} | LLAMA32


def test_llama32_ratios_by_hand():
    # Llama-3.2-1B: plain up to i = 14, then these, then 1/32. Six digits: 5e-7; float32 frequencies on the ramp: 2^-23 * 4 / 3 * 4.
    ratios = 1 / divisors(5e5, 64, 32.0, 1.0, 4.0, 8192)
    np.testing.assert_allclose(ratios[14:19], [1, 0.605573, 0.303743, 0.103448, 1 / 32], rtol=0, atol=1.1e-6)


def test_llama3_rope_through_a_file(tmp_path):
    metadata = {"llama.attention.head_count": 1, "llama.attention.head_count_kv": 1, "llama.rope.freq_base": 5e5}
    metadata |= dict.fromkeys(("llama.attention.key_length", "llama.attention.value_length", "llama.rope.dimension_count"), 64)
    weights = {name: array for name, array in hf_weights().items() if "attn_q" not in name and "attn_k" not in name}
    factors = divisors(5e5, 64, 32.0, 1.0, 4.0, 8192)
    checkpoint = open_gguf(tmp_path, weights | {"rope_freqs.weight": factors}, metadata)
    assert checkpoint.config["rope_scaling"] == {"rope_type": "llama3"} | LLAMA32
    assert "rope_freqs.weight" not in checkpoint.names()
    rope = ModelConfig.from_hf(checkpoint.config).rope
    plain = 5e5 ** (-np.arange(32) / 32)
    # The file's divisors carry float32 rounding, amplified on the ramp by high/(high - low).
    np.testing.assert_allclose(rope.inverse_frequencies(64), plain / factors, rtol=2e-6)

    ones = open_gguf(tmp_path, weights | {"rope_freqs.weight": np.ones(32, np.float32)}, metadata)
    assert ones.config["rope_scaling"] is None
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs\.weight holds frequency factors that are not Llama 3's rule"):
        open_gguf(tmp_path, weights | {"rope_freqs.weight": np.linspace(1, 32, 32, dtype=np.float32)}, metadata)
    with pytest.raises(UnsupportedModelError, match=r"both rope_freqs\.weight and llama\.rope\.scaling\.factor=2\.0"):
        open_gguf(tmp_path, weights | {"rope_freqs.weight": factors}, metadata | {"llama.rope.scaling.factor": 2.0})


@pytest.mark.parametrize(
    "wrong",
    [
        np.ones(16),  # wrong length
        np.full(32, np.nan),
        np.full(32, 0.5),  # frequencies raised
        np.full(32, 8.0),  # linear scaling in disguise: nothing fixes the ramp
        divisors(5e5, 64, 32.0, 1.0, 4.0, 8192) * np.where(np.arange(32) == 16, 1 + 1e-5, 1),  # one entry off by 1e-5
        np.where(np.arange(32) < 16, 1.0, 32.0),  # a step without a ramp
        np.geomspace(1, 32, 32),
    ],
    ids=["length", "nan", "below 1", "constant", "perturbed", "step", "geometric"],
)
def test_other_divisors_are_not_taken_for_llama3(wrong):
    assert recover_llama3(wrong, 5e5, 64) is None


@pytest.mark.parity
def test_recovered_rope_equals_transformers():
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.LlamaConfig(
        hidden_size=64, num_attention_heads=1, head_dim=64, rope_parameters={"rope_type": "llama3", "rope_theta": 5e5} | LLAMA32
    )
    theirs = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0].double().numpy()
    written = 5e5 ** (-np.arange(32) / 32) / theirs
    assert recover_llama3(written, 5e5, 64) == {"rope_type": "llama3"} | LLAMA32
