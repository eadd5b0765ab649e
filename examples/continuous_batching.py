"""What does the engine do with a pool too small for everybody? Watch it fill, share and drain.

Requests arrive while others run. Their prompts start with one of two texts, so that they share blocks, and their answers grow until the
pool is full: then whoever came last gives its blocks back and is computed again later. In a terminal the view is drawn anew after each
step of the engine, and Ctrl-C ends it; elsewhere, there is a line for each change of a request's state.

    python examples/continuous_batching.py
    python examples/continuous_batching.py --pause 0.5
"""

import argparse
import contextlib
import dataclasses
import os
import re
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from pagedjax.checkpoint import open_checkpoint
from pagedjax.cli.interrupts import EXIT_INTERRUPTED, leaving_on_interrupt
from pagedjax.cli.loading import resolve_model
from pagedjax.engine import BlockState, Engine, RequestView, Snapshot
from pagedjax.engine_config import EngineConfig
from pagedjax.load import load_config, load_params
from pagedjax.request import SamplingParams
from pagedjax.text import Tokenizer

FOREST = """\
Once upon a time, in a small house at the edge of a great dark forest, there lived an old clockmaker and his granddaughter Mira. Every
evening, when the last clock had been wound, they sat down by the fire, and he told her of the people whose clocks he had mended, and of
the one clock that he had never been able to mend at all. One evening he began:"""
HARBOUR = """\
The harbour of Port Ellery is the oldest on the northern coast. Its two long piers were built of grey stone more than four hundred years
ago, and ships from many countries still call there for salt, timber, wool and fish. Visitors come in summer, when the market is held on
the quay and the lighthouse is open to everybody. The guide says:"""
# Arrives at this step, starts with this text and goes on with that one; its answer is so many tokens long.
REQUESTS = (
    (0, FOREST, "There was a king", 88),
    (0, FOREST, "In the north", 72),
    (2, HARBOUR, "The lighthouse", 80),
    (4, FOREST, "Long before you were born", 56),
    (6, HARBOUR, "On market days", 88),
    (8, HARBOUR, "The oldest ship", 32),
    (10, FOREST, "A stranger came", 64),
    (12, FOREST, "My own father", 24),
    (14, HARBOUR, "In winter", 72),
    (20, HARBOUR, "The best fish", 40),
    (90, FOREST, "There was a king", 24),
    (92, HARBOUR, "Behind the church", 32),
)
NUM_BLOCKS, BLOCK_SIZE = 26, 16
START_TOKENS, END_TOKENS = 4 * BLOCK_SIZE, 12  # texts are cut, so that all models see a pool of the same kind
LOOKS: dict[BlockState, tuple[str, str]] = {  # a character and a colour
    "null": ("0", "2"),
    "free": (".", "2"),
    "used": ("#", "32"),
    "shared": ("@", "1;36"),
    "cached": ("+", "33"),
}


@dataclasses.dataclass
class Row:
    """What is known of a request; the engine forgets it when it ends."""

    state: str = "waiting"
    token_ids: list[int] = dataclasses.field(default_factory=list)
    view: RequestView | None = None


@dataclasses.dataclass(frozen=True)
class Moment:
    """What there is to see after a step."""

    step: int
    rows: dict[str, Row]
    snapshot: Snapshot
    changed: list[str]  # requests with another state than before


def play(engine: Engine, tokenizer: Tokenizer) -> Iterator[Moment]:
    """Run all requests, one step of the engine at a time."""
    rows: dict[str, Row] = {}
    step = 0
    while len(rows) < len(REQUESTS) or engine.has_unfinished_requests:
        if not engine.has_unfinished_requests:
            step = max(step, REQUESTS[len(rows)][0])  # nothing to do until then
        while len(rows) < len(REQUESTS) and REQUESTS[len(rows)][0] <= step:
            _, start, end, num_tokens = REQUESTS[len(rows)]
            prompt = tokenizer.encode(start)[:START_TOKENS] + tokenizer.encode(end, add_special_tokens=False)[:END_TOKENS]
            # Past the model's own end tokens, so that what happens to the pool is the same for all models.
            sampling = SamplingParams(temperature=0.7, seed=len(rows), max_tokens=num_tokens, ignore_eos=True)
            rows[engine.add_request(prompt, sampling)] = Row()
        before = {request_id: row.state for request_id, row in rows.items() if row.view is not None}
        for delta in engine.step():
            rows[delta.request_id].token_ids += delta.token_ids
            if delta.finish_reason is not None:
                rows[delta.request_id].state = "failed" if delta.error else "finished"
        snapshot = engine.snapshot()
        for view in snapshot.requests:
            rows[view.request_id].view, rows[view.request_id].state = view, view.status.value
        yield Moment(step, rows, snapshot, [i for i, row in rows.items() if row.state != before.get(i)])
        step += 1


def pool_map(snapshot: Snapshot) -> str:
    """One character a block, in the order of their ids."""
    return "".join(LOOKS[state][0] for state in snapshot.blocks)


def numbers(snapshot: Snapshot) -> str:
    """The engine's statistics, as far as they fit a line."""
    stats = snapshot.stats
    return (
        f"{stats.tokens_per_s:.0f} tokens/s   hit rate {100 * stats.prefix_hit_rate:.0f} %   {stats.num_preemptions} preemptions   "
        f"{stats.num_dispatches} dispatches   {stats.num_finished} finished"
    )


