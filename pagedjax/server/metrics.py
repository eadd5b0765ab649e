"""What Prometheus reads: the engine's figures at the moment, and times as clients see them."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Iterator

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pagedjax.stats import EngineStats

_FIRST_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_EACH_S = (0.0005, 0.001, 0.002, 0.004, 0.006, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
_LAG_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
_LOOK_S = 0.05  # how often the event loop's lag is looked at
_RECENT = 12_000  # looks that `lag_s` speaks of: ten minutes

_GAUGES = {
    "requests_running": ("num_running", "Requests that hold KV blocks."),
    "requests_waiting": ("num_waiting", "Requests that do not, the preempted ones among them."),
    "requests_preempted": ("num_preempted", "Those of the waiting that lost their blocks."),
    "kv_blocks_used": ("num_used_blocks", "Blocks that requests hold."),
    "kv_blocks_cached": ("num_cached_blocks", "Blocks that nobody holds and that a prefix may find."),
    "kv_blocks_free": ("num_free_blocks", "Blocks of which nobody knows anything."),
    "prefix_cache_hit_ratio": ("prefix_hit_rate", "Share of the admitted tokens that were found in the cache, since the start."),
    "tokens_per_second": ("tokens_per_s", "New tokens a second over the last 10 seconds."),
}
_COUNTERS = {
    "preemptions": ("num_preemptions", "How often a request lost its blocks."),
    "prompt_tokens": ("num_prompt_tokens", "Tokens of admitted requests; again after a preemption."),
    "prefix_cached_tokens": ("num_cached_tokens", "Those of them that were found in the prefix cache."),
    "generated_tokens": ("num_generated_tokens", "New tokens."),
    "dispatches": ("num_dispatches", "Steps and windows that the device was given."),
    "compilations": ("num_compilations", "Steps that were traced to be compiled."),
}


class _EngineFigures(Collector):
    """The last `EngineStats` that was seen."""

    def __init__(self) -> None:
        self.stats: EngineStats | None = None

    def collect(self) -> Iterator[Metric]:
        """Nothing before the first look."""
        if self.stats is None:
            return
        for name, (field, text) in _GAUGES.items():
            yield GaugeMetricFamily(f"pagedjax_{name}", text, getattr(self.stats, field))
        for name, (field, text) in _COUNTERS.items():
            yield CounterMetricFamily(f"pagedjax_{name}", text, getattr(self.stats, field))
        blocks = self.stats.num_used_blocks + self.stats.num_cached_blocks + self.stats.num_free_blocks
        yield GaugeMetricFamily(
            "pagedjax_kv_cache_usage_ratio", "Share of the blocks that requests hold.", self.stats.num_used_blocks / blocks
        )


class Metrics:
    """Counts and times of one server, in a registry of its own. Belongs to the event loop."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._figures = _EngineFigures()
        self.registry.register(self._figures)
        self._answers = Counter(
            "pagedjax_answers", "Answers that ended, by reason; abort: the client left.", ["finish_reason"], registry=self.registry
        )
        self._first = Histogram(
            "pagedjax_time_to_first_token_seconds", "From the checked request to its first token.", buckets=_FIRST_S, registry=self.registry
        )
        self._each = Histogram(
            "pagedjax_time_per_output_token_seconds",
            "Mean time between two tokens of an answer, an observation an answer.",
            buckets=_EACH_S,
            registry=self.registry,
        )
        self._whole = Histogram(
            "pagedjax_answer_seconds", "From the checked request to the answer's end.", buckets=_FIRST_S, registry=self.registry
        )
        self._lag = Histogram(
            "pagedjax_event_loop_lag_seconds",
            "How late the event loop wakes, looked at 20 times a second.",
            buckets=_LAG_S,
            registry=self.registry,
        )
        self._healthy = Gauge("pagedjax_healthy", "1 while the engine works, 0 while it is stuck or has stopped.", registry=self.registry)
        self._recent_lags: collections.deque[float] = collections.deque(maxlen=_RECENT)

    def answered(self, reason: str, started_s: float, first_s: float | None, ended_s: float, num_tokens: int) -> None:
        """An answer ended; times of one clock, `first_s` ``None`` where no token came."""
        self._answers.labels(reason).inc()
        self._whole.observe(ended_s - started_s)
        if first_s is not None:
            self._first.observe(first_s - started_s)
            if num_tokens > 1:
                self._each.observe((ended_s - first_s) / (num_tokens - 1))

    def render(self, stats: EngineStats | None, healthy: bool) -> bytes:
        """In Prometheus' text format. Without new `stats` those before are shown again."""
        self._figures.stats = stats or self._figures.stats
        self._healthy.set(healthy)
        return generate_latest(self.registry)

    async def watch_loop(self) -> None:
        """Measure the event loop's lag until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            before = loop.time()
            await asyncio.sleep(_LOOK_S)
            lag = max(0.0, loop.time() - before - _LOOK_S)
            self._lag.observe(lag)
            self._recent_lags.append(lag)

    def lag_s(self, percentile: float) -> float:
        """Of the event loop's lag over the last ten minutes; 0 before the first look."""
        return float(np.percentile(self._recent_lags, percentile)) if self._recent_lags else 0.0
