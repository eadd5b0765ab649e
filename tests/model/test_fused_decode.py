"""The fused decode step is the plain one: exactly up to float32's rounding, and as near as bfloat16 allows in its kernels."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax import fused_decode
from pagedjax.batch import Chunk
from pagedjax.engine import Engine
from pagedjax.engine_config import EngineConfig
from pagedjax.errors import ConfigError
from pagedjax.fused_decode import fused_forward, fused_rows, why_not_fused
from pagedjax.model import forward
from pagedjax.params import init_params
from pagedjax.request import SamplingParams
from tests.helpers import decode_step, poisoned_cache, prefill, prompt, shuffled_blocks, variant

# Widths that the kernels' tiles divide.
MODEL = variant(hidden_size=64, intermediate_size=128, num_heads=4, num_kv_heads=2, head_size=16, vocab_size=192, max_model_len=256)
INTERPRET = "pallas_triton_interpret"
CONTEXTS = (15, 16, 17, 1, 40)


def in_dtype(dtype, **changes):
    config = dataclasses.replace(MODEL, dtype=dtype, **changes)
    return config, jax.tree.map(lambda w: w * 3 if w.ndim > 1 else w + 0.25, init_params(config, jax.random.key(1)))


def steps(run, params, config, num=3):
    """Logits of `num` decode steps after a prefill, with a row of padding, among NaN; and the cache."""
    prompts = [prompt(n, n, config.vocab_size) for n in CONTEXTS]
    lengths = [n + num for n in CONTEXTS]
    blocks = shuffled_blocks(lengths, 16, 32)
    cache = poisoned_cache(config, 32)
    inputs = prefill([Chunk(row, 0, n) for row, n in enumerate(CONTEXTS)], prompts, blocks)
    _, cache = jax.jit(functools.partial(forward, config=config))(params, cache, inputs)
    step = jax.jit(functools.partial(run, config=config), donate_argnums=1)
    out = []
    for i in range(num):
        tokens = [(7 * row + 3 * i) % config.vocab_size for row in range(len(CONTEXTS))]
        inputs = decode_step(tokens, [n + i for n in CONTEXTS], blocks, pad_to=8)
        logits, cache = step(params, cache, inputs)
        out.append(np.asarray(logits)[: len(CONTEXTS)])
    return np.stack(out), cache


@pytest.mark.parametrize("tied", [True, False])
def test_equals_the_plain_step_in_float32(tied):
    config, params = in_dtype("float32", tie_word_embeddings=tied)
    want, want_cache = steps(forward, params, config)
    got, cache = steps(functools.partial(fused_forward, implementation="reference"), params, config)
    assert want.std() > 0.5
    # Sums of up to 128 float32 products in another order, through two layers.
    np.testing.assert_allclose(got, want, rtol=0, atol=128**0.5 * 2**-23 * np.abs(want).max() * 8)
    for a, b in zip(jax.tree.leaves(cache), jax.tree.leaves(want_cache), strict=True):
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b))  # the same cells were written
        np.testing.assert_allclose(np.nan_to_num(a), np.nan_to_num(b), atol=1e-5)


def test_its_kernels_are_as_near_to_float32_as_the_plain_step():
    config, params = in_dtype("bfloat16")
    exact, _ = steps(forward, jax.tree.map(lambda w: w.astype(jnp.float32), params), dataclasses.replace(config, dtype="float32"))
    plain, _ = steps(forward, params, config)
    fused, cache = steps(functools.partial(fused_forward, implementation=INTERPRET), params, config)
    error = lambda x: np.linalg.norm(x - exact) / np.linalg.norm(exact)  # noqa: E731
    assert 1e-4 < error(fused) < 1.5 * error(plain)
    assert cache.keys[0].dtype == jnp.bfloat16
    # Where the plain step's choice is clear, it is the same.
    top = np.sort(exact, axis=-1)
    clear = top[..., -1] - top[..., -2] > 8 * np.abs(plain - exact).max()
    assert clear.sum() > 3
    np.testing.assert_array_equal(fused.argmax(-1)[clear], plain.argmax(-1)[clear])


@pytest.mark.parametrize("part", ["attention_norm", "mlp_norm", "wqkv", "wo", "w_gate_up", "w_down"])
def test_every_weight_of_a_layer_counts(part):
    config, params = in_dtype("float32")
    layer = params.layers[1]
    changed = params.replace(layers=(params.layers[0], layer.replace(**{part: getattr(layer, part) * 1.5})))
    run = functools.partial(fused_forward, implementation="reference")
    want, _ = steps(forward, changed, config, 1)
    got, _ = steps(run, changed, config, 1)
    before, _ = steps(run, params, config, 1)
    np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max())
    assert np.abs(got - before).max() > 1e-2


# In an engine.

SETTINGS = dict(
    max_num_seqs=4, num_kv_blocks=64, token_budget=64, row_buckets=(1, 4), mixed_row_buckets=(4,), token_buckets=(64,), width_buckets=(16,)
)


def test_an_engine_with_it_gives_the_same_tokens_in_float32():
    config, params = in_dtype("float32")
    prompts = [prompt(n, n, config.vocab_size) for n in (5, 16, 30, 31)]
    asked = [SamplingParams(temperature=0.0, max_tokens=20), SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=20)] * 2
    plain = Engine(params, config, EngineConfig(**SETTINGS, implementation="reference"))
    fused = Engine(params, config, EngineConfig(**SETTINGS, implementation="reference", fused_decode_rows=4))
    assert (plain.engine_config.fused_decode_rows, fused.engine_config.fused_decode_rows) == (0, 4)
    calls = []
    counted = fused_decode.fused_forward

    def counting(*args, **kwargs):
        calls.append(1)
        return counted(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pagedjax.step.fused_forward", counting)
        got = fused.generate(prompts, asked, use_tqdm=False)
        assert calls
        calls.clear()
        want = plain.generate(prompts, asked, use_tqdm=False)
        assert not calls
    assert [r.token_ids for r in got] == [r.token_ids for r in want]


def test_what_is_measured_decides_and_what_is_asked_for_must_be_served(monkeypatch):
    config, params = in_dtype("bfloat16")
    of_engine = dict(kv_dtype="bfloat16", mesh=None, implementation=INTERPRET)
    ask = lambda asked, rows=(1, 4, 16, 64), **changes: fused_rows(asked, rows, params, config, **of_engine | changes)  # noqa: E731
    assert ask(None) == 0 and ask(0) == 0 and ask(3) == 1 and ask(20) == 16
    monkeypatch.setitem(fused_decode.FASTER_UP_TO, jax.devices()[0].device_kind, 64)
    assert ask(None) == 16 and ask(None, kv_dtype="float32") == 0  # no more than is served
    with pytest.raises(
        ConfigError, match=r"fused_decode_rows is 64, but windows of 64 rows can't be fused: 64 x 64 numbers .*: it serves 1 to 16"
    ):
        ask(64)
    for changes, message in (
        (dict(kv_dtype="float32"), "the model is bfloat16 and its cache float32"),
        (dict(implementation=None), "NVIDIA"),
    ):
        if changes == dict(implementation=None) and jax.default_backend() == "gpu":
            continue
        with pytest.raises(ConfigError, match=message):
            ask(4, **changes)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("tp",))
    with pytest.raises(ConfigError, match="it runs on one device, and the mesh has 1"):
        ask(4, mesh=mesh)
    biased, with_bias = in_dtype("bfloat16", attention_bias=True)
    assert why_not_fused(with_bias, biased, 1, **of_engine) == "the model has biases"


@pytest.mark.parametrize("value", [-1, True, 1.5])
def test_a_number_of_rows_is_one(value):
    with pytest.raises(ConfigError, match=f"fused_decode_rows is {value!r}; it must be an integer of at least 0"):
        EngineConfig(fused_decode_rows=value)


@pytest.mark.gpu
def test_on_a_gpu():
    config, params = in_dtype("bfloat16", hidden_size=512, intermediate_size=1024, num_heads=8, num_kv_heads=2, head_size=64)
    exact, _ = steps(forward, jax.tree.map(lambda w: w.astype(jnp.float32), params), dataclasses.replace(config, dtype="float32"))
    plain, _ = steps(forward, params, config)
    fused, _ = steps(fused_forward, params, config)
    error = lambda x: np.linalg.norm(x - exact) / np.linalg.norm(exact)  # noqa: E731
    assert 1e-4 < error(fused) < 1.5 * error(plain)
