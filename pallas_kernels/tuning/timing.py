"""Time kernels by the device's own clock: JAX's profiler records when each kernel starts and ends.

Many cells are measured in one profiler session, with a marker kernel between them. Gaps between kernels do not count, the
launch cost within a kernel does. Without a GPU the host's clock stands in, and the result says so.
"""

import concurrent.futures
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.profiler import ProfileData, ProfileOptions

_MARKER = "pallas_kernels_marker"
_COMPILERS = 12  # threads that compile at a time
Event = tuple[float, float, str]  # start and duration in microseconds, name


@dataclass(frozen=True)
class Timing:
    """Times of the repeated calls of one cell, in microseconds."""

    calls_us: tuple[float, ...]  # the sum over a call's kernels
    clock: str  # "device" or "host"
    kernels: tuple[str, ...] = ()  # names of one call's kernels
    spans_us: tuple[float, ...] = ()  # from the start of a call's first kernel to the end of its last

    @property
    def us(self) -> float:
        """The median."""
        return statistics.median(self.calls_us)

    @property
    def span_us(self) -> float:
        """The median of the spans; the host's clock knows no other time than a span."""
        return statistics.median(self.spans_us or self.calls_us)


def measure(cells: Sequence[Callable[[int], object]], calls: Sequence[int]) -> list[Timing]:
    """Time every cell: ``cells[j](i)`` enqueues call ``i`` of ``calls[j]`` and returns its output arrays.

    Call the jitted function with other pools or tables for each ``i``, so that the L2 does not hold the data.
    """
    with concurrent.futures.ThreadPoolExecutor(_COMPILERS) as threads:  # the first call compiles
        list(threads.map(lambda cell: jax.block_until_ready(cell(0)), cells))
    if jax.default_backend() != "gpu":
        return [_on_host(cell, count) for cell, count in zip(cells, calls, strict=True)]
    mark = _marker()
    jax.block_until_ready(mark())
    options = ProfileOptions()
    options.host_tracer_level = 0
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            for cell, count in zip(cells, calls, strict=True):
                for i in range(count):
                    result = cell(i)
                jax.block_until_ready(result)
                jax.block_until_ready(mark())
        events = device_events(Path(folder))
    groups: list[list[Event]] = [[]]
    for event in events:
        if _MARKER in event[2]:
            groups.append([])
        else:
            groups[-1].append(event)
    sizes = [len(group) for group in groups]
    if len(groups) != len(cells) + 1 or any(not size or size % count for size, count in zip(sizes, calls, strict=False)):
        raise RuntimeError(f"the profile does not split into {len(cells)} cells of {list(calls)} calls: it has {sizes} kernels")
    return [_per_call(group, count) for group, count in zip(groups[:-1], calls, strict=True)]


def _per_call(events: list[Event], calls: int) -> Timing:
    size = len(events) // calls
    groups = [events[i * size : (i + 1) * size] for i in range(calls)]
    times = tuple(sum(duration for _, duration, _ in group) for group in groups)
    spans = tuple(max(start + duration for start, duration, _ in group) - group[0][0] for group in groups)
    return Timing(times, "device", tuple(name for _, _, name in events[:size]), spans)


def device_events(folder: Path) -> list[Event]:
    """Everything that ran on the GPU's streams while a profile was written to `folder`, in order."""
    events = []
    for file in folder.rglob("*.xplane.pb"):
        for plane in ProfileData.from_file(str(file)).planes:
            if not plane.name.startswith("/device:GPU"):
                continue
            for line in plane.lines:
                if line.name.startswith("Stream"):
                    events += [(e.start_ns / 1e3, e.duration_ns / 1e3, e.name) for e in line.events]
    return sorted(events)


def _on_host(cell: Callable[[int], object], calls: int) -> Timing:
    times = []
    for i in range(calls):
        start = time.perf_counter()
        jax.block_until_ready(cell(i))
        times.append((time.perf_counter() - start) * 1e6)
    return Timing(tuple(times), "host")


def _marker() -> Callable[[], jax.Array]:
    def kernel(out_ref: Any) -> None:
        plt.store(out_ref.at[jnp.arange(16, dtype=jnp.int32)], jnp.zeros((16,), jnp.float32))

    call = pl.pallas_call(
        kernel,
        name=_MARKER,
        out_shape=jax.ShapeDtypeStruct((16,), jnp.float32),
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        compiler_params=plt.CompilerParams(num_warps=1, num_stages=1),
    )
    return jax.jit(call)


def bandwidths(num_bytes: int, calls: int = 10) -> dict[str, float]:
    """Measured TB/s of a pass that only reads ``num_bytes`` and of a copy (bytes read plus bytes written)."""
    x = jax.random.bits(jax.random.key(0), (num_bytes // 4,), jnp.uint32)
    read = jax.jit(lambda x: x.reshape(-1, 4096).max(axis=1))
    copy = jax.jit(lambda x: x ^ jnp.uint32(1))
    reading, copying = measure([lambda i: read(x), lambda i: copy(x)], [calls, calls])
    return {"read": num_bytes / reading.us / 1e6, "copy": 2 * num_bytes / copying.us / 1e6}
