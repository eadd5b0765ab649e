"""`ModelConfig.from_hf`: every spelling that is accepted, and everything else refused by name."""

import dataclasses

import pytest

from pagedjax.config import ModelConfig, RopeConfig
from pagedjax.errors import CheckpointError, ConfigError, UnsupportedModelError

LLAMA_1B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
LLAMA3_ROPE = RopeConfig(5e5, "llama3", 32.0, 1.0, 4.0, 8192)


def without(*keys, **changes):
    return {k: v for k, v in LLAMA_1B.items() if k not in keys} | changes


def test_the_flagship():
    config = ModelConfig.from_hf(LLAMA_1B)
    assert config == ModelConfig(128256, 2048, 8192, 16, 32, 8, 64, 1e-5, LLAMA3_ROPE, True, False, False, 131072, "bfloat16")
    assert config.num_parameters == 1_235_814_400
    assert config.kv_bytes_per_token == 32_768
    assert (config.group_size, config.dtype_bytes) == (4, 2)
    assert hash(config) == hash(ModelConfig.from_hf(LLAMA_1B))


def test_parameters_of_a_small_model_by_hand():
    # D=4, F=6, V=10, N=2, K=1, H=2: qkv 4*2*4 + bias 8, o 4*4 + bias 4, mlp 3*24 + bias 16, norms 8; embedding and head 40 each; norm 4.
    config = ModelConfig(10, 4, 6, 1, 2, 1, 2, attention_bias=True, mlp_bias=True)
    assert config.num_parameters == 32 + 8 + 16 + 4 + 72 + 16 + 8 + 80 + 4


@pytest.mark.parametrize("head_dim", [64, None, "absent"])
def test_head_dim_given_null_or_absent(head_dim):
    raw = without("head_dim") if head_dim == "absent" else without(head_dim=head_dim)
    assert ModelConfig.from_hf(raw).head_size == 64


@pytest.mark.parametrize(
    ("changes", "rope"),
    [
        (dict(rope_scaling=None), RopeConfig(5e5)),
        (dict(rope_scaling={"rope_type": "default"}), RopeConfig(5e5)),
        (dict(rope_scaling={"type": "linear", "factor": 2.0}), RopeConfig(5e5, "linear", 2.0)),
        (dict(rope_scaling={"type": "linear", "rope_type": "linear", "factor": 2}), RopeConfig(5e5, "linear", 2.0)),
        (dict(rope_scaling=None, rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 1e4}), RopeConfig(1e4)),
        (
            dict(rope_scaling=None, rope_parameters={**LLAMA_1B["rope_scaling"], "rope_theta": 7e5}),
            RopeConfig(7e5, "llama3", 32.0, 1.0, 4.0, 8192),
        ),
    ],
)
def test_rope_in_every_spelling(changes, rope):
    raw = without(**changes)
    if raw.get("rope_theta", 0) is None:
        del raw["rope_theta"]
    assert ModelConfig.from_hf(raw).rope == rope


def test_defaults_of_transformers():
    config = ModelConfig.from_hf(
        without("num_key_value_heads", "rope_theta", "rope_scaling", "rms_norm_eps", "tie_word_embeddings", "torch_dtype")
    )
    assert (config.num_kv_heads, config.rope, config.rms_norm_eps) == (32, RopeConfig(10000.0), 1e-6)
    assert (config.tie_word_embeddings, config.dtype) == (False, "bfloat16")


