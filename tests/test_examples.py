"""Each example runs, on a tiny random model, as a user would run it."""

import importlib.util
import warnings
from pathlib import Path

import pytest

from pagedjax.llm import LLM
from pagedjax.request import SamplingParams
from tests.tiny_model import write_model

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("model")))


def run_example(path, *arguments):
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(arguments)


def greedy_text(folder, num_tokens):
    (output,) = LLM(folder).generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=num_tokens), use_tqdm=False)
    return output.outputs[0].text


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_it_runs(path, folder, capsys):
    with warnings.catch_warnings(action="error"):
        run_example(path, "--model", folder, "--max-tokens", "4")
    assert capsys.readouterr().out.strip()


def test_generate_completes_the_prompt(folder, capsys):
    run_example(EXAMPLES[0].with_stem("generate"), "--model", folder, "--max-tokens", "4")
    assert capsys.readouterr().out.startswith(PROMPT + greedy_text(folder, 4))


def test_batch_equals_alone(folder, capsys):
    run_example(EXAMPLES[0].with_stem("batch"), "--model", folder, "--max-tokens", "8")
    assert "3 of 3 answers are the same alone" in capsys.readouterr().out


def test_the_hand_made_table_gives_what_the_library_gives(folder, capsys):
    """Across a block border: 24 bytes of prompt and 12 new tokens, in blocks of 16."""
    run_example(EXAMPLES[0].with_stem("functional_step"), "--model", folder, "--max-tokens", "12")
    out = capsys.readouterr().out
    assert out.startswith(PROMPT + greedy_text(folder, 12))
    assert "(in physical blocks [5, 2, 7] of a pool (8, 2, 16, 8) a layer)" in out


def test_the_hand_made_table_has_an_end(folder, capsys):
    with pytest.raises(SystemExit, match="2"):
        run_example(EXAMPLES[0].with_stem("functional_step"), "--model", folder, "--prompt", "x" * 64)
    assert "the prompt has 64 tokens; the blocks hold 64" in capsys.readouterr().err
