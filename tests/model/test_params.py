"""The weights' declaration: Hugging Face names and back, strict about every one of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.config import ModelConfig, RopeConfig
from pagedjax.errors import CheckpointError
from pagedjax.load import eos_token_ids, load_params
from pagedjax.params import declare, hf_names, init_params, params_from_hf_dict, params_to_hf
from tests.helpers import TINY, tiny_params, variant

FULL = variant(attention_bias=True, mlp_bias=True, num_heads=6)


@pytest.mark.parametrize("config", [TINY, FULL, variant(tie_word_embeddings=True)], ids=["plain", "bias", "tied"])
def test_there_and_back(config):
    params = init_params(config, jax.random.key(0))
    hf = params_to_hf(params, config)
    assert {name: value.shape for name, value in hf.items()} == hf_names(config)
    jax.tree.map(np.testing.assert_array_equal, params_from_hf_dict(hf, config), params)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == config.num_parameters


def test_fused_rows_are_the_right_heads():
    config = variant(num_heads=4, num_kv_heads=2)
    hf = params_to_hf(tiny_params(config), config)
    layer = params_from_hf_dict(hf, config).layers[1]
    q, k, v = (hf[f"model.layers.1.self_attn.{p}_proj.weight"].reshape(-1, 8, 32) for p in "qkv")
    for kv_head in range(2):
        for g in range(2):
            np.testing.assert_array_equal(layer.wqkv[kv_head, g], q[2 * kv_head + g])
        np.testing.assert_array_equal(layer.wqkv[kv_head, 2], k[kv_head])
        np.testing.assert_array_equal(layer.wqkv[kv_head, 3], v[kv_head])
    np.testing.assert_array_equal(layer.w_gate_up[1], hf["model.layers.1.mlp.up_proj.weight"])


def test_the_flagship_has_146_tensors():
    rope = RopeConfig(5e5, "llama3", 32.0)
    config = ModelConfig(128256, 2048, 8192, 16, 32, 8, 64, 1e-5, rope, tie_word_embeddings=True)
    names = hf_names(config)
    assert len(names) == 146
    assert names["model.layers.15.self_attn.k_proj.weight"] == (512, 2048)
    assert sum(np.prod(shape) for shape in names.values()) == config.num_parameters


def test_every_weight_that_can_be_split_is():
    for weight in jax.tree.leaves(declare(FULL)):
        big = len(weight.shape) > 1
        assert (weight.split is not None) == big, weight


def test_random_weights_are_reproducible_and_of_the_right_dtype():
    config = variant(dtype="bfloat16")
    one, two = (init_params(config, jax.random.key(3)) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, one, two)
    assert {leaf.dtype for leaf in jax.tree.leaves(one)} == {jnp.dtype("bfloat16")}
    # 97 * 32 draws: the standard deviation's own error is 0.02 / sqrt(2 * 3104).
    assert float(jnp.std(one.embedding.astype(jnp.float32))) == pytest.approx(0.02, abs=5 * 0.02 / (2 * 3104) ** 0.5)
    np.testing.assert_array_equal(one.final_norm, np.ones(32))


class Fake:
    """A checkpoint in memory."""

    source = "fake"

    def __init__(self, tensors):
        self.tensors = tensors
        self.generation_config = self.config = {}
        self.reads = []

    def names(self):
        return frozenset(self.tensors)

    def shape(self, name):
        return self.tensors[name].shape

    def dtype(self, name):
        return self.tensors[name].dtype

    def read(self, name):
        self.reads.append(name)
        return self.tensors[name]


def tensors(config=TINY):
    return params_to_hf(tiny_params(config), config)


def test_loading_reads_each_tensor_once_and_casts():
    fake = Fake({name: value.astype(np.float16) for name, value in tensors().items()})
    seen = []
    params = load_params(fake, variant(dtype="bfloat16"), progress=lambda done, total: seen.append((done, total)))
    assert sorted(fake.reads) == sorted(hf_names(TINY))
    assert seen == [(i + 1, len(seen)) for i in range(len(hf_names(TINY)))]
    assert params.embedding.dtype == jnp.bfloat16


def test_old_rotary_constants_are_not_weights():
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    load_params(Fake(tensors() | extra), TINY)


def test_a_stored_tied_head_must_be_the_embedding():
    config = variant(tie_word_embeddings=True)
    head = {"lm_head.weight": tensors(config)["model.embed_tokens.weight"].copy()}
    load_params(Fake(tensors(config) | head), config)
    head["lm_head.weight"][0, 0] += 1
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from it"):
        load_params(Fake(tensors(config) | head), config)


def test_missing_unexpected_misshapen_and_wrongly_typed():
    name = "model.layers.0.mlp.down_proj.weight"
    good = tensors()
    with pytest.raises(CheckpointError, match=f"fake lacks 1 tensor: {name}"):
        load_params(Fake({k: v for k, v in good.items() if k != name}), TINY)
    with pytest.raises(CheckpointError, match=r"fake has unexpected 1 tensor: model\.layers\.0\.mlp\.extra\.weight"):
        load_params(Fake(good | {"model.layers.0.mlp.extra.weight": good[name]}), TINY)
    with pytest.raises(CheckpointError, match=rf"tensor {name} has shape \(48, 32\); the config asks for \(32, 48\)"):
        load_params(Fake(good | {name: good[name].T}), TINY)
    with pytest.raises(CheckpointError, match=f"tensor {name} has dtype int8; weights are floating point"):
        load_params(Fake(good | {name: good[name].astype(np.int8)}), TINY)
    with pytest.raises(CheckpointError, match=r"the dict lacks 20 tensors: .* and 12 more"):
        params_from_hf_dict({"model.norm.weight": good["model.norm.weight"]}, TINY)


@pytest.mark.parametrize(
    ("generation", "config", "want"),
    [
        ({"eos_token_id": [5, 6]}, {"eos_token_id": 2}, (5, 6)),
        ({"eos_token_id": 5}, {}, (5,)),
        ({}, {"eos_token_id": 2}, (2,)),
        ({}, {}, ()),
    ],
)
def test_end_tokens(generation, config, want):
    fake = Fake({})
    fake.generation_config, fake.config = generation, config
    assert eos_token_ids(fake) == want