def test_chosen_dtype_and_length():
    config = ModelConfig.from_hf(LLAMA_1B, dtype="float32", max_model_len=4096)
    assert (config.dtype, config.max_model_len, config.kv_bytes_per_token) == ("float32", 4096, 65_536)
    assert ModelConfig.from_hf(without("torch_dtype", dtype="torch.float16")).dtype == "float16"


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (without(architectures=["MistralForCausalLM"]), "architecture 'MistralForCausalLM' is not built; built is LlamaForCausalLM"),
        (without(model_type="gemma2"), "model_type 'gemma2' is not built"),
        (without("model_type"), "model_type None is not built"),
        (without(hidden_act="gelu"), "hidden_act='gelu' is not built"),
        (without(sliding_window=4096), "sliding_window=4096 changes the computation"),
        (without(quantization_config={"quant_method": "fp8"}), "quantization_config=.*changes the computation"),
        (without(pretraining_tp=2), "pretraining_tp=2 changes the computation"),
        (without(final_logit_softcapping=30.0), "final_logit_softcapping=30.0 changes the computation"),
        (without(brand_new_trick=True), "unknown key brand_new_trick=True"),
        (without(rope_scaling={"rope_type": "yarn", "factor": 2.0}), "rope_type 'yarn' is not built; built are default, linear, llama3"),
        (without(layer_types=["full_attention", "sliding_attention"]), "layer_types=.* changes the computation"),
        (without(rope_scaling={"rope_type": "default", "partial_rotary_factor": 0.5}), "partial_rotary_factor=0.5 changes"),
        (without(torch_dtype="float8_e4m3fn"), "dtype 'float8_e4m3fn' is not one of float32, bfloat16, float16"),
    ],
)
def test_what_is_not_built_is_named(raw, message):
    with pytest.raises(UnsupportedModelError, match=message):
        ModelConfig.from_hf(raw)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (without(rope_scaling={"rope_type": "linear"}), r"rope_type 'linear' lacks \['factor'\]"),
        (without(rope_scaling={"rope_type": "linear", "factor": 2.0, "beta": 1}), r"rope_type 'linear' has unknown \['beta'\]"),
        (without(rope_scaling={"rope_type": "linear", "type": "llama3"}), "rope_type='linear' and type='llama3' differ"),
        (without(rope_scaling={"rope_type": "linear", "factor": 0}), "rope factor is 0; it must be a positive finite number"),
        (without(rope_scaling="linear"), "rope parameters are 'linear'; they must be an object"),
        (
            without(rope_scaling={**LLAMA_1B["rope_scaling"], "low_freq_factor": 4.0}),
            "low_freq_factor 4.0 must be below high_freq_factor 4.0",
        ),
        (without(rope_parameters={"rope_type": "default"}), "both rope_parameters and rope_scaling and they differ"),
        (without("hidden_size"), "config.json has no 'hidden_size'"),
        (without(hidden_size="big"), "hidden_size is 'big'; it must be a positive integer"),
        (without(rms_norm_eps="tiny"), "rms_norm_eps is 'tiny'; it must be a finite number"),
        (without(num_attention_heads=0), "num_attention_heads is 0; it must be a positive integer"),
        (without(head_dim=None, hidden_size=2049), "hidden_size 2049 is not a multiple of num_attention_heads 32"),
        (without(tie_word_embeddings="false"), "tie_word_embeddings is 'false'; it must be true or false"),
        (without(attention_bias="no"), "attention_bias is 'no'; it must be true or false"),
        (without(mlp_bias=1), "mlp_bias is 1; it must be true or false"),
        (
            without(rope_scaling={**LLAMA_1B["rope_scaling"], "original_max_position_embeddings": 8192.5}),
            "original_max_position_embeddings is 8192.5; it must be an integer",
        ),
    ],
)
def test_what_makes_no_sense_is_named(raw, message):
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_hf(raw)


def test_keys_that_change_nothing_are_read_over():
    """As older checkpoints carry them: of generation, training and the tokenizer, and neutral values."""
    old = dict(max_length=4096, max_sequence_length=2048, tokenizer_class="LlamaTokenizer", temperature=0.9, do_sample=True, prefix=None)
    neutral = dict(is_decoder=False, layer_types=["full_attention"] * 16, task_specific_params=None, gradient_checkpointing=False)
    assert ModelConfig.from_hf(without(**old, **neutral)) == ModelConfig.from_hf(LLAMA_1B)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(num_layers=0), "num_layers is 0; it must be a positive integer"),
        (dict(num_kv_heads=3), "num_heads 2 is not a multiple of num_kv_heads 3"),
        (dict(head_size=63), "head_size 63 is odd"),
        (dict(rms_norm_eps=-1.0), "rms_norm_eps is -1.0; it must be a positive finite number"),
        (dict(rms_norm_eps=float("nan")), "rms_norm_eps is nan"),
        (dict(dtype="int8"), "dtype 'int8' is not one of"),
    ],
)
def test_a_config_made_by_hand_is_checked_too(change, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(ModelConfig(10, 4, 6, 1, 2, 1, 2), **change)


def test_rope_made_by_hand_is_checked_too():
    with pytest.raises(UnsupportedModelError, match="rope kind 'yarn' is not built; built are default, linear, llama3"):
        RopeConfig(kind="yarn", factor=4.0)
    with pytest.raises(ConfigError, match="rope theta is 0; it must be a positive finite number"):
        RopeConfig(theta=0)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (dict(max_model_len=131073), "max_model_len 131073 exceeds the 131072 positions"),
        (dict(max_model_len=0), "max_model_len is 0; it must be a positive integer"),
        (dict(dtype="int8"), "dtype 'int8' is not one of float32, bfloat16, float16"),
    ],
)
def test_bad_choices(asked, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hf(LLAMA_1B, **asked)
