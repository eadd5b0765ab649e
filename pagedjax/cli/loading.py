"""From ``--model`` to an `LLM`, with a progress bar on what is slow."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from tqdm import tqdm

    from pagedjax.llm import LLM

Progress = Callable[[str, int, int], None]


@contextlib.contextmanager
def progress_bars(unit: str, *, scale: bool = False, lines: bool = True) -> Iterator[Progress]:
    """One bar on stderr for each message of a ``progress(message, done, total)``.

    Args:
      unit: of the counts.
      scale: write counts as k, M, G.
      lines: where stderr is no terminal, write one line for each message; without, write nothing there.
    """
    from tqdm import tqdm

    bar: tqdm | None = None
    shown: str | None = None

    def update(message: str, done: int, total: int) -> None:
        nonlocal bar, shown
        if message != shown:
            shown = message
            if bar is not None:
                bar.close()
            if sys.stderr.isatty():
                bar = tqdm(total=total, desc=message, unit=unit, unit_scale=scale, unit_divisor=1000)
            elif lines:
                click.echo(f"{message} ...", err=True)
        if bar is not None:
            bar.update(done - bar.n)

    try:
        yield update
    finally:
        if bar is not None:
            bar.close()


@contextlib.contextmanager
def working(message: str, *, lines: bool = True) -> Iterator[None]:
    """Show on stderr that something of unknown length goes on: on a terminal with the seconds so far, erased at the end.

    Args:
      message: what goes on.
      lines: where stderr is no terminal, write one line; without, write nothing there.
    """
    stderr = sys.stderr
    if not stderr.isatty():
        if lines:
            click.echo(f"{message} ...", err=True)
        yield
        return
    started, over = time.monotonic(), threading.Event()

    def draw() -> None:
        for mark in itertools.cycle("|/-\\"):
            stderr.write(f"\r{mark} {message} ({time.monotonic() - started:.0f} s)")
            stderr.flush()
            if over.wait(0.2):
                return

    drawer = threading.Thread(target=draw, name="working", daemon=True)
    drawer.start()
    try:
        yield
    finally:
        over.set()
        drawer.join()
        stderr.write("\r\033[K")
        stderr.flush()


def resolve_model(model: str | None) -> str | Path:
    """The model that the user named, or the demo model, downloaded when it is not there yet."""
    if model is not None:
        return model
    from pagedjax.checkpoint.demo import demo_model

    with progress_bars("B", scale=True) as progress:
        return demo_model(progress)


def load(path: str | Path, *, dtype: str, max_model_len: int | None, seed: int = 0, **options: Any) -> LLM:
    """Load what `resolve_model` gave; see `LLM` for the arguments, further `options` among them, and errors."""
    from pagedjax.llm import LLM

    # Seconds only: a script that reads stderr gets the errors and nothing else.
    with progress_bars("tensor", lines=False) as progress:
        return LLM(
            path,
            dtype=dtype,
            max_model_len=max_model_len,
            seed=seed,
            progress=lambda done, total: progress("loading weights", done, total),
            **options,
        )
