"""Find the fastest settings of the decode kernels on this device and write them as its table (``h200.json``)."""

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from pallas_kernels import MatmulOutput, tuning
from pallas_kernels.paged_attention import OP, describe
from pallas_kernels.paged_attention.mosaic_gpu import Tiling
from pallas_kernels.paged_attention.split import TileConfig, next_power_of_two
from pallas_kernels.skinny_matmul import MatmulProblem
from pallas_kernels.skinny_matmul import describe as describe_matmul
from pallas_kernels.skinny_matmul import pallas_triton as matmul
from pallas_kernels.tuning.cases import Pools, decode_case, matmul_case, matmul_data
from pallas_kernels.tuning.shapes import MATMUL, DecodeShape, MatmulShape
from pallas_kernels.tuning.timing import measure

# One setting serves every batch and context of a head size, so that a row's bits do not depend on the batch: each shape has a
# say, whatever its time (context 0: 64 ragged rows).
SHAPES = ((1, 8192), (2, 2048), (8, 2048), (24, 2048), (32, 2048), (64, 0), (128, 512), (128, 2048))
_SHARED_MEMORY = 220 << 10
Settings = TileConfig | Tiling | matmul.MatmulConfig


def candidates(implementation: str, head_size: int, itemsize: int) -> tuple[list[Settings], Callable[[Settings], list[Settings]]]:
    """Settings worth a first race, and those to race again around the winner: two choices that hardly interact."""
    if implementation == "mosaic_gpu":  # what a single CTA can hold: two stages and all partial results
        tilings = [Tiling(tile, chains) for tile in (64, 128, 256) for chains in (4, 8) if tile * head_size <= 128 * 128]
        return list(tilings), lambda winner: []
    default = TileConfig()
    tiles = [
        TileConfig(tile=tile, num_stages=stages)
        for tile, stages in ((32, 4), (64, 2), (64, 3), (64, 4), (128, 2), (128, 3))
        if 2 * stages * tile * head_size * itemsize <= _SHARED_MEMORY
    ]
    rules = ((512, 256), (1024, 512), (1024, 1024), (2048, 2048))

    def around(winner: Settings) -> list[Settings]:
        assert isinstance(winner, TileConfig)
        return [dataclasses.replace(winner, direct=direct, chunk=chunk) for direct, chunk in ((default.direct, default.chunk), *rules)]

    return list(tiles), around


def with_settings(implementation: str, config: Settings) -> Callable[..., jax.Array]:
    """``paged_attention`` by one implementation with these settings."""

    def attend(*arrays: jax.Array) -> jax.Array:
        module: Any = OP.load(implementation)
        out, _ = module.run(describe(*arrays), *arrays, interpret=False, config=config)
        return out

    return attend


def best_settings(head_size: int, implementation: str, pools: Pools, log: Callable[[str], None]) -> tuple[Settings, float]:
    """The settings with the least geometric mean of times over ``SHAPES``, and that mean in microseconds."""
    first, around = candidates(implementation, next_power_of_two(head_size), itemsize=2)
    best = _race(first, head_size, implementation, pools, log)
    second = around(best[0])
    return _race(second, head_size, implementation, pools, log) if second else best


def _race(configs: list[Settings], head_size: int, implementation: str, pools: Pools, log: Callable[[str], None]) -> tuple[Settings, float]:
    shapes = [DecodeShape(batch, context, head_size) for batch, context in SHAPES]
    cases = [decode_case(shape, implementation, pools, with_settings(implementation, config)) for shape in shapes for config in configs]
    timings = measure([case.call for case in cases], [min(24, case.calls) for case in cases])
    logs = [0.0] * len(configs)
    for j, (case, timing) in enumerate(zip(cases, timings, strict=True)):
        config = configs[j % len(configs)]
        logs[j % len(configs)] += math.log(timing.us) / len(shapes)
        log(f"{case.name} {implementation} {_brief(config)}: {timing.us:.2f} us")
    best = min(range(len(configs)), key=logs.__getitem__)
    return configs[best], math.exp(logs[best])


