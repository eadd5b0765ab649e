"""Two devices, each with half of the KV heads, give what one gives."""

import chex
import jax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pagedjax import generation
from pagedjax.batch import Chunk
from pagedjax.kv_cache import make_cache
from pagedjax.model import forward
from pagedjax.params import MESH_AXIS, check_mesh, declare, sharding_of
from tests.helpers import TINY, decode_step, mixed_step, prefill, prompt, shuffled_blocks, tiny_params, variant


@pytest.fixture
def mesh() -> Mesh:
    if jax.device_count() < 2:
        # The CPU always has two here (tests/conftest.py), unless XLA_FLAGS says otherwise: then this must not pass unseen.
        (pytest.fail if jax.default_backend() == "cpu" else pytest.skip)("needs two devices")
    return jax.make_mesh((2,), (MESH_AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])


def shard(params, config, mesh):
    return jax.tree.map(lambda weight, value: jax.device_put(value, sharding_of(weight, mesh)), declare(config), params)


@pytest.mark.parametrize("config", [TINY, variant(vocab_size=98, attention_bias=True, mlp_bias=True)], ids=["plain", "bias"])
def test_sharded_forward_equals_unsharded(mesh, config):
    config = variant(vocab_size=98) if config is TINY else config
    params = tiny_params(config)
    prompts, blocks = [prompt(17), prompt(20, 1)], shuffled_blocks([18, 20], 16, 8)
    inputs = mixed_step(decode_step([3], [2], [[7]], pad_to=2), prefill([Chunk(0, 0, 17), Chunk(1, 0, 20)], prompts, blocks))
    run = jax.jit(forward, static_argnames=("config", "mesh"))
    want, want_cache = run(params, make_cache(config, 8), inputs, config=config)
    pools = NamedSharding(mesh, PartitionSpec(None, MESH_AXIS))
    got, got_cache = run(shard(params, config, mesh), make_cache(config, 8, sharding=pools), inputs, config=config, mesh=mesh)
    assert all(leaf.sharding.is_equivalent_to(pools, leaf.ndim) for leaf in jax.tree.leaves(got_cache))
    # The o and down projections add two halves: the same sums in another order, logits up to about 30.
    chex.assert_trees_all_close(got, want, atol=64 * 2**-23 * 32)
    chex.assert_trees_all_close(got_cache, want_cache, atol=64 * 2**-23 * 32)


def test_sharded_generate_equals_unsharded(mesh):
    config = variant(vocab_size=98)
    params = tiny_params(config)
    prompts = [prompt(5), prompt(18, 1)]
    want = generation.generate(params, config, prompts, 12)
    got = generation.generate(shard(params, config, mesh), config, prompts, 12, options=generation.RunOptions(mesh=mesh))
    assert got.token_ids == want.token_ids


def test_meshes_that_do_not_fit(mesh):
    with pytest.raises(ValueError, match="num_kv_heads 1 cannot be divided over 2 devices"):
        check_mesh(variant(num_kv_heads=1), mesh)
    with pytest.raises(ValueError, match="vocab_size 97 cannot be divided over 2 devices"):
        check_mesh(TINY, mesh)
    other = Mesh(mesh.devices, ("data",))
    with pytest.raises(ValueError, match=r"axes \('data',\); it must have the one axis 'tp'"):
        check_mesh(TINY, other)
    explicit = jax.make_mesh((2,), (MESH_AXIS,), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    with pytest.raises(ValueError, match="axis types"):
        check_mesh(variant(vocab_size=98), explicit)
