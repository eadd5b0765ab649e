"""Find the fastest settings of the Triton decode kernels on this device and write them as its table (``h200.json``)."""

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from pallas_kernels import tuning
from pallas_kernels.paged_attention import OP, describe
from pallas_kernels.paged_attention.split import TileConfig, next_power_of_two
from pallas_kernels.tuning.cases import Pools, decode_case
from pallas_kernels.tuning.shapes import DecodeShape
from pallas_kernels.tuning.timing import measure

# One setting serves every batch and context of a head size, so that a row's bits do not depend on the batch: each shape has a
# say, whatever its time.
SHAPES = ((1, 8192), (8, 512), (8, 2048), (32, 2048), (128, 2048))
_SHARED_MEMORY = 220 << 10


def candidates(head_size: int, itemsize: int) -> Iterator[TileConfig]:
    """Settings worth trying for one head size: those whose loads in flight fit into shared memory."""
    tiles = ((32, 4), (64, 2), (64, 3), (64, 4), (128, 2), (128, 3))
    for (tile, stages), (direct, chunk) in itertools.product(tiles, ((512, 256), (512, 512), (1024, 512), (1024, 1024))):
        if 2 * stages * tile * head_size * itemsize <= _SHARED_MEMORY:
            yield TileConfig(tile=tile, num_stages=stages, direct=direct, chunk=chunk)


def with_settings(implementation: str, config: TileConfig) -> Callable[..., jax.Array]:
    """``paged_attention`` by one implementation with these settings."""

    def attend(*arrays: jax.Array) -> jax.Array:
        module: Any = OP.load(implementation)
        out, _ = module.run(describe(*arrays), *arrays, interpret=False, config=config)
        return out

    return attend


def best_settings(head_size: int, implementation: str, pools: Pools, log: Callable[[str], None]) -> tuple[TileConfig, float]:
    """The settings with the least geometric mean of times over ``SHAPES``, and that mean in microseconds.

    Tiles and stages are chosen first with the default split rule, then the rule for them: the two hardly interact.
    """
    itemsize = 2
    options = list(candidates(next_power_of_two(head_size), itemsize))
    default = TileConfig()
    first = [c for c in options if (c.direct, c.chunk) == (default.direct, default.chunk)]
    winner, _ = _race(first, head_size, implementation, pools, log)
    return _race([c for c in options if (c.tile, c.num_stages) == (winner.tile, winner.num_stages)], head_size, implementation, pools, log)


def _race(
    configs: list[TileConfig], head_size: int, implementation: str, pools: Pools, log: Callable[[str], None]
) -> tuple[TileConfig, float]:
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


def _brief(config: TileConfig) -> str:
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


def write_table(path: Path, header: dict[str, Any], settings: dict[str, Any]) -> None:
    """Write a device's table, keeping what an older one at ``path`` says about other ops and implementations."""
    old = json.loads(path.read_text()) if path.is_file() else {}
    merged = old.get("settings", {})
    for op, by_implementation in settings.items():
        merged[op] = {**merged.get(op, {}), **by_implementation}
    path.write_text(json.dumps({**header, "settings": merged}, indent=1) + "\n")
    tuning.load.cache_clear()
