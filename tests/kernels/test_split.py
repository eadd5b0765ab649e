"""The split rule of the Triton decode kernels, and the table of tuned settings."""

import json
from importlib import resources

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tuning
from pallas_kernels._dispatch import H200, Device
from pallas_kernels.paged_attention import describe
from pallas_kernels.paged_attention.mosaic_gpu import Tiling, tiling_for
from pallas_kernels.paged_attention.split import TileConfig, most_splits, most_tokens, num_splits, shrink, tile_config, tokens_per_split


@pytest.mark.parametrize(
    "config",
    [TileConfig(), TileConfig(tile=16, direct=16, chunk=16), TileConfig(tile=128, direct=1024, chunk=256), TileConfig(max_splits=5)],
)
def test_splits_cover_every_row_once_and_fit_the_grid(config):
    tokens = np.arange(0, 70000, 7, dtype=np.int32)
    share, splits = np.asarray(tokens_per_split(tokens, config)), np.asarray(num_splits(tokens, config))
    assert (share % config.tile == 0).all()
    assert (share * splits >= tokens).all()
    assert (share * (splits - 1) < np.maximum(tokens, 1)).all(), "no split is empty"
    assert (splits[(tokens > 0) & (tokens <= config.direct)] == 1).all(), "short rows are not split"
    assert splits[0] == 0
    assert (splits <= [most_splits(int(n), config) for n in tokens]).all()
    assert splits.max() <= config.max_splits


def problem(head_size, dtype, block_size=16, width=4, **options):
    pool = jnp.zeros((3, 1, block_size, head_size), dtype)
    ints = jnp.zeros((1, width), jnp.int32), jnp.zeros((1,), jnp.int32)
    return describe(jnp.zeros((1, 1, head_size), dtype), pool, pool, *ints, **options)


def test_a_sliding_window_bounds_the_tokens_that_are_read():
    assert most_tokens(problem(64, jnp.float32, width=100)) == 1600
    assert most_tokens(problem(64, jnp.float32, width=100, sliding_window=50)) == 66
    assert most_tokens(problem(64, jnp.float32, width=2, sliding_window=50)) == 32


def test_the_tile_shrinks_with_the_longest_row():
    assert shrink(TileConfig(tile=64), 2048).tile == 64
    assert shrink(TileConfig(tile=64), 24).tile == 32
    assert shrink(TileConfig(tile=64), 1).tile == 16


@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_the_heuristic_keeps_shared_memory_to_96_kib(head_size, dtype):
    config = tile_config(problem(head_size, dtype), Device("gpu", (8, 6), "unknown card"), "pallas_triton")
    padded = 1 << (head_size - 1).bit_length()
    assert 2 * config.num_stages * config.tile * padded * jnp.dtype(dtype).itemsize <= 96 << 10
    assert config.num_stages >= 2


def test_tuned_settings_come_from_the_devices_table(monkeypatch):
    entry = {"match": {"head_size": 128, "itemsize": 2}, "config": {"tile": 32, "chunk": 1024}}
    monkeypatch.setattr(
        tuning, "load", lambda kind: {"settings": {"paged_attention": {"pallas_triton": [entry]}}} if kind == H200.kind else {}
    )
    assert tile_config(problem(96, jnp.bfloat16), H200, "pallas_triton") == TileConfig(tile=32, chunk=1024)  # 96 is padded to 128
    assert tile_config(problem(64, jnp.bfloat16), H200, "pallas_triton").tile == 64
    assert tile_config(problem(128, jnp.float32), H200, "pallas_triton").tile == 32  # the heuristic: its dtype was not measured


def test_the_tiling_of_the_mosaic_kernel_comes_from_the_devices_table_too(monkeypatch):
    entry = {"match": {"head_size": 128, "itemsize": 2}, "config": {"tile": 128, "chains": 4}}
    monkeypatch.setattr(
        tuning, "load", lambda kind: {"settings": {"paged_attention": {"mosaic_gpu": [entry]}}} if kind == H200.kind else {}
    )
    assert tiling_for(128, H200) == Tiling(128, 4)
    assert tiling_for(128, Device("gpu", (9, 0), "another Hopper")) == Tiling(64, 8)


def test_every_table_in_the_package_is_well_formed():
    for file in resources.files(tuning).iterdir():
        if file.name.endswith(".json"):
            table = json.loads(file.read_text())
            assert {"device", "date", "versions", "command", "settings"} <= set(table)
            for implementation, entries in table["settings"]["paged_attention"].items():
                for entry in entries:
                    (Tiling if implementation == "mosaic_gpu" else TileConfig)(**entry["config"])
    assert tuning.load("no such device") == {}
