"""Ctrl-C, for a program whose main thread is mostly inside JAX.

A `KeyboardInterrupt` there can land in one of JAX's callbacks, where Python prints and forgets it, or leave JAX in a state that
crashes the interpreter's shutdown (seen with jax 0.10.2: jit, SIGINT, ``sys.exit``). Nor does a handler written in Python run before a
compilation, which takes seconds, is over. So around JAX no handler here raises: a thread hears of each press at once and leaves the
process without a shutdown, or the work looks at a flag between two dispatches and stops by itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

EXIT_INTERRUPTED = 130  # 128 + SIGINT, what shells report
_FLUSH_S = 1.0  # a terminal that was halted with Ctrl-S takes no output, and must not keep the process alive


def leave(exit_code: int = EXIT_INTERRUPTED) -> NoReturn:
    """End the process now: what was printed is flushed, but nothing else of the interpreter's shutdown runs."""
    flushing = threading.Thread(target=_flush, daemon=True)
    flushing.start()
    flushing.join(_FLUSH_S)
    os._exit(exit_code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, RuntimeError):  # a closed pipe, a closed stream, a write that we are inside of
            stream.flush()


def _say(text: bytes) -> None:
    with contextlib.suppress(OSError):
        os.write(2, text)  # at once, past whatever is being printed


@contextlib.contextmanager
def leaving_on_interrupt() -> Iterator[None]:
    """Inside, Ctrl-C ends the process with exit code 130. Nothing that needs cleaning up may run inside."""

    def press() -> None:
        if sys.stderr.isatty():
            _say(b"\n")  # the shell's prompt goes below a half-drawn bar
        leave()

    with _hearing(press, lambda: None):
        yield


class Interrupts:
    """Ctrl-C in a conversation: stops an answer between two dispatches, drops a half-typed line, never lands in JAX.

    Use `watching` around the conversation and, inside, `answering` around each answer and `prompting` around each read of a line.
    """

    LEAVE_AT = 3
    """The press during one answer that ends the process, for a user who does not want to wait for a dispatch (or a compilation)."""

    def __init__(self) -> None:
        self._pressed = self._raises = False
        self._presses: int | None = None  # during this answer; None outside of one

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Handle Ctrl-C until the block is left."""
        with _hearing(self._hear, self._handle):
            yield

    @contextlib.contextmanager
    def answering(self) -> Iterator[Callable[[], bool]]:
        """Yields a function that tells whether the answer is to be stopped."""
        self._pressed, self._presses = False, 0
        try:
            yield lambda: self._pressed
        finally:
            self._pressed, self._presses = False, None

    @contextlib.contextmanager
    def prompting(self) -> Iterator[None]:
        """Inside, Ctrl-C raises `KeyboardInterrupt`: for reading a line and nothing else. A press just before counts too."""
        self._raises = True
        try:
            if self._pressed:
                raise KeyboardInterrupt
            yield
        finally:
            self._raises = self._pressed = False

    def _hear(self) -> None:
        """On the listening thread, at once."""
        if self._presses is None:
            return
        self._presses += 1
        if self._presses == 1:
            _say(b" [stopping]")
        elif self._presses == self.LEAVE_AT:
            _say(b"\n")
            leave()

    def _handle(self) -> None:
        """On the main thread, between two of its instructions."""
        if self._raises:
            raise KeyboardInterrupt
        self._pressed = True


@contextlib.contextmanager
def _hearing(hear: Callable[[], None], handle: Callable[[], None]) -> Iterator[None]:
    """Inside, each SIGINT calls `hear` on a thread of its own, at once, and `handle` on the main thread, when that is back in Python."""

    def on_signal(signum: int, frame: FrameType | None) -> None:
        handle()

    def listen() -> None:
        while data := os.read(read_end, 64):  # a byte a signal; ends when the other end is closed
            for number in data:
                if number == signal.SIGINT:
                    hear()

    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    listener = threading.Thread(target=listen, name="ctrl-c", daemon=True)
    listener.start()
    handler_before = signal.signal(signal.SIGINT, on_signal)
    descriptor_before = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(descriptor_before)
        signal.signal(signal.SIGINT, handler_before)
        os.close(write_end)
        listener.join()
        os.close(read_end)
