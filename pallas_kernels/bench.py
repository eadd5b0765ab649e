"""Benchmark the kernels on the named shapes: ``python -m pallas_kernels.bench --help``.

Times are the device's own (``tuning.timing``), every kernel of an op summed; pools are rotated so that the L2 does not hold
them; bytes are what the op must move once; fractions are of the read and the copy bandwidth measured in the same run; errors
are relative, in the 2-norm, against the XLA reference.
"""

import argparse
import concurrent.futures
import datetime as dt
import importlib.metadata
import importlib.util
import itertools
import json
import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from pallas_kernels import support
from pallas_kernels._dispatch import INTERPRET_SUFFIX
from pallas_kernels.tuning import tuner
from pallas_kernels.tuning.cases import Case, Pools, decode_case, matmul_case, mixed_case, prefill_case, rope_case, write_case
from pallas_kernels.tuning.shapes import DecodeShape, MatmulShape, PrefillShape, RopeShape, Shape, WriteShape, named
from pallas_kernels.tuning.timing import Timing, bandwidths, measure

_DECODE, _PREFILL, _WRITE = "paged_attention", "paged_prefill_attention", "write_kv"
_MATMUL, _ROPE = "skinny_matmul", "rope_write_kv"
_OPS = (_DECODE, _PREFILL, _WRITE, _MATMUL, _ROPE)
_MATMULS = ("matmul-qkv", "matmul-o", "matmul-gate_up", "matmul-down", "matmul-head")
_DEFAULT_SHAPES = ("decode-h64", "decode-h128", "write-", "prefill-", "mixed-", *_MATMULS, "rope-h64")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.bench", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", action="append", metavar="TEXT", help="shapes whose name contains TEXT (default: all but the small one)")
    parser.add_argument("--implementation", action="append", metavar="NAME", help="implementations to time (default: all that run here)")
    parser.add_argument("--blocks", type=int, default=131072, help="blocks of 16 tokens in the pools (default: %(default)s)")
    parser.add_argument("--bandwidth-bytes", type=int, default=4 << 30, help="size of the array for the bandwidths (default: 4 GiB)")
    parser.add_argument("--repeat", type=int, default=3, help="measure everything so often, report medians (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write JSON lines: one header, then one line a cell")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a PNG of the fraction of the read bandwidth (needs matplotlib)")
    parser.add_argument(
        "--tune", type=Path, metavar="FILE", help="search settings for the decode kernels, write this device's table and stop"
    )
    parser.add_argument("--tune-op", choices=(_DECODE, _MATMUL), default=_DECODE, help="whose settings (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="list the shapes and stop")
    args = parser.parse_args(argv)
    shapes = list(dict.fromkeys(shape for text in args.only or _DEFAULT_SHAPES for shape in named(text)))
    if not shapes:
        parser.error(f"--only: no shape's name contains {' or '.join(map(repr, args.only))}; --list shows the names")
    for option, value, least in (
        ("--blocks", args.blocks, 2),
        ("--bandwidth-bytes", args.bandwidth_bytes, 1 << 20),
        ("--repeat", args.repeat, 1),
    ):
        if value < least:
            parser.error(f"{option} must be at least {least}, got {value}")
    for option, path in (("--json", args.json), ("--plot", args.plot), ("--tune", args.tune)):
        if path is not None and not path.absolute().parent.is_dir():
            parser.error(f"{option}: there is no folder {str(path.parent)!r} to write {path.name} into")
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib; pip install matplotlib")
    if why := _unusable(args.implementation or []):
        parser.error(f"--implementation: {why}")
    if args.list:
        print("\n".join(shape.name for shape in shapes))
        return 0
    command = "python -m pallas_kernels.bench " + shlex.join(sys.argv[1:] if argv is None else argv)
    header = _header(command.rstrip())
    print(f"{header['device']}, {', '.join(f'{name} {version}' for name, version in header['versions'].items())}, {header['date']}")
    pools = Pools(args.blocks)
    if args.tune and args.tune_op == _MATMUL:
        if why := support(_MATMUL).reasons["pallas_triton"]:
            parser.error(f"--tune: skinny_matmul's pallas_triton does not run here: {why}")
        tuner.write_table(args.tune, header, tuner.tune_matmul(print))
        return 0
    if args.tune:
        here = [name for name in ("pallas_triton", "mosaic_gpu") if support(_DECODE).reasons[name] is None]
        names = tuple(args.implementation or here)
        if not names or not set(names) <= {"pallas_triton", "mosaic_gpu", "jax_triton"}:
            parser.error(f"--tune: there is nothing to tune about {', '.join(names) or 'what runs here'}; the GPU kernels have settings")
        tuner.write_table(args.tune, header, tuner.tune((64, 128), names, pools, print))
        return 0
    try:
        cases = [case for shape in shapes for case in _cases(shape, args.implementation, pools)]
    except ValueError as error:  # pools too small for a shape
        parser.error(f"--blocks {args.blocks} is too few: {error}")
    header["terabytes_per_second"] = bandwidths(args.bandwidth_bytes)
    print("measured here, TB/s: " + ", ".join(f"{name} {value:.2f}" for name, value in header["terabytes_per_second"].items()))
    records = run(cases, header["terabytes_per_second"], args.repeat)
    if args.json:
        args.json.write_text("".join(json.dumps(line) + "\n" for line in (header, *records)))
    if args.plot:
        plot(records, header, args.plot)
    return 0


def _header(command: str) -> dict[str, Any]:
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "numpy")}
    date = dt.datetime.now(dt.UTC).date().isoformat()
    return {"device": jax.devices()[0].device_kind, "versions": versions, "date": date, "command": command}


