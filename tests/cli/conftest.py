import io
import sys

import pytest

from pagedjax.cli import run
from tests.cli.stub import StubLLM


@pytest.fixture
def stub(monkeypatch):
    """`StubLLM` in the place of `LLM`, fresh for each test."""

    class Fresh(StubLLM):
        pass

    Fresh.made, Fresh.calls = {}, []
    monkeypatch.setattr("pagedjax.llm.LLM", Fresh)
    return Fresh


@pytest.fixture
def command(capsys, monkeypatch):
    """Runs one command line in this process: ``command("info", "x", stdin="...")`` gives (exit code, stdout, stderr)."""

    def call(*arguments, stdin=""):
        data = stdin if isinstance(stdin, bytes) else stdin.encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        code = run(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def fails(command):
    """Runs a command line that must fail as a wrong input does: exit code 2, nothing on stdout, one line on stderr, returned."""

    def call(*arguments, stdin=""):
        code, out, err = command(*arguments, stdin=stdin)
        lines = err.splitlines()
        assert (code, out, len(lines)) == (2, "", 1), (code, out, err)
        assert lines[0].startswith("pagedjax: error: ")
        return lines[0]

    return call
