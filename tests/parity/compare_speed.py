"""Decode speed on the CPU: `pagedjax.generate` against transformers' ``generate``, in one run on the same threads.

    python -m tests.parity.compare_speed --threads 2 --json speed.json

needs the ``parity`` extra. Demo model, float32, greedy, end tokens ignored, the same prompts on both sides. What is compared is decode
speed: new tokens after the first, divided by the time from the first token to the last. One run of each warms up; then the two take
turns, and the median counts. Run it on a machine that has nothing else to do; the load average is part of the result.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import pathlib
import platform
import statistics
import time
from typing import Any

PROMPT = "The capital of France is a city that many people visit every year, because it"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2, help="CPU cores and threads that each side may use (default: %(default)s)")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], help="batch sizes (default: 1 8)")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens to add to each prompt (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="measured runs of each side; the median counts (default: %(default)s)")
    parser.add_argument("--attention", default="sdpa", help="transformers' attention, sdpa or eager (default: %(default)s, its default)")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the result there as JSON too")
    args = parser.parse_args()
    if min(args.threads, args.repeats, *args.batch) < 1 or args.new_tokens < 2:
        parser.error("--threads, --repeats and --batch must be at least 1, --new-tokens at least 2")
    available = sorted(os.sched_getaffinity(0))
    if args.threads > len(available):
        parser.error(f"--threads {args.threads}: only {len(available)} CPU cores are available")
    return args


def cpu_model() -> str:
    """The processor's name, as Linux gives it."""
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def main() -> None:
    """Measure, print a table, perhaps write JSON."""
    args = parse_args()
    # Before jax and torch start their threads: XLA sizes its pool by the cores that it may use.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    load_before = os.getloadavg()

    import jax
    import torch
    import transformers

    from pagedjax import LLM, generate
    from pagedjax.checkpoint import demo_model
    from tests.parity.transformers_reference import load_gguf

    torch.set_num_threads(args.threads)
    path = demo_model()
    llm = LLM(path, dtype="float32")
    reference = load_gguf(path, round_to_bfloat16=False, attention=args.attention)
    ids = llm.tokenizer.encode(PROMPT)

    def ours(prompts: list[list[int]]) -> tuple[float, list[list[int]]]:
        result = generate(llm.params, llm.config, prompts, args.new_tokens)
        return result.decode_s, result.token_ids

    class Clock(transformers.StoppingCriteria):
        """Looks at the clock after every token and never stops."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            self.times.append(time.perf_counter())
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    def theirs(prompts: list[list[int]]) -> tuple[float, list[list[int]]]:
        clock = Clock()
        out = reference.generate(prompts, args.new_tokens, stopping=transformers.StoppingCriteriaList([clock]))
        assert len(clock.times) == args.new_tokens
        return clock.times[-1] - clock.times[0], [row[len(ids) :] for row in out.tolist()]

    rows = []
    for batch in args.batch:
        # Another first token for each row, so that rows differ; all of one length, so that neither side pads.
        prompts = [[(ids[0] + row) % llm.config.vocab_size, *ids[1:]] for row in range(batch)]
        same = ours(prompts)[1] == theirs(prompts)[1]
        seconds: dict[str, list[float]] = {"pagedjax": [], "transformers": []}
        for _ in range(args.repeats):
            for name, side in (("pagedjax", ours), ("transformers", theirs)):
                time.sleep(0.5)  # the other side's threads may still be spinning
                seconds[name].append(side(prompts)[0])
        speed = {name: batch * (args.new_tokens - 1) / statistics.median(s) for name, s in seconds.items()}
        rows.append(
            {
                "batch": batch,
                **{f"{name}_tokens_per_s": round(value, 1) for name, value in speed.items()},
                "ratio": round(speed["pagedjax"] / speed["transformers"], 2),
                "seconds": {name: [round(s, 3) for s in each] for name, each in seconds.items()},
                "same_ids": same,
            }
        )

    result = {
        "what": f"decode tokens/s, {path.name} in float32, {len(ids)} prompt + {args.new_tokens} new tokens, median of {args.repeats}",
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "cpu": cpu_model(),
        "threads": args.threads,
        "load_average_before_after": [round(load_before[0], 2), round(os.getloadavg()[0], 2)],
        "versions": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "attention": args.attention,
        },
        "results": rows,
    }
    versions = ", ".join(f"{name} {value}" for name, value in result["versions"].items())
    print(f"{result['what']}\n{result['date']}; {result['cpu']}, {args.threads} threads, load {load_before[0]:.2f}; {versions}\n")
    print(f"{'batch':>5} {'pagedjax':>10} {'transformers':>13} {'ratio':>6}   ids")
    for row in rows:
        print(
            f"{row['batch']:>5} {row['pagedjax_tokens_per_s']:>10} {row['transformers_tokens_per_s']:>13} {row['ratio']:>6}   "
            f"{'equal' if row['same_ids'] else 'DIFFER'}"
        )
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