def _brief(config: Settings) -> str:
    return " ".join(f"{name}={value}" for name, value in dataclasses.asdict(config).items())


def tune(head_sizes: tuple[int, ...], implementations: tuple[str, ...], pools: Pools, log: Callable[[str], None]) -> dict[str, Any]:
    """The ``settings`` of a device's table for 16-bit pools."""
    found: dict[str, Any] = {"paged_attention": {name: [] for name in implementations}}
    for head_size, name in itertools.product(head_sizes, implementations):
        config, mean = best_settings(head_size, name, pools, log)
        log(f"best for {name}, head size {head_size}: {config}, geometric mean {mean:.2f} us")
        entry = {
            "match": {"head_size": head_size, "itemsize": 2},
            "config": dataclasses.asdict(config),
            "geometric_mean_us": round(mean, 2),
        }
        found["paged_attention"][name].append(entry)
    return found


def matmul_candidates(problem: MatmulProblem) -> list[matmul.MatmulConfig]:
    """Settings of ``skinny_matmul`` that divide a problem and fit in shared memory, the heuristic's first."""
    if problem.num_rows == 1:
        sizes = itertools.product((4, 8, 16), (128, 256, 512), (2, 4, 8))
        found = [matmul.MatmulConfig(rows, tile_k, by_number=True, num_warps=warps) for rows, tile_k, warps in sizes]
    else:
        found = []
    products = itertools.product((32, 64, 128), (64, 128), (1, 2, 4), (4, 8), (3, 4, 6))
    weights = 2 if problem.gate_up else 1
    found += [
        matmul.MatmulConfig(rows, tile_k, fold, num_warps=warps, num_stages=stages)
        for rows, tile_k, fold, warps, stages in products
        if fold < rows and stages * tile_k * 2 * (weights * rows + max(16, next_power_of_two(problem.num_rows) * fold)) <= _SHARED_MEMORY
    ]
    first = matmul.heuristic(problem)
    return [first, *(config for config in found if config != first and config.why_not(problem) is None)]


def tune_matmul(log: Callable[[str], None], shapes: Sequence[MatmulShape] = MATMUL) -> dict[str, Any]:
    """The ``settings`` of ``skinny_matmul`` for these products and numbers of rows, 16-bit weights."""
    entries = []
    for shape in shapes:
        data = matmul_data(shape)
        problem = describe_matmul(data.given["x"], data.weights[0], **_without_x(data.given), **data.options)
        configs = matmul_candidates(problem)
        cases = [matmul_case(shape, "pallas_triton", data, functools.partial(_multiply, config)) for config in configs]
        timings = measure([case.call for case in cases], [case.calls for case in cases])
        best = min(range(len(configs)), key=lambda i: timings[i].us)
        log(f"{shape.name}: {_brief(configs[best])}: {timings[best].us:.2f} us; by the heuristic {timings[0].us:.2f} us")
        config = dataclasses.asdict(configs[best])
        entries.append({"match": matmul.properties(problem), "config": config, "us": round(timings[best].us, 2)})
    return {"skinny_matmul": {"pallas_triton": entries}}


def _without_x(given: dict[str, jax.Array]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name != "x"}


def _multiply(config: matmul.MatmulConfig, *, x: jax.Array, weight: jax.Array, **given: Any) -> MatmulOutput:
    problem = describe_matmul(x, weight, **given)
    fused = (given.get(name) for name in ("sum_squares", "residual", "next_norm"))
    return matmul.run(problem, x, weight, *fused, interpret=jax.default_backend() != "gpu", config=config)


def write_table(path: Path, header: dict[str, Any], settings: dict[str, Any]) -> None:
    """Write a device's table, keeping what an older one at ``path`` says about other ops and implementations."""
    old = json.loads(path.read_text()) if path.is_file() else {}
    merged = old.get("settings", {})
    for op, by_implementation in settings.items():
        merged[op] = {**merged.get(op, {}), **by_implementation}
    path.write_text(json.dumps({**header, "settings": merged}, indent=1) + "\n")
    tuning.load.cache_clear()
