import json
import os
import signal
import sys

import pytest

from pagedjax.cli import run
from pagedjax.errors import CheckpointError, RequestError, UnsupportedModelError


def test_text_on_stdout_and_everything_else_on_stderr(command, stub):
    code, out, err = command("generate", "--model", "some/model", "--prompt", "The capital of France is")
    assert (code, out) == (0, "Paris.\n")
    assert "[3 tokens, finish reason stop; loaded in 0.0 s, first token after 0.5 s, then 8.0 tokens/s]" in err
    assert "loading" not in err.split("[3 tokens")[0]  # a bar, and a bar only on a terminal


def test_json_is_one_object_on_stdout(command, stub):
    code, out, err = command("generate", "--model", "m", "--prompt", "Hi", "--json")
    assert code == 0
    assert out.count("\n") == 1
    answer = json.loads(out)
    timings = answer.pop("timings")
    assert answer == {"prompt": "Hi", "prompt_token_ids": [1, 2, 3], "text": "Paris.", "token_ids": [5, 6, 7], "finish_reason": "stop"}
    assert timings.pop("load_s") >= 0
    assert timings == {"prefill_s": 0.5, "decode_s": 0.25, "decode_tokens_per_s": 8.0, "compilation_included": True}
    assert "finish reason" not in err


def test_a_single_token_has_no_decode_speed(command, stub):
    stub.pieces = ("!",)
    code, out, _ = command("generate", "--model", "m", "--prompt", "Hi", "--json")
    assert code == 0
    assert json.loads(out)["timings"]["decode_tokens_per_s"] is None
    _, _, err = command("generate", "--model", "m", "--prompt", "Hi")
    assert "[1 token, finish reason stop; loaded in 0.0 s, first token after 0.5 s]" in err


def test_options_reach_the_model(command, stub):
    flags = "--dtype float32 --max-model-len 99 --max-tokens 7 --temperature 0.5 --top-k 4 --top-p 0.9 --seed 3 --ignore-eos"
    code, _, _ = command("generate", "--model", "m", "--prompt", "Hi", *flags.split())
    assert code == 0
    assert stub.made.items() >= {"model": "m", "dtype": "float32", "max_model_len": 99, "seed": 3}.items()
    ((prompts, params, use_tqdm),) = stub.calls
    assert (prompts, use_tqdm) == (["Hi"], False)
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p, params.seed) == (7, 0.5, 4, 0.9, 3)
    assert params.ignore_eos


def test_warm_up_runs_twice_and_says_so(command, stub):
    code, out, _ = command("generate", "--model", "m", "--prompt", "Hi", "--warm-up", "--json")
    assert code == 0
    assert len(stub.calls) == 2
    assert json.loads(out)["timings"]["compilation_included"] is False


@pytest.mark.parametrize(("stdin", "prompt"), [("Hi", "Hi"), ("Hi\n", "Hi"), ("Hi\n\n", "Hi\n"), ("zwölf ☃", "zwölf ☃")])
def test_prompt_from_stdin_loses_one_line_break(command, stub, stdin, prompt):
    code, _, _ = command("generate", "--model", "m", "--prompt", "-", stdin=stdin)
    assert code == 0
    assert stub.calls[0][0] == [prompt]


def test_without_a_model_the_demo_model_is_taken(command, stub, monkeypatch):
    def demo_model(progress):
        progress("downloading", 1, 2)
        progress("downloading", 2, 2)
        progress("unpacking", 2, 2)
        return "the demo model"

    monkeypatch.setattr("pagedjax.checkpoint.demo.demo_model", demo_model)
    code, _, err = command("generate", "--prompt", "Hi")
    assert code == 0
    assert stub.made["model"] == "the demo model"
    assert err.startswith("downloading ...\nunpacking ...\n[3 tokens")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--max-tokens 0", "max_tokens is 0"),
        ("--max-tokens -3", "max_tokens is -3"),
        ("--temperature nan", "temperature is nan"),
        ("--temperature -1", "temperature is -1.0"),
        ("--top-p 0", "top_p is 0.0"),
        ("--top-p 1.5", "top_p is 1.5"),
        ("--top-k -2", "top_k is -2"),
        ("--seed -1", "seed is -1"),
        ("--seed 4294967296", "seed is 4294967296"),
        ("--max-tokens many", "'many' is not a valid integer. (see pagedjax generate --help)"),
        ("--dtype int4", "'int4' is not one of"),
        ("--colour blue", "No such option '--colour'"),
    ],
)
def test_a_wrong_option_is_one_line_before_anything_loads(fails, stub, flags, message):
    assert message in fails("generate", "--model", "m", "--prompt", "Hi", *flags.split())
    assert stub.made == {}


def test_a_missing_prompt_is_one_line(fails, stub):
    assert "Missing option '-p' / '--prompt'" in fails("generate")


def test_a_prompt_that_is_not_unicode_is_one_line(fails, stub):
    assert "the prompt is not valid UTF-8" in fails("generate", "--model", "m", "--prompt", "-", stdin=b"\xff\xfe")
    assert "the prompt is not valid UTF-8" in fails("generate", "--model", "m", "--prompt", "a\udcff")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (CheckpointError("x.gguf: is cut\nshort"), "pagedjax: error: x.gguf: is cut short"),
        (UnsupportedModelError("architecture 'X' is not built"), "pagedjax: error: architecture 'X' is not built"),
        (FileNotFoundError(2, "No such file or directory", "/no/such"), "pagedjax: error: /no/such: No such file or directory"),
        (PermissionError(), "pagedjax: error: PermissionError"),
    ],
)
def test_a_model_that_does_not_load_is_one_line(fails, stub, error, line):
    stub.load_error = error
    assert fails("generate", "--model", "m", "--prompt", "Hi") == line


def test_a_prompt_that_the_model_refuses_is_one_line(fails, stub):
    stub.error = RequestError("a prompt is empty; it needs at least one token")
    assert "a prompt is empty" in fails("generate", "--model", "m", "--prompt", "")


def test_a_bug_keeps_its_traceback(command, stub):
    stub.error = ZeroDivisionError("ours")
    with pytest.raises(ZeroDivisionError, match="ours"):
        command("generate", "--model", "m", "--prompt", "Hi")


def test_interrupt_exits_130_and_says_nothing(command, stub):
    stub.load_error = KeyboardInterrupt()
    code, out, err = command("generate", "--model", "m", "--prompt", "Hi")
    assert (code, out) == (128 + signal.SIGINT, "")
    assert "Traceback" not in err
    assert "error" not in err


def test_a_closed_pipe_ends_quietly(stub, monkeypatch, capsys):
    read_end, write_end = os.pipe()
    os.close(read_end)
    with open(write_end, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert run(["generate", "--model", "m", "--prompt", "Hi"]) == 128 + signal.SIGPIPE
    assert "error" not in capsys.readouterr().err
