"""What an engine has done so far, as numbers. No clock of its own: the engine passes the time in."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable

_RECENT_REQUESTS = 1000
_RECENT_S = 10.0


@dataclasses.dataclass(frozen=True)
class EngineStats:
    """A moment's view of an engine.

    Attributes:
      num_running: requests that hold blocks.
      num_waiting: requests that do not, the preempted ones among them.
      num_preempted: those of the waiting that lost their blocks.
      num_preemptions: how often a request lost its blocks, since the start.
      num_finished: requests that ended, whatever the reason, since the start.
      num_free_blocks: blocks of which nobody knows anything.
      num_used_blocks: blocks that requests hold.
      num_cached_blocks: blocks that nobody holds and that a prefix may find.
      prefix_hit_rate: share of the admitted tokens that were found in the cache, since the start; 0 before the first.
      num_prompt_tokens: tokens of admitted requests, those found included and those computed again after a preemption too.
      num_cached_tokens: those of them that were found.
      num_generated_tokens: new tokens since the start.
      tokens_per_s: new tokens a second over the last 10 seconds.
      time_to_first_token_s: mean over the last 1000 finished requests; ``None`` before the first.
      time_per_token_s: mean time between two tokens of a request, over the same.
      num_dispatches: steps and windows that the device was given.
      num_mixed_steps: steps with decode rows and prefill chunks side by side.
      num_windows: dispatches of more than one decode step.
      num_compilations: steps that were traced to be compiled.
      table_bytes: block tables and row numbers sent to the device, in all.
      step_s: seconds spent in `Engine.step`.
      wait_s: those of them in which the host waited for the device; the rest is the host's own work.
      num_prefill_tokens: prompt tokens that steps computed.
      num_padded_prefill_tokens: the same with those that were added to fill a step of one of the compiled sizes.
    """

    num_running: int
    num_waiting: int
    num_preempted: int
    num_preemptions: int
    num_finished: int
    num_free_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    prefix_hit_rate: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    tokens_per_s: float
    time_to_first_token_s: float | None
    time_per_token_s: float | None
    num_dispatches: int
    num_mixed_steps: int
    num_windows: int
    num_compilations: int
    table_bytes: int
    step_s: float
    wait_s: float
    num_prefill_tokens: int
    num_padded_prefill_tokens: int


@dataclasses.dataclass
class RequestTimes:
    """When things happened to a request, on the engine's clock; ``None`` for what has not."""

    arrived_s: float
    first_token_s: float | None = None
    finished_s: float | None = None

    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first new token on the host."""
        return None if self.first_token_s is None else self.first_token_s - self.arrived_s

    def time_per_token(self, num_new_tokens: int) -> float | None:
        """Mean seconds between two new tokens; ``None`` for fewer than two."""
        if self.first_token_s is None or self.finished_s is None or num_new_tokens < 2:
            return None
        return (self.finished_s - self.first_token_s) / (num_new_tokens - 1)


class Meter:
    """Rates and times over the recent past; what it holds does not grow with the number of requests."""

    def __init__(self) -> None:
        self.num_generated_tokens = 0
        self._recent: deque[tuple[float, int]] = deque()
        self._first: deque[float] = deque(maxlen=_RECENT_REQUESTS)
        self._each: deque[float] = deque(maxlen=_RECENT_REQUESTS)

    def tokens(self, now_s: float, count: int) -> None:
        """`count` new tokens came."""
        self.num_generated_tokens += count
        if count:
            self._recent.append((now_s, count))
            self._forget(now_s)

    def finished(self, times: RequestTimes, num_new_tokens: int) -> None:
        """A request ended."""
        for kept, value in ((self._first, times.time_to_first_token()), (self._each, times.time_per_token(num_new_tokens))):
            if value is not None:
                kept.append(value)

    def tokens_per_s(self, now_s: float) -> float:
        """Over the last 10 seconds, or since the first token where that is less; 0 before the second ones."""
        self._forget(now_s)
        if len(self._recent) < 2:
            return 0.0
        # The interval begins with the oldest entry, so its tokens came before.
        begin, before = self._recent[0]
        return (sum(count for _, count in self._recent) - before) / max(now_s - begin, 1e-3)

    def time_to_first_token_s(self) -> float | None:
        """Mean of the recent requests."""
        return _mean(self._first)

    def time_per_token_s(self) -> float | None:
        """Mean of the recent requests."""
        return _mean(self._each)

    def _forget(self, now_s: float) -> None:
        while self._recent and self._recent[0][0] < now_s - _RECENT_S:
            self._recent.popleft()


def _mean(values: Iterable[float]) -> float | None:
    several = list(values)
    return sum(several) / len(several) if several else None