def frame(moment: Moment, decode: Callable[[list[int]], str], columns: int, lines: int, *, colour: bool) -> list[str]:
    """The view as lines that fit a terminal of this size."""
    width = columns - 1  # a character in the last column may start a new line
    blocks = pool_map(moment.snapshot)
    counts = Counter(moment.snapshot.blocks)
    map_lines = [f"  {blocks[i : i + width - 2]}" for i in range(0, len(blocks), width - 2)]
    legend = "   ".join(f"{LOOKS[state][0]} {state} {counts[state]}" for state in LOOKS)
    above = [
        f"{NUM_BLOCKS} blocks of {BLOCK_SIZE} tokens for {len(REQUESTS)} requests, after step {moment.step}",
        "",
        *map_lines,
        "",
        f"  {legend}",
        "",
        "  id  state      prompt  from cache   answer  blocks  text",
    ]
    below = ["", f"  {numbers(moment.snapshot)}"]
    requests = []
    for request_id, row in moment.rows.items():
        view = row.view
        assert view is not None
        text = re.sub(r"[^ -~]+", " ", decode(row.token_ids[-16:]))[-24:]
        held = len(view.block_ids) if row.state == "running" else 0
        requests.append(
            f"{request_id:>4}  {row.state:9}  {view.num_prompt_tokens:6}  {view.num_cached_tokens or 0:10}"
            f"  {len(row.token_ids):3}/{view.max_new_tokens:3}  {held:6}  {text}"
        )
    room = max(0, lines - len(above) - len(below))
    shown = [line[:width] for line in (*above, *requests[max(0, len(requests) - room) :], *below)]
    if colour:
        painted = {character: f"\x1b[{code}m{character}\x1b[0m" for character, code in LOOKS.values()}
        for i in range(2, 2 + len(map_lines)):
            shown[i] = "".join(painted.get(character, character) for character in shown[i])
    return shown


def change(moment: Moment, request_id: str) -> str:
    """A request's new state as a line."""
    row, counts = moment.rows[request_id], Counter(moment.snapshot.blocks)
    assert row.view is not None
    tokens = f"{row.view.num_prompt_tokens} prompt tokens, {row.view.num_cached_tokens or 0} from the cache, {len(row.token_ids)} new"
    pool = ", ".join(f"{counts[state]} {state}" for state in LOOKS if state != "null")
    return f"step {moment.step:2}  request {request_id:>2} {row.state:9}  {tokens}  (pool: {pool})"


@contextlib.contextmanager
def screen() -> Iterator[Callable[[list[str]], None]]:
    """Yields a function that draws a frame. The terminal's other screen is used, so that what was there comes back."""

    def draw(lines: list[str]) -> None:
        sys.stdout.write("\x1b[H" + "\n".join(f"{line}\x1b[K" for line in lines) + "\x1b[J")
        sys.stdout.flush()

    sys.stdout.write("\x1b[?1049h\x1b[?25l\x1b[2J")
    try:
        yield draw
    finally:
        sys.stdout.write("\x1b[?25h\x1b[?1049l")
        sys.stdout.flush()


@contextlib.contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """Yields a function that tells whether Ctrl-C was pressed: an exception in the middle of JAX's work might be lost, or do damage."""
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", help="a Hugging Face folder, a GGUF file or a hub id; by default the demo model (93 MB, downloaded once)"
    )
    parser.add_argument("--pause", type=float, default=0.05, help="seconds between two steps in a terminal, for fast devices")
    options = parser.parse_args(arguments)
    if not 0 <= options.pause < 60:
        parser.error(f"--pause is {options.pause}; it must be from 0 to 60 seconds")

    model = resolve_model(options.model)
    with leaving_on_interrupt():
        with open_checkpoint(model) as checkpoint:
            config = load_config(checkpoint)
            tokenizer = checkpoint.tokenizer()
            params = load_params(checkpoint, config)
        settings = EngineConfig(
            max_num_seqs=8,
            max_model_len=START_TOKENS + END_TOKENS + max(num_tokens for *_, num_tokens in REQUESTS),
            block_size=BLOCK_SIZE,
            num_kv_blocks=NUM_BLOCKS,
            token_budget=48,  # less than a prompt: it comes in chunks, beside the tokens of those that run
            window=4,
            # One size of each, so that two steps are compiled and no more.
            row_buckets=(8,),
            mixed_row_buckets=(8,),
            token_buckets=(48,),
            width_buckets=(11,),
        )
        engine = Engine(params, config, settings)
        engine.warmup()

    live = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    moment: Moment | None = None

    def picture(moment: Moment) -> list[str]:
        columns, lines = shutil.get_terminal_size()
        return frame(moment, tokenizer.decode, columns, lines, colour="NO_COLOR" not in os.environ)

    with interrupts() as pressed:
        with screen() if live else contextlib.nullcontext() as draw:
            for moment in play(engine, tokenizer):
                if draw is not None:
                    draw(picture(moment))
                    time.sleep(options.pause)
                else:
                    for request_id in moment.changed:
                        print(change(moment, request_id), flush=True)
                if pressed():
                    break
        assert moment is not None
        # What was seen last stays.
        print("\n".join(picture(moment) if live else [f"pool: {pool_map(moment.snapshot)}", numbers(moment.snapshot)]), flush=True)
    if pressed():
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
