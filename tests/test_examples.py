"""Each example runs, on a tiny random model, as a user would run it."""

import importlib.util
from pathlib import Path

import pytest

from pagedjax.llm import LLM
from pagedjax.request import SamplingParams
from tests.tiny_model import write_model

EXAMPLES = Path(__file__).parent.parent / "examples"
PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("model")))


def run_example(name, *arguments):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(arguments)


def greedy_text(folder, num_tokens):
    (output,) = LLM(folder).generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=num_tokens), use_tqdm=False)
    return output.outputs[0].text


def test_every_example_has_a_test():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {"generate", "batch", "functional_step"}


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


@pytest.mark.parametrize("name", ["generate", "batch", "functional_step"])
def test_the_first_run_says_that_it_downloads(folder, capsys, monkeypatch, name):
    def demo_model(progress=lambda message, done, total: None):
        progress("downloading the demo model", 1, 2)
        return folder

    monkeypatch.setattr("pagedjax.checkpoint.demo_model", demo_model)
    monkeypatch.setattr("pagedjax.checkpoint.demo.demo_model", demo_model)
    run_example(name, "--max-tokens", "2")
    assert "downloading the demo model ..." in capsys.readouterr().err
