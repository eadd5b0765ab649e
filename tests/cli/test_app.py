import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import pagedjax

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["generate", "chat", "info", "demo"])
def test_help_lists_every_command(command, name):
    code, out, _ = command("--help")
    assert code == 0
    assert f"\n  {name} " in out
    code, out, _ = command(name, "--help")
    assert code == 0
    assert f"Usage: pagedjax {name}" in out


def test_no_command_shows_the_help(command):
    code, out, _ = command()
    assert code == 2
    assert "Usage: pagedjax" in out


def test_version(command):
    code, out, _ = command("--version")
    assert (code, out) == (0, f"pagedjax, version {pagedjax.__version__}\n")


def test_an_unknown_command_is_one_line(fails):
    assert "No such command 'generat'" in fails("generat")


def in_a_process(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "pagedjax", *arguments],
        cwd=ROOT,
        env=os.environ.copy(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_entry_point_and_module_are_the_same_command():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"pagedjax": "pagedjax.cli:main"}
    ran = in_a_process("--help")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.startswith("Usage: pagedjax")


def test_a_wrong_command_line_exits_2():
    ran = in_a_process("chat", "--bogus")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.startswith("pagedjax: error: No such option")
    assert ran.stderr.count("\n") == 1


def test_a_warning_is_one_line():
    program = r"import warnings; from pagedjax.cli import app; app.run = lambda _: warnings.warn('first\nsecond') or 0; app.main()"
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "pagedjax: warning: first second\n")
