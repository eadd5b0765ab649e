"""Each example runs, on a tiny random model, as a user would run it."""

import importlib.util
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from pagedjax.llm import LLM
from pagedjax.request import SamplingParams
from tests.tiny_model import write_model

EXAMPLES = Path(__file__).parent.parent / "examples"
PROMPT = "The capital of France is"
ESCAPE = re.compile(r"\x1b\[[?;\d]*[A-Za-z]")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("model")))


def run_example(name, *arguments):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(arguments)
    return module


def greedy_text(folder, num_tokens):
    (output,) = LLM(folder).generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=num_tokens), use_tqdm=False)
    return output.outputs[0].text


def test_every_example_has_a_test():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {
        "generate",
        "batch",
        "functional_step",
        "continuous_batching",
        "prefix_sharing",
    }


def test_generate_completes_the_prompt(folder, capsys):
    run_example("generate", "--model", folder, "--max-tokens", "12")
    completed, summary, _chat = capsys.readouterr().out.rsplit("\n", 3)[:3]
    assert completed == PROMPT + greedy_text(folder, 12)
    assert summary.startswith("(24 tokens in, ")


def test_batch_equals_alone(folder, capsys):
    run_example("batch", "--model", folder, "--max-tokens", "12")
    out = capsys.readouterr().out
    assert f"{PROMPT!r} -> {greedy_text(folder, 12)!r}" in out
    assert "log-probability -" in out
    assert "3 of 3 answers are the same alone" in out


def test_the_hand_made_table_gives_what_the_library_gives(folder, capsys):
    """Across a block border: 24 bytes of prompt and 12 new tokens, in blocks of 16."""
    run_example("functional_step", "--model", folder, "--max-tokens", "12")
    out = capsys.readouterr().out
    assert out.startswith(PROMPT + greedy_text(folder, 12))
    assert "(in physical blocks [5, 2, 7] of a pool (8, 2, 16, 8) a layer)" in out


def test_the_hand_made_table_has_an_end(folder, capsys):
    with pytest.raises(SystemExit, match="2"):
        run_example("functional_step", "--model", folder, "--prompt", "x" * 64)
    assert "the prompt has 64 tokens; the blocks hold 64" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", ""], "the prompt is empty"),
        (["--max-tokens", "0"], "--max-tokens is 0; it must be at least 1"),
    ],
)
def test_a_step_needs_a_token_and_makes_one(folder, capsys, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        run_example("functional_step", "--model", folder, *arguments)
    assert message in capsys.readouterr().err


def test_the_pool_fills_is_shared_and_drains(folder, capsys):
    """Where stdout is no terminal: a line for each change of a request's state."""
    example = run_example("continuous_batching", "--model", folder)
    out = capsys.readouterr().out
    assert "\x1b" not in out
    *changes, pool, numbers = out.splitlines()
    states, given, cached, pools = {}, {}, {}, []
    for line in changes:
        found = re.fullmatch(r"step +\d+  request +(\d+) (\w+) +\d+ prompt tokens, (\d+) from the cache, (\d+) new  \(pool: (.*)\)", line)
        assert found, line
        request, state, from_cache, new, counts = found.groups()
        states.setdefault(int(request), []).append(state)
        cached[int(request)], given[int(request)] = int(from_cache), int(new)
        pools.append({name: int(count) for count, name in (part.split() for part in counts.split(", "))})
    assert list(given.values()) == [num_tokens for *_, num_tokens in example.REQUESTS]
    for one in states.values():
        assert re.fullmatch("(waiting )?running( preempted running)*( finished)", " ".join(one)), one
    num_preemptions = sum(one.count("preempted") for one in states.values())
    assert num_preemptions >= 3
    assert f" {num_preemptions} preemptions " in numbers and numbers.endswith(f" {len(example.REQUESTS)} finished")
    assert list(cached.values()).count(example.START_TOKENS) >= 6  # all that a request has in common with those before
    assert all(sum(counts.values()) == example.NUM_BLOCKS for counts in pools)
    assert min(counts["free"] + counts["cached"] for counts in pools) == 0
    assert max(counts["shared"] for counts in pools) == 2 * example.START_TOKENS // example.BLOCK_SIZE
    assert re.fullmatch(r"pool: 0[+.]{26}", pool) and "+" in pool


def pretend_terminal(monkeypatch, columns=80, lines=24):
    """From within a test: between its fixtures and itself, pytest replaces stdout."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for name, value in {"COLUMNS": str(columns), "LINES": str(lines), "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)


def frames_and_rest(out):
    """What was drawn on the terminal's other screen, a list of lines for each frame, and what stays on the first one."""
    before, _, drawn = out.partition("\x1b[?1049h\x1b[?25l")
    drawn, end, rest = drawn.partition("\x1b[?25h\x1b[?1049l")
    assert end, "the terminal is left without its cursor or its screen"
    assert before == ""
    assert "\x1b[H" not in rest and "\x1b[?" not in rest
    return [ESCAPE.sub("", frame).split("\n") for frame in drawn.split("\x1b[H")[1:]], ESCAPE.sub("", rest).splitlines()


def test_the_view_fits_a_terminal_and_adds_up(folder, capsys, monkeypatch):
    pretend_terminal(monkeypatch)
    example = run_example("continuous_batching", "--model", folder, "--pause", "0")
    frames, rest = frames_and_rest(capsys.readouterr().out)
    assert rest == frames[-1]
    steps = [int(re.search(r"after step (\d+)$", frame[0]).group(1)) for frame in frames]
    assert steps == sorted(set(steps)) and len(steps) > 50
    seen = set()
    for frame in frames:
        assert len(frame) <= 24 and all(len(line) < 80 for line in frame)
        pool, legend = frame[2].strip(), frame[4]
        assert len(pool) == 1 + example.NUM_BLOCKS and pool.index("0") == pool.rindex("0") == 0
        counts = {name: int(re.search(rf"{re.escape(mark)} {name} (\d+)", legend).group(1)) for name, (mark, _) in example.LOOKS.items()}
        assert counts == {name: pool.count(mark) for name, (mark, _) in example.LOOKS.items()}
        requests = [re.match(r" +\d+  (\w+) +\d+ +\d+ +\d+/ *\d+ +(\d+)", line).groups() for line in frame[7:-2]]
        held = sum(int(num_blocks) for _, num_blocks in requests)
        assert held >= counts["used"] + 2 * counts["shared"] and (held == counts["used"] or counts["shared"])
        seen |= {state for state, _ in requests} | set(pool)
        assert re.fullmatch(r"  \d+ tokens/s   hit rate \d+ %   \d+ preemptions   \d+ dispatches   \d+ finished", frame[-1])
    assert seen == {"waiting", "running", "preempted", "finished", *"0.#@+"}


def test_a_small_terminal_shows_less(folder, capsys, monkeypatch):
    pretend_terminal(monkeypatch, columns=24, lines=14)
    run_example("continuous_batching", "--model", folder, "--pause", "0")
    frames, _ = frames_and_rest(capsys.readouterr().out)
    assert {len(frame) for frame in frames} >= {14} and max(len(frame) for frame in frames) == 14
    assert all(len(line) < 24 for frame in frames for line in frame)
    assert len(frames[-1][2] + frames[-1][3]) == 2 + 2 + 27  # the map in two lines


def test_an_interrupt_ends_the_view_between_two_steps(folder, capsys, monkeypatch):
    pretend_terminal(monkeypatch)
    num_pauses = 0

    def pause(_seconds):
        nonlocal num_pauses
        num_pauses += 1
        if num_pauses == 20:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(time, "sleep", pause)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit, match="130"):
        run_example("continuous_batching", "--model", folder)
    assert signal.getsignal(signal.SIGINT) is handler
    frames, rest = frames_and_rest(capsys.readouterr().out)
    assert len(frames) == 20
    assert rest == frames[-1]  # what was seen last stays