def _unusable(names: Sequence[str]) -> str | None:
    """What is wrong with the implementations asked for, or ``None``."""
    reports = [support(op) for op in _OPS]
    for name in names:
        reasons = [report.reasons[name] for report in reports if name in report.reasons]
        if not reasons:
            return f"no op has {name!r}; there are {', '.join(dict.fromkeys(n for report in reports for n in report.reasons))}"
        if None not in reasons:
            return f"{name} does not run on {reports[0].device}: {reasons[0]}"
    return None


def run(cases: Sequence[Case], bandwidth: dict[str, float], repeat: int) -> list[dict[str, Any]]:
    """Time every case ``repeat`` times, print a line for each and return them as records."""
    first = list(itertools.accumulate((len(case.apart) + 1 for case in cases), initial=0))
    flat = [each for case in cases for each in (case, *case.apart)]
    with concurrent.futures.ThreadPoolExecutor(12) as threads:  # most of this is compiling
        errors = list(threads.map(lambda case: None if case.error is None else case.error(), cases))
    rounds = [measure([each.call for each in flat], [each.calls for each in flat]) for _ in range(repeat)]
    timings = list(zip(*rounds, strict=True))  # of each case, all its rounds
    records = [
        _record(case, timings[at], timings[at + 1 : at + 1 + len(case.apart)], error, bandwidth)
        for case, at, error in zip(cases, first, errors, strict=False)
    ]
    print(f"{'shape':32} {'implementation':24} {'us':>9} {'GB/s':>7} {'of read':>8} {'of copy':>8} {'TFLOP/s':>8} {'error':>9}  clock")
    columns = (("GB_per_s", "7.0f"), ("fraction_of_read", "8.3f"), ("fraction_of_copy", "8.3f"), ("TFLOP_per_s", "8.1f"), ("error", "9.2e"))
    for record in records:
        rest = " ".join(
            format(record[key], spec) if record.get(key) is not None else " " * int(spec.partition(".")[0]) for key, spec in columns
        )
        apart = f"  {record['of_apart']:.3f} of both apart" if "of_apart" in record else ""
        print(f"{record['shape']:32} {record['implementation']:24} {record['us']:9.2f} {rest}  {record['clock']}{apart}")
    return records


