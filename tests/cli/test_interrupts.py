"""Real SIGINTs to real processes: at whatever moment of JAX's work they come, nothing crashes, is lost or is printed."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.tiny_model import CONFIG, write_model

ROOT = Path(__file__).parents[2]
PREFILL_COMPILES, PREFILL_COMPILED = "Compiling jit(mixed_step)", "Finished XLA compilation of jit(mixed_step)"
DECODE_COMPILES, DECODE_COMPILED = "Compiling jit(decode_window)", "Finished XLA compilation of jit(decode_window)"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("model"))
    (folder / "config.json").write_text(json.dumps(CONFIG | {"max_position_embeddings": 32768}))  # long enough to be interrupted
    return str(folder)


class Command:
    """A running command. JAX's log of compilations on stderr tells how far it is."""

    def __init__(self, *arguments):
        environment = os.environ | {"JAX_LOG_COMPILES": "1"}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pagedjax", *arguments], cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True
        )
        self.seen = []

    def type(self, text):
        self.process.stdin.write(text)
        self.process.stdin.flush()

    def wait_for(self, text):
        too_long = threading.Timer(120, self.process.kill)
        too_long.start()
        try:
            while line := self.process.stderr.readline():
                self.seen.append(line)
                if text in line:
                    return
        finally:
            too_long.cancel()
        raise AssertionError(f"ended without {text!r}: {self.seen}")

    def interrupt(self):
        self.process.send_signal(signal.SIGINT)
        time.sleep(0.05)  # signals that are still pending would become one

    def end(self):
        """Wait for its end; exit code, stdout and stderr."""
        try:
            out, err = self.process.communicate(timeout=120)
        finally:
            self.process.kill()
        said = "".join([*self.seen, err])
        for word in ("Traceback", "Fatal", "KeyboardInterrupt", "ignored"):
            assert word not in said, said
        return self.process.returncode, out, said


@pytest.mark.parametrize(
    ("moment", "never"),
    [
        (PREFILL_COMPILES, PREFILL_COMPILED),
        (DECODE_COMPILES, DECODE_COMPILED),
        (DECODE_COMPILED, "finish reason"),
    ],
)
def test_generate_leaves_at_once(folder, moment, never):
    command = Command("generate", "--model", folder, "--prompt", "Hello", "--max-tokens", "30000", "--ignore-eos")
    command.wait_for(moment)
    command.interrupt()
    code, out, said = command.end()
    assert (code, out) == (130, "")
    assert never not in said


def test_chat_stops_the_answer_between_dispatches_and_goes_on(folder):
    command = Command("chat", "--model", folder, "--max-tokens", "100")
    command.type("Hello\n")
    command.wait_for(PREFILL_COMPILES)
    command.interrupt()
    command.interrupt()
    command.type("/help\n")
    command.process.stdin.close()
    command.process.stdin = None
    code, out, said = command.end()
    assert code == 0
    assert "[stopping]" in said
    stopped, helped = out.splitlines()
    assert stopped.endswith(" [stopped]")
    assert "Ctrl-D leaves" in helped
    assert DECODE_COMPILES not in said  # stopped before the next dispatch


def test_third_interrupt_leaves_chat_without_waiting(folder):
    command = Command("chat", "--model", folder, "--max-tokens", "100")
    command.type("Hello\n")
    command.wait_for(PREFILL_COMPILES)
    for _ in range(3):
        command.interrupt()
    code, out, said = command.end()
    assert (code, out) == (130, "")
    assert PREFILL_COMPILED not in said


def test_interrupt_while_chat_waits_for_a_line_leaves(folder):
    """Where no terminal is there to be asked at; on one, the half-typed line is dropped and the conversation goes on."""
    command = Command("chat", "--model", folder, "--max-tokens", "3")
    command.type("Hello\n")
    command.wait_for(DECODE_COMPILED)
    assert command.process.stdout.readline()
    command.interrupt()
    code, out, _ = command.end()
    assert (code, out) == (130, "")
