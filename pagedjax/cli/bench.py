"""``pagedjax bench``: how fast is an engine here, and how far from what the device could do?"""

from __future__ import annotations

import dataclasses
import importlib.util
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pagedjax.cli.interrupts import leaving_on_interrupt
from pagedjax.cli.loading import progress_bars, resolve_model, working
from pagedjax.config import DTYPES
from pagedjax.errors import ConfigError

if TYPE_CHECKING:
    from pagedjax.bench.profile import Profile
    from pagedjax.bench.roofline import Limits
    from pagedjax.engine import Engine

Command = TypeVar("Command", bound=Callable[..., Any])
Record = dict[str, Any]


def _numbers(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    """Positive integers with commas between them."""
    try:
        numbers = tuple(int(part) for part in value.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise click.BadParameter(f"{value!r} is not one or more positive integers, such as 1,8,64")
    return numbers


def _count(*names: str, default: int | None, help: str) -> Callable[[Command], Command]:
    return click.option(*names, type=click.IntRange(min=1), default=default, show_default=default is not None, metavar="N", help=help)


_ENGINE = (
    click.option("-m", "--model", metavar="MODEL", help="A Hugging Face folder, a GGUF file or a hub id. [default: the demo model]"),
    click.option("--shape", metavar="NAME", help="Random weights of a known shape in the place of a model, such as llama-3.2-1b."),
    click.option(
        "--dtype", type=click.Choice(["auto", *DTYPES]), default="auto", show_default=True, help="Of weights, activations and KV cache."
    ),
    _count("--max-model-len", default=None, help="The most tokens of prompt and answer. [default: the model's, at most 8192]"),
    _count("--max-num-seqs", default=256, help="Rows of the largest batch."),
    _count("--token-budget", default=2048, help="The most prompt tokens in a step."),
    _count("--window", default=8, help="Decode steps in one dispatch."),
    click.option("--gpu-memory-utilization", type=float, default=0.9, show_default=True, help="Share of the device's memory to use."),
    click.option("--kv-blocks", type=click.IntRange(min=1), metavar="N", help="Blocks of 16 tokens in the cache. [default: what fits]"),
    click.option(
        "--fused-decode-rows",
        type=click.IntRange(min=0),
        metavar="N",
        help="Windows of up to so many rows run steps of few large kernels. [default: where that was measured to be faster]",
    ),
    click.option(
        "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write JSON lines: a header, then a line each."
    ),
    click.option("--plot", "plot_file", type=click.Path(dir_okay=False, path_type=Path), help="Write a PNG (needs matplotlib)."),
)
_SAMPLING = (
    click.option("-t", "--temperature", type=float, default=0.0, show_default=True, help="0 always takes the likeliest token."),
    click.option("--top-k", type=int, default=0, help="Keep the K likeliest tokens. [default: 0, all]"),
    click.option("--top-p", type=float, default=1.0, help="Keep the likeliest tokens up to this probability. [default: 1, all]"),
)
_BATCH = click.option(
    "-b", "--batch", callback=_numbers, default="1,8,64,256", show_default=True, metavar="N,N,...", help="How many prompts at a time."
)
_PROMPT_LEN = _count("--prompt-len", default=128, help="Tokens of a prompt.")
_OUTPUT_LEN = _count("--output-len", default=256, help="Tokens of an answer; end tokens are ignored.")
_REPEAT = _count("--repeat", default=3, help="Runs that count, after one that does not.")


def _options(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


@click.group()
def bench() -> None:
    """Measure the engine: throughput, latency, kernels.

    Each prints a table with the fraction of the roofline: of the time that the bytes which must move would take at the copy bandwidth,
    and the operations at the matmul rate, both measured in the same run. A call is timed from its start to its last token, prefill,
    scheduling, sampling and host included.
    """


@bench.command()
@_options(*_ENGINE, *_SAMPLING, _BATCH, _PROMPT_LEN, _OUTPUT_LEN, _REPEAT)
def throughput(batch: tuple[int, ...], prompt_len: int, output_len: int, repeat: int, **options: Any) -> None:
    """New tokens a second of batches of equal prompts."""
    from pagedjax.bench.runs import throughput as run
    from pagedjax.bench.workload import uniform

    def work(bed: Bed) -> list[Record]:
        vocab = bed.engine.config.vocab_size
        records = []
        with progress_bars("run") as progress:
            for rows in batch:
                done = _Counter(progress, f"{rows} x {prompt_len} + {output_len} tokens", repeat + 1)
                make = lambda seed, rows=rows: uniform(rows, prompt_len, output_len, vocab, 1000 * rows + seed)  # noqa: E731
                records.append({"batch": rows, **run(bed.engine, make, bed.limits, repeats=repeat, settings=bed.settings, progress=done)})
        return records

    _measure(work, need=prompt_len + output_len, plot=dict(label="workload", value="tokens_per_s", unit="new tokens a second"), **options)


@bench.command()
@_options(*_ENGINE, *_SAMPLING, _count("--requests", default=512, help="How many."), _REPEAT)
def mixed(requests: int, repeat: int, **options: Any) -> None:
    """New tokens a second of requests of all lengths: prompts of 32 to 1024 tokens, answers of 32 to 512."""
    from pagedjax.bench.runs import throughput as run
    from pagedjax.bench.workload import mixed as make

    def work(bed: Bed) -> list[Record]:
        vocab = bed.engine.config.vocab_size
        with progress_bars("run") as progress:
            done = _Counter(progress, f"{requests} requests", repeat + 1)
            workload = lambda seed: make(vocab, seed, requests)  # noqa: E731
            return [run(bed.engine, workload, bed.limits, repeats=repeat, settings=bed.settings, progress=done)]

    _measure(work, need=1024 + 512, plot=dict(label="workload", value="tokens_per_s", unit="new tokens a second"), **options)


@bench.command()
@_options(*_ENGINE, _PROMPT_LEN, _OUTPUT_LEN, _count("--repeat", default=20, help="Requests that count, after one that does not."))
def latency(prompt_len: int, output_len: int, repeat: int, **options: Any) -> None:
    """Milliseconds to the first token and between tokens, one request at a time."""
    from pagedjax.bench.runs import latency as run

    def work(bed: Bed) -> list[Record]:
        with progress_bars("request") as progress:
            done = _Counter(progress, f"1 x {prompt_len} + {output_len} tokens", repeat + 1)
            return [run(bed.engine, prompt_len, output_len, bed.limits, repeats=repeat, progress=done)]

    _measure(work, need=prompt_len + output_len, plot=None, **options)


@bench.command()
@_options(*_ENGINE, _count("-b", "--batch", default=64, help="Rows that decode, and prompts that are computed."), _PROMPT_LEN)
def kernels(batch: int, prompt_len: int, **options: Any) -> None:
    """Microseconds of each kernel in a decode step and in a prefill step, and how long the device was idle. Needs a GPU."""
    from pagedjax.bench.profile import profile_decode, profile_prefill

    def work(bed: Bed) -> list[Record]:
        with working("profiling"):
            found = [("decode", profile_decode(bed.engine, batch, prompt_len)), ("prefill", profile_prefill(bed.engine, batch, prompt_len))]
        return [record for kind, profile in found for record in kernel_records(kind, profile)]

    window = options["window"]
    _measure(
        work,
        needs_gpu=True,
        need=prompt_len + 14 * window,
        plot=dict(label="kernel", value="us_per_step", unit="microseconds a step"),
        **options,
    )


def kernel_records(kind: str, profile: Profile) -> list[Record]:
    """A record for the whole of a ``"decode"`` or ``"prefill"`` step, then one for each kernel in it."""
    whole = dataclasses.asdict(profile)
    each = [{"step": kind, "kernel": kernel.pop("name"), **kernel} for kernel in whole.pop("kernels")]
    return [{"step": kind, "kernel": "all", **whole}, *each]


@dataclasses.dataclass(frozen=True)
class Bed:
    """What a measurement runs on.

    Attributes:
      engine: with its steps compiled, on a GPU.
      limits: of the device.
      settings: sampling parameters.
    """

    engine: Engine
    limits: Limits
    settings: dict[str, Any]


class _Counter:
    """Counts calls into a progress bar."""

    def __init__(self, progress: Callable[[str, int, int], None], message: str, total: int) -> None:
        self._progress, self._message, self._total, self._done = progress, message, total, 0
        progress(message, 0, total)

    def __call__(self) -> None:
        self._done += 1
        self._progress(self._message, self._done, self._total)


def _measure(
    work: Callable[[Bed], list[Record]],
    *,
    need: int,
    plot: dict[str, str] | None,
    needs_gpu: bool = False,
    model: str | None,
    shape: str | None,
    json_file: Path | None,
    plot_file: Path | None,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    **engine: Any,
) -> None:
    """Build an engine, run `work` on it, print its records and write them where the user wants them.

    Args:
      work: what to measure.
      need: tokens of the longest request.
      needs_gpu: whether there is nothing to see without one.
      plot: keys of a record for a plot of the records, or ``None`` for times to the first token and between tokens.
      model, shape, json_file, plot_file, temperature, top_k, top_p: see the options of these names.
      engine: the other options.
    """
    if model is not None and shape is not None:
        raise click.UsageError("--model and --shape are two ways to say what is measured; give one")
    for option, path in (("--json", json_file), ("--plot", plot_file)):
        if path is not None and not path.absolute().parent.is_dir():
            raise click.UsageError(f"{option}: there is no folder {str(path.parent)!r} to write {path.name} into")
    if plot_file is not None and importlib.util.find_spec("matplotlib") is None:
        raise click.UsageError("--plot needs matplotlib: pip install 'pagedjax[bench]'")
    settings = dict(temperature=temperature, top_k=top_k, top_p=top_p)
    from pagedjax.cli.options import sampling_params

    sampling_params(**settings)  # checked before anything slow happens
    source = None if shape is not None else resolve_model(model)
    with leaving_on_interrupt():
        import jax

        from pagedjax.bench import report

        if needs_gpu and jax.default_backend() != "gpu":
            raise ConfigError(f"the kernels of a step are read off a GPU's profile; JAX runs on {jax.default_backend()} here")
        started = time.perf_counter()
        bed, facts = _bed(source, shape, need=need, settings=settings, **engine)
        facts = {"model": shape or Path(str(source)).name, **facts, "settings": settings}
        head = report.header("pagedjax " + shlex.join(sys.argv[1:]), **facts)
        click.echo(report.title(head))
        click.echo(
            f"{head['model']}, {facts['dtype']}, {facts['num_kv_blocks']} KV blocks; ready in {time.perf_counter() - started:.1f} s: "
            f"weights {facts['load_s']:.1f}, engine {facts['engine_s']:.1f}, "
            + (
                f"{facts['num_executables']} steps compiled {facts['warmup_s']:.1f}"
                if facts["warmup_s"]
                else "steps compile in the first run"
            )
        )
        click.echo(
            f"measured here: copy {facts['copy_bytes_per_s'] / 1e12:.3g} TB/s, matmul {facts['matmul_flops_per_s'] / 1e12:.3g} TFLOP/s\n"
        )
        records = work(bed)
        click.echo(report.table(records, _columns(report)))
        if json_file is not None:
            report.write_json(json_file, head, records)
        if plot_file is not None:
            if plot is None:
                records, plot = _latency_bars(records), dict(label="what", value="ms", unit="milliseconds")
            shown = [r for r in records if r.get("share", 1.0) >= 0.01]
            report.plot_bars(plot_file, head, shown, limit="limit" if all("limit" in r for r in shown) else None, **plot)


def _bed(
    source: str | Path | None,
    shape: str | None,
    *,
    need: int,
    settings: dict[str, Any],
    dtype: str,
    max_model_len: int | None,
    max_num_seqs: int,
    token_budget: int,
    window: int,
    gpu_memory_utilization: float,
    kv_blocks: int | None,
    fused_decode_rows: int | None,
) -> tuple[Bed, Record]:
    """The engine, and what was measured on the way to it."""
    import jax

    from pagedjax.bench.roofline import measure_limits
    from pagedjax.bench.shapes import shape_config
    from pagedjax.checkpoint import open_checkpoint
    from pagedjax.engine import Engine
    from pagedjax.engine_config import EngineConfig
    from pagedjax.load import load_config, load_params
    from pagedjax.params import init_params

    started = time.perf_counter()
    if shape is not None:
        config = shape_config(shape)
        config = config if dtype == "auto" else dataclasses.replace(config, dtype=dtype)
        with working("making random weights", lines=False):
            params = jax.block_until_ready(init_params(config, jax.random.key(0)))
    else:
        assert source is not None
        with open_checkpoint(source) as checkpoint, progress_bars("tensor", lines=False) as progress:
            config = load_config(checkpoint, dtype=dtype)
            params = load_params(checkpoint, config, progress=lambda done, total: progress("loading weights", done, total))
            jax.block_until_ready(params)
    load_s = time.perf_counter() - started
    length = min(config.max_model_len, 8192) if max_model_len is None else max_model_len
    if need > length:
        raise ConfigError(f"a request has up to {need} tokens of prompt and answer; max_model_len is {length}")
    limits = measure_limits(config.dtype)
    started = time.perf_counter()
    engine = Engine(
        params,
        config,
        EngineConfig(
            max_num_seqs=max_num_seqs,
            max_model_len=length,
            token_budget=token_budget,
            window=window,
            gpu_memory_utilization=gpu_memory_utilization,
            num_kv_blocks=kv_blocks,
            fused_decode_rows=fused_decode_rows,
        ),
    )
    engine_s = time.perf_counter() - started
    started = time.perf_counter()
    on_gpu = jax.default_backend() == "gpu"
    if on_gpu:  # a CPU has many small sizes and compiles those that occur, in the run that does not count
        engine.warmup(use_tqdm=sys.stderr.isatty())
    facts = {
        "dtype": config.dtype,
        "max_model_len": engine.max_model_len,
        "num_kv_blocks": engine.num_kv_blocks,
        "engine_config": dataclasses.asdict(engine.engine_config),
        "load_s": load_s,
        "engine_s": engine_s,
        "warmup_s": time.perf_counter() - started if on_gpu else None,
        "num_executables": engine.buckets.num_executables,
        **dataclasses.asdict(limits),
    }
    return Bed(engine, limits, settings), facts


def _columns(report: Any) -> Sequence[tuple[str, str, Callable[[Any], str]]]:
    number, percent = report.number, report.percent
    return (
        ("workload", "workload", str),
        ("step", "step", str),
        ("tokens/s", "tokens_per_s", number),
        ("spread", "spread", percent),
        ("of roofline", "fraction_of_roofline", percent),
        ("first token, ms", "first_token_ms", number),
        ("p95", "first_token_ms_p95", number),
        ("at best", "first_token_floor_ms", number),
        ("per token, ms", "per_token_ms", number),
        ("p95", "per_token_ms_p95", number),
        ("at best", "per_token_floor_ms", number),
        ("us/step", "us_per_step", number),
        ("calls/step", "calls_per_step", number),
        ("share", "share", percent),
        ("idle", "idle_share", percent),
        ("waiting for the host", "pause_share", percent),
        ("host us/dispatch", "host_us_per_dispatch", number),
        ("us/token", "host_us_per_token", number),
        ("prefill padding", "padding", percent),
        ("first run, s", "first_run_s", number),
        ("kernel", "kernel", str),
    )


def _latency_bars(records: list[Record]) -> list[Record]:
    bars = []
    for record in records:
        for what, key in (("first token", "first_token"), ("between tokens", "per_token")):
            bars += [
                {"what": f"{what}, p{p}", "ms": record[f"{key}_ms_p{p}" if p != 50 else f"{key}_ms"], "limit": record[f"{key}_floor_ms"]}
                for p in (50, 95, 99)
            ]
    return bars
