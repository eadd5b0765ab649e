"""Benchmark the kernels on the named shapes: ``python -m pallas_kernels.bench --help``.

Times are the device's own (``tuning.timing``), every kernel of an op summed; pools are rotated so that the L2 does not hold
them; bytes are what the op must move once; fractions are of the read and the copy bandwidth measured in the same run; errors
are relative, in the 2-norm, against the XLA reference.
"""

import argparse
import concurrent.futures
import datetime as dt
import importlib
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pallas_kernels import support
from pallas_kernels._dispatch import INTERPRET_SUFFIX
from pallas_kernels.tuning import tuner
from pallas_kernels.tuning.cases import Case, Pools, decode_case, prefill_case, write_case
from pallas_kernels.tuning.shapes import DecodeShape, PrefillShape, WriteShape, named
from pallas_kernels.tuning.timing import Timing, bandwidths, measure

_OPS = {DecodeShape: "paged_attention", WriteShape: "write_kv", PrefillShape: "paged_prefill_attention"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.bench", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--only", action="append", metavar="TEXT", help="shapes whose name contains TEXT (default: decode-, write-, prefill-)"
    )
    parser.add_argument("--implementation", action="append", metavar="NAME", help="implementations to time (default: all that run here)")
    parser.add_argument("--blocks", type=int, default=131072, help="blocks of 16 tokens in the pools (default: %(default)s)")
    parser.add_argument("--bandwidth-bytes", type=int, default=4 << 30, help="size of the array for the bandwidths (default: 4 GiB)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write JSON lines: one header, then one line a cell")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a PNG of the fraction of the read bandwidth (needs matplotlib)")
    parser.add_argument(
        "--tune", type=Path, metavar="FILE", help="search settings for the decode kernels, write this device's table and stop"
    )
    parser.add_argument("--list", action="store_true", help="list the shapes and stop")
    args = parser.parse_args(argv)
    shapes = [shape for text in args.only or ("decode-h64", "decode-h128", "write-", "prefill-") for shape in named(text)]
    if not shapes:
        parser.error(f"no shape's name contains any of {', '.join(args.only)}; --list shows them")
    if args.list:
        print("\n".join(shape.name for shape in shapes))
        return 0
    command = "python -m pallas_kernels.bench " + shlex.join(sys.argv[1:] if argv is None else argv)
    header = _header(command.rstrip())
    print(f"{header['device']}, {', '.join(f'{name} {version}' for name, version in header['versions'].items())}, {header['date']}")
    pools = Pools(args.blocks)
    if args.tune:
        names = tuple(args.implementation or ["pallas_triton"])
        tuner.write_table(args.tune, header, tuner.tune((64, 128), names, pools, print))
        return 0
    header["terabytes_per_second"] = bandwidths(args.bandwidth_bytes)
    print("measured here, TB/s: " + ", ".join(f"{name} {value:.2f}" for name, value in header["terabytes_per_second"].items()))
    records = run(shapes, args.implementation, pools, header["terabytes_per_second"])
    if args.json:
        args.json.write_text("".join(json.dumps(line) + "\n" for line in (header, *records)))
    if args.plot:
        plot(records, header, args.plot)
    return 0


def _header(command: str) -> dict[str, Any]:
    versions = {"jax": jax.__version__, "numpy": np.__version__}
    date = dt.datetime.now(dt.UTC).date().isoformat()
    return {"device": jax.devices()[0].device_kind, "versions": versions, "date": date, "command": command}


def run(
    shapes: Sequence[DecodeShape | WriteShape | PrefillShape],
    implementations: Sequence[str] | None,
    pools: Pools,
    bandwidth: dict[str, float],
) -> list[dict[str, Any]]:
    """Time every shape by every implementation that serves it, print a line for each and return them as records."""
    cases = [case for shape in shapes for case in _cases(shape, implementations, pools)]
    with concurrent.futures.ThreadPoolExecutor(12) as threads:  # most of this is compiling
        errors = list(threads.map(lambda case: None if case.error is None else case.error(), cases))
    timings = measure([case.call for case in cases], [case.calls for case in cases])
    records = [_record(*row, bandwidth) for row in zip(cases, timings, errors, strict=True)]
    print(f"{'shape':32} {'implementation':24} {'us':>9} {'GB/s':>7} {'of read':>8} {'of copy':>8} {'TFLOP/s':>8} {'error':>9}  clock")
    columns = (("GB_per_s", "7.0f"), ("fraction_of_read", "8.3f"), ("fraction_of_copy", "8.3f"), ("TFLOP_per_s", "8.1f"), ("error", "9.2e"))
    for record in records:
        rest = " ".join(
            format(record[key], spec) if record.get(key) is not None else " " * int(spec.partition(".")[0]) for key, spec in columns
        )
        print(f"{record['shape']:32} {record['implementation']:24} {record['us']:9.2f} {rest}  {record['clock']}")
    return records


def _cases(shape: DecodeShape | WriteShape | PrefillShape, implementations: Sequence[str] | None, pools: Pools) -> list[Case]:
    reasons = support(_OPS[type(shape)]).reasons
    on_gpu = jax.default_backend() == "gpu"
    here = [
        name for name, why in reasons.items() if why is None and not name.endswith(INTERPRET_SUFFIX) and (name != "reference" or not on_gpu)
    ]
    names = [name for name in implementations if name in reasons] if implementations else here
    if isinstance(shape, DecodeShape):
        return [decode_case(shape, name, pools) for name in names]
    if isinstance(shape, WriteShape):
        return [write_case(shape, name, pools) for name in names]
    return [prefill_case(shape, name, pools) for name in [*names, *(["cudnn"] if on_gpu else [])]]


def _record(case: Case, timing: Timing, error: float | None, bandwidth: dict[str, float]) -> dict[str, Any]:
    record: dict[str, Any] = {
        "shape": case.name,
        "implementation": case.implementation,
        "us": round(timing.us, 3),
        "us_least": round(min(timing.calls_us), 3),
        "calls": len(timing.calls_us),
        "clock": timing.clock,
        "kernels": list(timing.kernels),
        "error": error,
    }
    if case.bytes_needed:
        rate = case.bytes_needed / timing.us / 1e6  # TB/s
        record |= {"bytes": case.bytes_needed, "GB_per_s": rate * 1e3}
        record |= {f"fraction_of_{name}": rate / value for name, value in bandwidth.items()}
    if case.flops:
        record["TFLOP_per_s"] = case.flops / timing.us / 1e6
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
