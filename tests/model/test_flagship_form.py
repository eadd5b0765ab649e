"""A random checkpoint in the exact form of Llama-3.2-1B: file names, tensor names, shapes, dtype and config. It loads and generates."""

import json
import math

import chex
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pagedjax.checkpoint import open_checkpoint
from pagedjax.config import ModelConfig, RopeConfig
from pagedjax.generation import generate
from pagedjax.load import eos_token_ids, load_config, load_params
from pagedjax.params import hf_names
from tests.helpers import dense_logits, prompt

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
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
GENERATION_CONFIG = {
    "bos_token_id": 128000,
    "do_sample": True,
    "eos_token_id": [128001, 128008, 128009],
    "temperature": 0.6,
    "top_p": 0.9,
    "transformers_version": "4.45.0.dev0",
}
# A layer's tensors as the published file has them, written out rather than derived from the code under test.
LAYER = {
    "input_layernorm.weight": (2048,),
    "mlp.down_proj.weight": (2048, 8192),
    "mlp.gate_proj.weight": (8192, 2048),
    "mlp.up_proj.weight": (8192, 2048),
    "post_attention_layernorm.weight": (2048,),
    "self_attn.k_proj.weight": (512, 2048),
    "self_attn.o_proj.weight": (2048, 2048),
    "self_attn.q_proj.weight": (2048, 2048),
    "self_attn.v_proj.weight": (512, 2048),
}


def tensors(num_layers):
    """Name and shape of every tensor in the file, in its order."""
    layers = {f"model.layers.{i}.{name}": shape for i in range(num_layers) for name, shape in LAYER.items()}
    return {"model.embed_tokens.weight": (128256, 2048), **layers, "model.norm.weight": (2048,)}


def contents(index, name, shape):
    """A tensor's random bfloat16 values, the same for every call.

    All are cut from one run of noise whose length, a prime, divides no row length: no two rows of a matrix are equal.
    """
    if "norm" in name:
        return np.ones(shape, ml_dtypes.bfloat16)
    period = 1_000_003
    noise = (np.random.default_rng(0).standard_normal(period, np.float32) * 0.02).astype(ml_dtypes.bfloat16)
    return np.resize(np.roll(noise, index * 7919), shape)


def write_checkpoint(folder, num_layers):
    """The folder, its safetensors file written tensor by tensor so that no more than one is in memory."""
    shapes = tensors(num_layers)
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes.items():
        end = at + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, end]}
        at = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for index, (name, shape) in enumerate(shapes.items()):
            file.write(contents(index, name, shape).view(np.uint8).data)
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": num_layers}))
    (folder / "generation_config.json").write_text(json.dumps(GENERATION_CONFIG))
    return folder


def test_full_config_and_its_146_tensors():
    config = ModelConfig.from_hf(CONFIG)
    assert config == ModelConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_size=64,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=5e5, kind="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192),
        tie_word_embeddings=True,
        max_model_len=131072,
        dtype="bfloat16",
    )
    assert len(hf_names(config)) == 146
    assert hf_names(config) == tensors(16)
    assert config.num_parameters == 1_235_814_400
    assert config.kv_bytes_per_token == 32 * 1024


def check_loads_and_generates(folder, num_layers):
    write_checkpoint(folder, num_layers)
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.names() == tensors(num_layers).keys()
        config = load_config(checkpoint, max_model_len=4096)
        params = load_params(checkpoint, config)
        assert eos_token_ids(checkpoint) == (128001, 128008, 128009)
    # The second query head of the third KV head in the last layer, found where the fused form keeps it.
    name = f"model.layers.{num_layers - 1}.self_attn.q_proj.weight"
    q = contents(list(tensors(num_layers)).index(name), name, LAYER["self_attn.q_proj.weight"])
    chex.assert_trees_all_equal(params.layers[-1].wqkv[2, 1], q[(2 * 4 + 1) * 64 :][:64])
    assert params.embedding.dtype == jnp.bfloat16
    assert params.lm_head is None

    prompts, num_new = [prompt(5, vocab_size=128256), prompt(17, seed=1, vocab_size=128256)], 6
    result = generate(params, config, prompts, num_new, eos_ids=(128001, 128008, 128009))
    for ids, new, reason in zip(prompts, result.token_ids, result.finish_reasons, strict=True):
        logits = np.asarray(dense_logits(params, ids + new, config))[len(ids) - 1 : -1]
        assert np.all(np.isfinite(logits))
        assert len(new) == num_new or reason == "stop"
        # Each token is the dense model's own choice, up to a few roundings to bfloat16 (8 bits) of the largest logit.
        behind = logits.max(-1) - logits[np.arange(len(new)), new]
        assert np.all(behind <= 4 * 2**-8 * np.abs(logits).max()), behind


def test_two_layers_load_and_generate(tmp_path):
    """Every size but the depth is the published one: 0.8 GB on disk and in memory."""
    check_loads_and_generates(tmp_path, 2)
    (tmp_path / "model.safetensors").unlink()  # pytest keeps the folders of its last runs


@pytest.mark.slow
def test_all_layers_load_and_generate(tmp_path):
    """2.5 GB on disk and in memory."""
    check_loads_and_generates(tmp_path, 16)
    (tmp_path / "model.safetensors").unlink()
