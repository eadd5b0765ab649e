"""The model takes the kernels: which implementation `None` becomes inside `forward`, and the logits that come out on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pagedjax.batch import Chunk
from pagedjax.model import forward
from pallas_kernels import H200
from pallas_kernels._dispatch import Device, Op
from tests.helpers import decode_step, mixed_step, poisoned_cache, prefill, prompt, shuffled_blocks, tiny_params, variant
from tests.kernels.oracle import relative_error

AMPERE = Device("gpu", (8, 0), "NVIDIA A100")
CONFIG = variant(head_size=64, dtype="bfloat16")
needs_mosaic = pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="the Mosaic decode kernel needs jax 0.11.2")


def mixed(config):
    """A step of two decode rows beside one prompt of 70 tokens."""
    params, cache = tiny_params(config), poisoned_cache(config, num_blocks=40)
    lengths = [20, 40]
    prompts = [prompt(n + 1, seed=i) for i, n in enumerate(lengths)] + [prompt(70, seed=9)]
    blocks = shuffled_blocks([21, 41, 70], 16, 40)
    first = prefill([Chunk(row, 0, n) for row, n in enumerate(lengths)], prompts[:2], blocks[:2])
    new = prefill([Chunk(0, 0, 70)], prompts[2:], blocks[2:])
    rows = decode_step([ids[-1] for ids in prompts[:2]], lengths, blocks[:2])
    return params, cache, first, mixed_step(rows, new)


@pytest.mark.parametrize(
    ("device", "names"),
    [
        pytest.param(H200, ["mosaic_gpu", "mosaic_gpu", "pallas_triton"], marks=needs_mosaic),
        (AMPERE, ["pallas_triton"] * 3),
        (Device("cpu"), ["reference"] * 3),
    ],
    ids=str,
)
def test_forward_resolves_none(device, names, monkeypatch):
    chosen = {}
    resolve = Op.resolve

    def watched(op, implementation, problem, on):
        assert implementation is None
        chosen[op.name] = resolve(op, implementation, problem, on)
        return "reference"  # nothing of the kernel itself is of interest here

    monkeypatch.setattr(Op, "resolve", watched)
    params, cache, _, inputs = mixed(CONFIG)
    with pallas_kernels.compiling_for(device):
        jax.eval_shape(functools.partial(forward, config=CONFIG), params, cache, inputs)
    assert [chosen[op] for op in ("paged_attention", "paged_prefill_attention", "write_kv")] == names


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
def test_the_kernels_give_the_model_the_references_logits():
    params, cache, first, inputs = mixed(CONFIG)

    def logits(implementation):
        step = jax.jit(functools.partial(forward, config=CONFIG, implementation=implementation))
        _, filled = step(params, cache, first)
        return np.asarray(step(params, filled, inputs)[0].astype(jnp.float32))

    want = logits("reference")
    assert np.isfinite(want).all()
    assert relative_error(logits(None), want) < 2e-2  # two layers of bfloat16, each rounded in other places
