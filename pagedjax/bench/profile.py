"""What a GPU does during decode steps and prefill steps of an engine, kernel by kernel, on the device's own clock."""

from __future__ import annotations

import dataclasses
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from pagedjax.bench.workload import uniform
from pagedjax.engine import Engine
from pagedjax.errors import ConfigError
from pallas_kernels.tuning.timing import Event, device_events

# Runs once a decode step, and once a prefill step too: by it steps are counted.
_ONCE_A_STEP = "sample_tokens"
_PAUSE_US = 5.0  # kernels of one graph follow each other faster than this


@dataclasses.dataclass(frozen=True)
class KernelTime:
    """One kind of kernel.

    Attributes:
      name: as the profiler gives it, without XLA's running numbers.
      calls_per_step: how often it runs in a step, copies between host and device counted likewise.
      us_per_step: microseconds a step.
      share: of the time in which anything ran.
    """

    name: str
    calls_per_step: float
    us_per_step: float
    share: float


@dataclasses.dataclass(frozen=True)
class Profile:
    """Some steps on the device's timeline.

    Attributes:
      num_steps: how many.
      us_per_step: from the start of the first kernel to the end of the last, over the steps.
      idle_share: share of that in which nothing ran.
      pause_share: share in gaps longer than 5 us: those in which the device waited for the host, not for the next kernel of a graph.
      kernels: the longest first.
    """

    num_steps: int
    us_per_step: float
    idle_share: float
    pause_share: float
    kernels: tuple[KernelTime, ...]


def profile_decode(engine: Engine, batch: int, prompt_len: int, num_windows: int = 8) -> Profile:
    """Windows of decode steps with `batch` running rows, greedy.

    Raises:
      ConfigError: nothing to count steps by, as without a GPU.
    """
    window = engine.engine_config.window
    # Two windows are under way when the trace begins and two when it ends.
    workload = uniform(batch, prompt_len, (num_windows + 6) * window, engine.config.vocab_size, 7)
    prefilling = {engine.add_request(prompt, params) for prompt, params in zip(workload.prompts, workload.sampling_params(), strict=True)}
    while prefilling:
        prefilling -= {delta.request_id for delta in engine.step() if delta.token_ids}

    def steps() -> None:
        for _ in range(num_windows):
            engine.step()

    try:
        return summarize(_trace(steps))
    finally:
        while engine.has_unfinished_requests:
            engine.step()


def profile_prefill(engine: Engine, batch: int, prompt_len: int) -> Profile:
    """Steps that compute `batch` prompts, each answered by one token.

    Raises:
      ConfigError: nothing to count steps by, as without a GPU.
    """
    workload = uniform(batch, prompt_len, 1, engine.config.vocab_size, 11)
    return summarize(_trace(lambda: engine.generate(workload.prompts, workload.sampling_params(), use_tqdm=False)))


def _trace(work: Callable[[], object]) -> list[Event]:
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = 0
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            work()
        return device_events(Path(folder))


def summarize(events: Sequence[Event]) -> Profile:
    """A profile of whole steps: events before the first step's end and after the last one's are left out.

    Args:
      events: start and duration in microseconds and name, in order of their start.

    Raises:
      ConfigError: fewer than two steps were seen.
    """
    ends = [i for i, (_, _, name) in enumerate(events) if _ONCE_A_STEP in name]
    if len(ends) < 2:
        raise ConfigError(f"the profile has {len(ends)} kernels named {_ONCE_A_STEP}, one a step; it takes at least 2 to measure between")
    first, last = ends[0], ends[-1]
    origin = events[first][0] + events[first][1]
    num_steps = len(ends) - 1
    counts: dict[str, int] = defaultdict(int)
    times: dict[str, float] = defaultdict(float)
    busy = pauses = 0.0
    reached = origin
    for start, duration, name in events[first + 1 : last + 1]:
        end = start + duration
        if start - reached > _PAUSE_US:
            pauses += start - reached
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
        kind = kernel_kind(name)
        counts[kind] += 1
        times[kind] += duration
    span, total = reached - origin, sum(times.values())
    kernels = [KernelTime(k, counts[k] / num_steps, us / num_steps, us / total) for k, us in times.items()]
    return Profile(
        num_steps, span / num_steps, 1 - busy / span, pauses / span, tuple(sorted(kernels, key=lambda k: (-k.us_per_step, k.name)))
    )


def kernel_kind(name: str) -> str:
    """A kernel's name without the numbers that XLA appends: ``loop_add_fusion_12_0`` and ``loop_add_fusion_7`` are one kind."""
    return re.sub(r"([._]\d+)+$", "", name)