def test_a_pause_has_bounds(folder, capsys):
    with pytest.raises(SystemExit, match="2"):
        run_example("continuous_batching", "--model", folder, "--pause", "nan")
    assert "--pause is nan; it must be from 0 to 60 seconds" in capsys.readouterr().err


def test_a_shared_prefix_is_computed_once_and_changes_no_answer(folder, capsys):
    example = run_example("prefix_sharing", "--model", folder, "--max-tokens", "12")
    out = capsys.readouterr().out
    rows = re.findall(r"^  (.*?) +[\d.]+ ms +(\d+) of (\d+) tokens$", out, re.MULTILINE)
    assert [question for question, _, _ in rows] == 3 * list(example.QUESTIONS)
    cached, totals = [int(row[1]) for row in rows], [int(row[2]) for row in rows]
    n = len(example.QUESTIONS)
    assert cached[: n + 1] == [0] * (n + 1)  # without the cache, and the first one with it
    # The questions differ behind the system prompt, whose full blocks are shared by all of them.
    (shared,) = set(cached[n + 1 : 2 * n])
    assert shared >= 128 and shared % example.BLOCK_SIZE == 0
    # Asked again, only what is behind the last full block is computed, and at least one token.
    assert cached[2 * n :] == [(total - 1) // example.BLOCK_SIZE * example.BLOCK_SIZE for total in totals[2 * n :]]
    assert re.search(r"first token after [\d.]+ ms cold and [\d.]+ ms hot", out)
    assert f"{2 * n} of {2 * n} answers are the same as with the cache off" in out


def test_a_system_prompt_needs_room(folder, capsys):
    with pytest.raises(SystemExit, match="2"):
        run_example("prefix_sharing", "--model", folder, "--max-tokens", "200")
    assert "--max-tokens is 200; the model has room for 256 tokens in all" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("generate", ["--max-tokens", "2"]),
        ("batch", ["--max-tokens", "2"]),
        ("functional_step", ["--max-tokens", "2"]),
        # As above, so that nothing new is compiled.
        ("continuous_batching", []),
        ("prefix_sharing", ["--max-tokens", "12"]),
    ],
)
def test_the_first_run_says_that_it_downloads(folder, capsys, monkeypatch, name, arguments):
    def demo_model(progress=lambda message, done, total: None):
        progress("downloading the demo model", 1, 2)
        return folder

    monkeypatch.setattr("pagedjax.checkpoint.demo_model", demo_model)
    monkeypatch.setattr("pagedjax.checkpoint.demo.demo_model", demo_model)
    run_example(name, *arguments)
    assert "downloading the demo model ..." in capsys.readouterr().err
