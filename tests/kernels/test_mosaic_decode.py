"""The Mosaic GPU decode kernel: compiled for an H200 on any machine that can, its numbers on a Hopper GPU."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_attention
from pallas_kernels._dispatch import H200, Device
from pallas_kernels.paged_attention import OP, describe, mosaic_gpu
from pallas_kernels.paged_attention.mosaic_gpu import Config, Tiling, config_for, tiling_for
from tests.kernels.h200 import compile_for_h200, needs_compiler
from tests.kernels.oracle import make_case, relative_error

BF16_TOLERANCE = 5e-3  # weights and output are rounded to 2**-9, at random: the norm of the error stays below the worst term


def shapes(rows=2, heads=8, kv_heads=2, head_size=64, block_size=16, width=4, blocks=9, dtype="bfloat16"):
    pool = jax.ShapeDtypeStruct((blocks, kv_heads, block_size, head_size), jnp.dtype(dtype))
    q = jax.ShapeDtypeStruct((rows, heads, head_size), jnp.dtype(dtype))
    return q, pool, pool, jax.ShapeDtypeStruct((rows, width), jnp.int32), jax.ShapeDtypeStruct((rows,), jnp.int32)


# ---- what it serves ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "float32"}, "serves bfloat16 and float16, got float32"),
        ({"head_size": 80}, "serves head sizes 64, 128, 192 and 256, got 80"),
        ({"head_size": 320}, "serves head sizes 64, 128, 192 and 256, got 320"),
        ({"heads": 34}, "serves at most 16 query heads per key/value head, got 17"),
        ({"block_size": 4}, "serves blocks of 8 tokens and more, got 4"),
        ({"blocks": 1 << 26}, "serves pools of fewer than 2\\^31 vectors, got 2147483648"),
        ({"rows": 1 << 21}, "serves q of fewer than 2\\^30 and tables of fewer than 2\\^31 numbers, got 2097152 rows"),
    ],
)
def test_hands_over_with_a_reason(change, reason, monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))  # an older one is the first reason
    problem = describe(*shapes(**change))
    with pytest.raises(NotImplementedError, match=reason):
        OP.resolve("mosaic_gpu", problem, H200)


@pytest.mark.parametrize(
    ("device", "reason"),
    [(Device("cpu"), "needs a Hopper GPU"), (Device("gpu", (8, 0)), "needs a Hopper GPU"), (Device("gpu", (10, 0)), "needs a Hopper GPU")],
)
def test_needs_hopper(device, reason):
    assert reason in mosaic_gpu.why_not(describe(*shapes()), device, interpret=False)
    assert reason in mosaic_gpu.why_not(None, device, interpret=False)


def test_needs_a_new_jax(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 1))
    assert "needs jax 0.11.2 or newer" in mosaic_gpu.why_not(None, H200, interpret=False)


def test_has_no_interpreter():
    assert "wgmma cannot be interpreted" in mosaic_gpu.why_not(None, H200, interpret=True)


@pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="the kernel needs jax 0.11.2")
def test_is_the_choice_on_hopper_and_hands_over_to_triton():
    assert OP.resolve(None, describe(*shapes()), H200) == "mosaic_gpu"
    assert OP.resolve(None, describe(*shapes(head_size=80)), H200) == "pallas_triton"
    assert OP.resolve(None, describe(*shapes(dtype="float32")), H200) == "pallas_triton"


# ---- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tile": 96}, "tile must be 64, 128 or 256, got 96"),
        ({"chains": 17}, "chains must be 1 to 16, got 17"),
        ({"splits": 3}, "splits must be 1 to 8 and divide chains, got splits 3 and chains 8"),
        ({"splits": 16, "chains": 16}, "splits must be 1 to 8 and divide chains, got splits 16 and chains 16"),
        ({"stages": 1}, "stages must be 2 to 8, got 1"),
    ],
)
def test_settings_are_checked(change, message):
    with pytest.raises(ValueError, match=message):
        Config(**{"tile": 64, "chains": 8, "splits": 2, "stages": 2} | change)


def test_settings_that_do_not_fit_are_refused():
    config = Config(tile=256, chains=8, splits=1, stages=4)
    with pytest.raises(ValueError, match="needs 547840 bytes of shared memory for head size 128 and group 4; a CTA has 232448"):
        mosaic_gpu.paged_attention(*shapes(head_size=128), scale=1.0, config=config)


@pytest.mark.parametrize("head_size", [64, 128, 192, 256])
def test_the_settings_that_numbers_depend_on_do_not_depend_on_the_batch(head_size):
    tiling = tiling_for(head_size, H200)
    configs = [config_for(rows, kv_heads, head_size, 4, tiling) for rows, kv_heads in itertools.product((1, 2, 7, 64, 512), (1, 8))]
    assert {Tiling(c.tile, c.chains) for c in configs} == {tiling}
    assert configs[0].splits == configs[0].chains, "one row gets as much of the chip as there is"
    assert all(config_for(512, 8, head_size, g, tiling).splits <= 2 for g in (1, 4, 16))


@pytest.mark.parametrize(
    ("rows", "splits", "stages"),
    [(1, 8, 3), (2, 8, 3), (3, 4, 3), (8, 2, 3), (16, 1, 3), (20, 4, 2), (24, 2, 2), (32, 1, 2), (64, 2, 2), (128, 1, 2), (512, 1, 2)],
)
def test_rows_share_the_multiprocessors_evenly(rows, splits, stages):
    for head_size, tiling in ((64, Tiling(128, 8)), (128, Tiling(64, 8))):
        assert config_for(rows, 8, head_size, 4, tiling) == Config(tiling.tile, tiling.chains, splits, stages)


def test_the_settings_fit_into_shared_memory():
    for rows, head_size, group in itertools.product((1, 8, 64), (64, 128, 192, 256), range(1, 17)):
        for device in (H200, Device("gpu", (9, 0), "an untuned Hopper")):
            assert config_for(rows, 8, head_size, group, tiling_for(head_size, device)).fits(group, head_size)


# ---- compiled, on any machine -----------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize(
    ("change", "options"),
    [
        ({}, {}),
        ({"rows": 64, "kv_heads": 8, "heads": 32, "head_size": 128}, {}),  # one CTA for a row and KV head
        ({"heads": 6, "block_size": 8}, {"sliding_window": 100, "return_lse": True}),
        ({"heads": 32, "head_size": 256, "block_size": 128}, {"soft_cap": 30.0}),
        ({"rows": 7, "kv_heads": 1, "heads": 7, "head_size": 192, "block_size": 256, "dtype": "float16"}, {"return_lse": True}),
        ({"blocks": (1 << 26) - 1}, {}),  # 2^37 numbers in a pool
    ],
)
def test_compiles_for_an_h200(change, options):
    op = functools.partial(paged_attention, implementation="mosaic_gpu", **options)
    compiled = compile_for_h200(op, *shapes(**change))
    calls = [line for line in compiled.as_text().splitlines() if "custom-call(" in line]
    assert len(calls) == 1, "one kernel and nothing beside it"
    assert "mosaic_gpu" in calls[0]
    assert compiled.memory_analysis().temp_size_in_bytes < 1024


# ---- numbers, on a GPU ------------------------------------------------------------------------------------------------

CONFIGS = {splits: Config(tile=64, chains=8, splits=splits, stages=3) for splits in (1, 2, 4, 8)}


def edges(block_size, width):
    return [0, 1, block_size - 1, block_size, block_size + 1, width * block_size, 63, 64, 65, 0]


def run(case, dtype="bfloat16", config=None, poison=True, **options):
    arrays = case.arrays(dtype, poison)
    problem = describe(*arrays, return_lse=True, **options)
    assert mosaic_gpu.supports(problem) is None
    out, lse = mosaic_gpu.run(problem, *arrays, config=config)
    return np.asarray(out.astype(jnp.float32)), np.asarray(lse)


def check(case, got, dtype="bfloat16", tolerance=BF16_TOLERANCE, **options):
    out, lse = got
    want, want_lse = case.oracle(dtype, **options)
    some = np.asarray(case.context_lens) > 0
    assert not out[~some].any()
    assert np.isneginf(lse[~some]).all()
    for b in np.flatnonzero(some):
        assert relative_error(out[b], want[b]) < tolerance, f"row {b} of context {case.context_lens[b]}"
    # float32 sums of products of half-precision numbers: eps * |logits| and the approximate exp2 and log2 (2**-22).
    np.testing.assert_allclose(lse[some], want_lse[some], rtol=1e-5, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("splits", CONFIGS)
@pytest.mark.parametrize(
    ("group", "kv_heads", "head_size", "block_size", "width", "options"),
    [
        (1, 3, 64, 8, 70, {}),
        (2, 2, 128, 16, 40, {"sliding_window": 100}),
        (3, 1, 64, 16, 40, {"soft_cap": 5.0}),
        (4, 8, 128, 32, 20, {"scale": 0.3}),
        (7, 1, 64, 64, 9, {"sliding_window": 1}),
        (8, 2, 256, 16, 8, {}),
        (8, 1, 64, 128, 5, {"sliding_window": 65, "soft_cap": 3.0}),
        (11, 1, 192, 256, 2, {}),
        (16, 1, 64, 8, 9, {}),
    ],
)
def test_equals_the_oracle_with_nan_in_every_unowned_cell(splits, group, kv_heads, head_size, block_size, width, options):
    contexts = edges(block_size, width)
    case = make_case(contexts, heads=group * kv_heads, kv_heads=kv_heads, head_size=head_size, block_size=block_size, width=width)
    config = dataclasses.replace(CONFIGS[splits], stages=2)
    check(case, run(case, config=config, **options), **options)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", BF16_TOLERANCE), ("float16", 1e-3)])
def test_default_settings(dtype, tolerance):
    for rows in (1, 3, 40):
        case = make_case([700 - 3 * b for b in range(rows)], heads=32, kv_heads=8, head_size=128, block_size=16)
        check(case, run(case, dtype), dtype, tolerance)


@pytest.mark.gpu
def test_unused_table_entries_may_name_poisoned_blocks():
    case = make_case([5, 200, 0, 97], heads=8, kv_heads=2, head_size=64, block_size=16, width=16)
    tables = np.array(case.block_tables)
    spare = len(case.k_pool) - 1  # no row owns it
    for b, context in enumerate(case.context_lens):
        tables[b, -(-context // 16) :] = spare
    case = dataclasses.replace(case, block_tables=tables)
    check(case, run(case))


@pytest.mark.gpu
def test_blocks_before_the_window_may_be_gone():
    case = make_case([300, 40], heads=4, kv_heads=1, head_size=64, block_size=16)
    want = case.oracle("bfloat16", sliding_window=50)
    for b, context in enumerate(case.context_lens):
        for position in range(max(0, context - 50)):
            case.v_pool[case.block_tables[b, position // 16], :, position % 16] = np.nan
            case.k_pool[case.block_tables[b, position // 16], :, position % 16] = np.nan
    out, _ = run(case, poison=False, sliding_window=50)
    assert relative_error(out, want[0]) < BF16_TOLERANCE


@pytest.mark.gpu
def test_logits_of_ten_thousand_stay_finite():
    case = make_case([500, 33], heads=8, kv_heads=2, head_size=64, block_size=16, q_scale=3000.0)
    assert np.abs(case.oracle("bfloat16")[1]).max() > 1e4
    out, _ = run(case)
    assert np.isfinite(out).all()
    assert relative_error(out, case.oracle("bfloat16")[0]) < BF16_TOLERANCE


@pytest.mark.gpu
def test_splits_and_stages_change_no_bit():
    case = make_case(edges(16, 100), heads=8, kv_heads=2, head_size=128, block_size=16, width=100)
    outs = [run(case, config=dataclasses.replace(c, stages=stages)) for c, stages in itertools.product(CONFIGS.values(), (2, 4))]
    for out, lse in outs[1:]:
        np.testing.assert_array_equal(out, outs[0][0])
        np.testing.assert_array_equal(lse, outs[0][1])


@pytest.mark.gpu
def test_a_row_does_not_depend_on_its_batch():
    contexts = [int(x) for x in np.random.default_rng(1).integers(0, 900, 64)]
    case = make_case(contexts, heads=32, kv_heads=8, head_size=64, block_size=16)
    whole, _ = run(case)
    for rows in (1, 2, 7):
        some, _ = run(case.rows(slice(0, rows)), poison=False)
        np.testing.assert_array_equal(some, whole[:rows])


@pytest.mark.gpu
def test_two_runs_are_bit_equal():
    case = make_case([1500, 3, 800], heads=32, kv_heads=8, head_size=128, block_size=16)
    np.testing.assert_array_equal(run(case)[0], run(case)[0])


@pytest.mark.gpu
def test_renaming_blocks_changes_no_bit():
    case = make_case([129, 40, 300], heads=8, kv_heads=2, head_size=64, block_size=16)
    order = np.random.default_rng(2).permutation(np.arange(1, len(case.k_pool)))
    new = np.concatenate([[0], order])  # block i moves to new[i]
    k_pool, v_pool = np.empty_like(case.k_pool), np.empty_like(case.v_pool)
    k_pool[new], v_pool[new] = case.k_pool, case.v_pool
    renamed = dataclasses.replace(case, k_pool=k_pool, v_pool=v_pool, block_tables=new[case.block_tables].astype(np.int32))
    np.testing.assert_array_equal(run(renamed)[0], run(case)[0])


@pytest.mark.gpu
def test_rows_may_share_blocks():
    case = make_case([100, 90], heads=8, kv_heads=2, head_size=64, block_size=16)
    tables = np.array(case.block_tables)
    tables[1, :6] = tables[0, :6]
    case = dataclasses.replace(case, block_tables=tables)
    check(case, run(case))


@pytest.mark.gpu
def test_a_pool_of_more_than_2_to_the_31_numbers():
    blocks, width = (1 << 32) // (8 * 16 * 64) + 2, 64
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (4, 32, 64), jnp.bfloat16)
    # The used blocks lie at the end of the pool: a 32-bit offset would wrap. The same call on those blocks alone must agree.
    tables = jnp.asarray(np.random.default_rng(0).permutation(np.arange(blocks - 256, blocks)).reshape(4, width), jnp.int32)
    used = [jax.random.normal(key, (256, 8, 16, 64), jnp.bfloat16) for key in keys[1:]]
    pools = [jnp.full((blocks, 8, 16, 64), jnp.nan, jnp.bfloat16).at[blocks - 256 :].set(x) for x in used]
    lens = jnp.asarray([1024, 1000, 17, 1], jnp.int32)
    out = paged_attention(q, *pools, tables, lens, implementation="mosaic_gpu")
    want = paged_attention(q, *used, tables - (blocks - 256), lens, implementation="mosaic_gpu")
    np.testing.assert_array_equal(np.asarray(out.astype(jnp.float32)), np.asarray(want.astype(jnp.float32)))
    assert np.isfinite(np.asarray(out.astype(jnp.float32))).all()