def _cases(shape: Shape, implementations: Sequence[str] | None, pools: Pools) -> list[Case]:
    on_gpu = jax.default_backend() == "gpu"

    def here(op: str) -> list[str]:
        reasons = support(op).reasons
        if implementations:
            return [name for name in implementations if name in reasons and reasons[name] is None]
        return [
            name
            for name, why in reasons.items()
            if why is None and not name.endswith(INTERPRET_SUFFIX) and (name != "reference" or not on_gpu)
        ]

    if isinstance(shape, DecodeShape):
        return [decode_case(shape, name, pools) for name in here(_DECODE)]
    if isinstance(shape, WriteShape):
        return [write_case(shape, name, pools) for name in here(_WRITE)]
    if isinstance(shape, PrefillShape):
        return [prefill_case(shape, name, pools) for name in [*here(_PREFILL), *(["cudnn"] if on_gpu else [])]]
    if isinstance(shape, MatmulShape):
        return [matmul_case(shape, name) for name in [*here(_MATMUL), *(["reference"] if on_gpu and not implementations else [])]]
    if isinstance(shape, RopeShape):
        return [rope_case(shape, name, pools) for name in here(_ROPE)]
    return [mixed_case(shape, name, pools) for name in here(_DECODE) if name in here(_PREFILL)]


def _record(
    case: Case, rounds: Sequence[Timing], apart: Sequence[Sequence[Timing]], error: float | None, bandwidth: dict[str, float]
) -> dict[str, Any]:
    times = [timing.span_us if apart else timing.us for timing in rounds]
    us = statistics.median(times)
    record: dict[str, Any] = {
        "shape": case.name,
        "implementation": case.implementation,
        "us": round(us, 3),
        "us_rounds": [round(time, 3) for time in times],
        "us_least": round(min(min(timing.calls_us) for timing in rounds), 3),
        "calls": case.calls,
        "clock": rounds[0].clock,
        "kernels": list(rounds[0].kernels),
        "error": error,
    }
    if apart:
        record["us_apart"] = [statistics.median(timing.us for timing in each) for each in apart]
        record["of_apart"] = us / sum(record["us_apart"])
    if case.bytes_needed:
        rate = case.bytes_needed / us / 1e6  # TB/s
        record |= {"bytes": case.bytes_needed, "GB_per_s": rate * 1e3}
        record |= {f"fraction_of_{name}": rate / value for name, value in bandwidth.items()}
    if case.flops:
        record["TFLOP_per_s"] = case.flops / us / 1e6
    return record


def plot(records: Sequence[dict[str, Any]], header: dict[str, Any], path: Path) -> None:
    """Fraction of the read bandwidth against context, a line for each batch, a panel for each head size and implementation.

    Raises:
        ImportError: matplotlib is not installed.
    """
    panels: dict[tuple[str, str], dict[int, list[tuple[int, float]]]] = {}
    for record in records:
        parts = record["shape"].split("-")
        if parts[0] != "decode" or len(parts) != 3 or not parts[2].replace("x", "").isdigit():
            continue
        batch, context = (int(x) for x in parts[2].split("x"))
        panel = panels.setdefault((parts[1], record["implementation"]), {})
        panel.setdefault(batch, []).append((context, record["fraction_of_read"]))
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(4.5 * max(1, len(panels)), 3.8), layout="constrained")
    axes = figure.subplots(1, max(1, len(panels)), sharey=True, squeeze=False)[0]
    for axis, ((head, implementation), lines) in zip(axes, sorted(panels.items()), strict=False):
        for batch, points in sorted(lines.items()):
            axis.plot(*zip(*sorted(points), strict=True), marker="o", label=f"batch {batch}")
        axis.set(title=f"head size {head[1:]}, {implementation}", xlabel="context, tokens", xscale="log", ylim=(0, 1.05))
        axis.set_xscale("log", base=2)
        axis.grid(alpha=0.3)
        axis.legend()
    axes[0].set_ylabel("fraction of the read bandwidth")
    figure.suptitle(f"paged_attention, {header['device']}, jax {header['versions']['jax']}, {header['date']}")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
