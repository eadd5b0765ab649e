"""Measured runs of an engine: whole answers by the host's clock, prefill, scheduling and sampling included."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pagedjax.bench.roofline import Limits, decode_step_s, prefill_s, workload_s
from pagedjax.bench.workload import Workload, uniform
from pagedjax.engine import Engine
from pagedjax.errors import ConfigError

Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Host:
    """The host's share of a run, between two looks at `Engine.stats`.

    Attributes:
      host_us_per_dispatch: host microseconds a dispatch, the wait for the device left out.
      host_us_per_token: the same a new token.
      padding: share of the prefill tokens that were computed for nothing, because a step has one of few sizes.
    """

    host_us_per_dispatch: float
    host_us_per_token: float
    padding: float


def throughput(
    engine: Engine,
    make: Callable[[int], Workload],
    limits: Limits | None,
    *,
    repeats: int = 3,
    settings: dict[str, Any] | None = None,
    progress: Callable[[], None] = lambda: None,
) -> Record:
    """New tokens a second of whole `Engine.generate` calls, one after the other, after one that does not count and may compile.

    Args:
      engine: with its steps compiled, or the first calls pay for that.
      make: a workload for each seed, all of the same shape.
      limits: of the device, for the fraction of the roofline.
      repeats: calls that count.
      settings: sampling parameters; greedy by default.
      progress: called after each call.

    Raises:
      ConfigError: an answer came out shorter than asked for, or a prefix was found: that would not measure what it says.
    """
    seconds, hosts, firsts = [], [], []
    first_run_s = 0.0
    workload = make(0)
    for index in range(repeats + 1):
        workload = make(index)
        params = workload.sampling_params(**(settings or {}))
        before = engine.stats()
        started = time.perf_counter()
        results = engine.generate(workload.prompts, params, use_tqdm=False)
        took = time.perf_counter() - started
        short = [r for r, n in zip(results, workload.output_lens, strict=True) if len(r.token_ids) != n]
        if short:
            one = short[0]
            raise ConfigError(
                f"{workload.name}: an answer ended with {one.finish_reason} after {len(one.token_ids)} tokens"
                + (f": {one.error}" if one.error else "")
            )
        if any(r.num_cached_tokens for r in results) and not any(r.num_preemptions for r in results):
            raise ConfigError(f"{workload.name}: a prompt was found in the prefix cache, so this is not what it costs")
        if index == 0:
            first_run_s = took
        else:
            seconds.append(took)
            firsts += [r.prefill_s * 1e3 for r in results if r.prefill_s is not None]
            hosts.append(_host(before, engine.stats()))
        progress()
    rates = sorted(workload.num_output_tokens / s for s in seconds)
    record: Record = {
        "workload": workload.name,
        "prompt_tokens": workload.num_prompt_tokens,
        "output_tokens": workload.num_output_tokens,
        "tokens_per_s": statistics.median(rates),
        "tokens_per_s_all": [workload.num_output_tokens / s for s in seconds],
        "spread": (rates[-1] - rates[0]) / statistics.median(rates),
        "first_token_ms": statistics.median(firsts),
        **{name: statistics.median(values) for name, values in _columns_of(hosts).items()},
        "first_run_s": first_run_s,
    }
    if limits is not None:
        floor = workload_s(engine.config, limits, workload, engine.engine_config.max_num_seqs)
        rate = workload.num_output_tokens / floor
        record |= {"floor_s": floor, "limit": rate, "fraction_of_roofline": record["tokens_per_s"] / rate}
    return record


def latency(
    engine: Engine, prompt_len: int, output_len: int, limits: Limits | None, *, repeats: int, progress: Callable[[], None] = lambda: None
) -> Record:
    """One request at a time: milliseconds to its first token and between tokens, on the host that asked for it.

    A window brings its tokens together; the time between two tokens is that between the first and the last over their number.
    """
    first, each = [], []
    for index in range(repeats + 1):
        workload = uniform(1, prompt_len, output_len, engine.config.vocab_size, 1000 + index)
        started = time.perf_counter()
        engine.add_request(workload.prompts[0], workload.sampling_params()[0])
        came: list[float] = []
        while engine.has_unfinished_requests:
            for delta in engine.step():
                came += [time.perf_counter()] * len(delta.token_ids)
        if len(came) != output_len:
            raise ConfigError(f"an answer has {len(came)} tokens; {output_len} were asked for")
        if index:
            first.append((came[0] - started) * 1e3)
            each.append((came[-1] - came[0]) * 1e3 / max(1, output_len - 1))
        progress()
    record: Record = {
        "workload": f"1 x {prompt_len} + {output_len}",
        **_percentiles("first_token_ms", first),
        **_percentiles("per_token_ms", each),
    }
    if limits is not None:
        floor = prefill_s(engine.config, limits, [prompt_len]) * 1e3
        middle = prompt_len + output_len // 2
        record |= {"first_token_floor_ms": floor, "per_token_floor_ms": decode_step_s(engine.config, limits, [middle]) * 1e3}
    return record


def _host(before: Any, after: Any) -> Host:
    spent = (after.step_s - before.step_s) - (after.wait_s - before.wait_s)
    tokens = after.num_generated_tokens - before.num_generated_tokens
    padded = after.num_padded_prefill_tokens - before.num_padded_prefill_tokens
    real = after.num_prefill_tokens - before.num_prefill_tokens
    return Host(
        host_us_per_dispatch=spent * 1e6 / max(1, after.num_dispatches - before.num_dispatches),
        host_us_per_token=spent * 1e6 / max(1, tokens),
        padding=1 - real / padded if padded else 0.0,
    )


def _columns_of(hosts: Sequence[Host]) -> dict[str, list[float]]:
    return {field.name: [getattr(host, field.name) for host in hosts] for field in dataclasses.fields(Host)}


def _percentiles(name: str, values: Sequence[float]) -> dict[str, float]:
    """The median under `name`, others under ``name_p95`` and ``name_p99``."""
    return {name: float(np.median(values)), **{f"{name}_p{p}": float(np.percentile(values, p)) for p in (95, 99)}}
