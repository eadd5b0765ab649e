import io
import sys
import time

from pagedjax.cli.loading import progress_bars, working


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_one_bar_a_message(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress_bars("B", scale=True) as progress:
        progress("downloading", 0, 3000)
        progress("downloading", 1500, 3000)
        progress("downloading", 3000, 3000)
        progress("unpacking", 1, 1)
    shown = terminal.getvalue()
    assert shown.count("downloading:   0%") == 1
    assert "3.00k/3.00k" in shown
    assert "unpacking: 100%" in shown
    assert shown.count("\n") == 2


def test_a_file_gets_one_line_a_message(monkeypatch, capsys):
    with progress_bars("B") as progress:
        for done in range(4):
            progress("downloading", done, 3)
        progress("unpacking", 1, 1)
    assert capsys.readouterr().err == "downloading ...\nunpacking ...\n"


def test_a_bar_is_closed_when_the_work_fails(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    try:
        with progress_bars("B") as progress:
            progress("downloading", 1, 3)
            raise OSError
    except OSError:
        pass
    assert terminal.getvalue().endswith("\n")


def test_a_terminal_sees_the_seconds_pass(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with working("compiling"):
        while "/ compiling (0 s)" not in terminal.getvalue():
            time.sleep(0.01)
    assert terminal.getvalue().startswith("\r| compiling (0 s)\r/ compiling")
    assert terminal.getvalue().endswith("\r\033[K")


def test_a_file_sees_one_line_or_nothing(capsys):
    with working("compiling"):
        assert capsys.readouterr().err == "compiling ...\n"
    with working("compiling", lines=False):
        pass
    assert capsys.readouterr().err == ""
