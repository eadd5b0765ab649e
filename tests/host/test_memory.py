"""How many blocks fit: numbers that can be checked by hand."""

import re

import pytest

from pagedjax.errors import ConfigError
from pagedjax.memory import DeviceMemory, num_blocks_that_fit, usable_bytes

GIB = 1 << 30


def test_by_hand():
    # Of 100 units 90 may be used; 20 are weights, 10 workspace: 60 are left for blocks of 2, of which one is the null block.
    sizes = dict(weight_bytes=20, workspace_bytes=10, block_bytes=2)
    assert num_blocks_that_fit(DeviceMemory(100, 100), utilization=0.9, **sizes) == 29
    assert num_blocks_that_fit(DeviceMemory(100, 100, other_bytes=7), utilization=0.9, **sizes) == 25  # 53 are left
    assert num_blocks_that_fit(DeviceMemory(100, 75), utilization=0.9, **sizes) == 21  # JAX reserved three quarters: 45 are left
    assert num_blocks_that_fit(DeviceMemory(100, 75), utilization=0.5, **sizes) == 9
    assert usable_bytes(DeviceMemory(100, 75, 5), 0.9) == 70


def test_llama_1b_on_an_80_gib_gpu():
    """2.47 GB of weights, 1 GiB of workspace, 16 tokens of 32,768 bytes a block."""
    blocks = num_blocks_that_fit(
        DeviceMemory(80 * GIB, 75 * GIB), utilization=0.9, weight_bytes=2_471_645_184, workspace_bytes=GIB, block_bytes=16 * 32_768
    )
    assert blocks == (72 * GIB - 2_471_645_184 - GIB) // 524_288 - 1 == 140_692


def test_too_little_memory_names_every_number_and_the_knobs():
    said = (
        "3 KV blocks fit and at least 4 are needed: of 10.00 GiB the engine may use 5.00 (gpu_memory_utilization 0.5, JAX's own limit 7.50)"
        "; the weights take 2.00, the compiled step 0.50, other arrays 0.50 GiB, a block 536870912 bytes. Raise gpu_memory_utilization or "
        "XLA_CLIENT_MEM_FRACTION, or lower max_model_len, max_num_seqs or token_budget"
    )
    memory = DeviceMemory(10 * GIB, 15 * GIB // 2, GIB // 2)
    sizes = dict(utilization=0.5, weight_bytes=2 * GIB, workspace_bytes=GIB // 2, block_bytes=GIB // 2)
    assert num_blocks_that_fit(memory, **sizes, min_blocks=3) == 3
    with pytest.raises(ConfigError, match=re.escape(said)):
        num_blocks_that_fit(memory, **sizes, min_blocks=4)
    with pytest.raises(ConfigError, match=r"^0 KV blocks fit and at least 1 are needed"):
        num_blocks_that_fit(memory, **sizes | dict(weight_bytes=9 * GIB))
