"""The commands on a whole model: a folder on disk, no stand-in anywhere."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import pagedjax.checkpoint.safetensors_file
from pagedjax.cli.info import DeviceMemory, facts_of, machine_memory, size
from pagedjax.config import ModelConfig
from pagedjax.llm import LLM
from pagedjax.request import SamplingParams
from tests.host.gguf_files import write_gguf
from tests.tiny_model import CONFIG, write_model

# Embedding (tied); q, k and v, o, MLP and two norms of the one layer; final norm.
PARAMETERS = 258 * 32 + (32 * 32 + 2 * 16 * 32 + 32 * 32 + 3 * 32 * 48 + 2 * 32) + 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("model")))


def test_generate_is_what_the_library_says(command, folder):
    code, out, _ = command("generate", "--model", folder, "--prompt", "Hello", "--max-tokens", "5", "--json")
    assert code == 0
    answer = json.loads(out)
    (expected,) = LLM(folder).generate("Hello", SamplingParams(temperature=0.0, max_tokens=5), use_tqdm=False)
    assert answer["token_ids"] == expected.outputs[0].token_ids
    assert answer["text"] == expected.outputs[0].text
    assert answer["prompt_token_ids"] == expected.prompt_token_ids
    assert answer["finish_reason"] == expected.outputs[0].finish_reason
    assert answer["timings"]["decode_tokens_per_s"] > 0


def test_chat_streams_what_the_library_answers(command, folder):
    code, out, err = command("chat", "--model", folder, "--max-tokens", "5", stdin="Hello\n")
    assert code == 0, err
    params = SamplingParams(temperature=0.0, max_tokens=5)
    (expected,) = LLM(folder).chat([{"role": "user", "content": "Hello"}], params, use_tqdm=False)
    assert out == expected.outputs[0].text + "\n"


def test_a_conversation_outgrows_the_model_and_goes_on(command, folder):
    code, out, err = command("chat", "--model", folder, "--max-tokens", "2", stdin=f"{'x' * 300}\nHello\n")
    assert code == 0
    assert err.count("prompt has 3") == 1
    assert out.count("\n") >= 1


def test_chat_needs_a_template(fails, tmp_path):
    assert "no chat template" in fails("chat", "--model", str(write_model(tmp_path, chat_template=None)))


def test_info_for_people(command, folder):
    code, out, err = command("info", folder)
    assert (code, err) == (0, "")
    rows = dict(line.split(maxsplit=1) for line in out.splitlines() if not line.startswith(("longest", "KV", "would")))
    assert rows["attention"] == "4 query heads, 2 key/value heads of size 8"
    assert rows["parameters"] == f"{PARAMETERS:,}"
    assert "longest sequence  256 tokens" in out
    assert "KV cache          128 B a token, 32.8 kB a full sequence" in out
    assert "would fit         the weights and " in out


def test_info_for_programs(command, folder):
    code, out, _ = command("info", folder, "--json", "--dtype", "bfloat16", "--max-model-len", "100")
    assert code == 0
    facts = json.loads(out)
    assert facts["model"] == folder
    assert facts["parameters"] == PARAMETERS
    assert facts["weight_bytes"] == 2 * PARAMETERS
    # K and V, layers, KV heads, head size, bytes: on a CPU the cache of a bfloat16 model is float32.
    assert facts["kv_bytes_per_token"] == 2 * 1 * 2 * 8 * 4
    assert facts["config"]["max_model_len"] == 100
    assert 0 < facts["device_free_bytes"] <= facts["device_bytes"]


def test_info_reads_no_weight(command, folder, monkeypatch):
    def read(self, *arguments):
        raise AssertionError("a weight was read")

    monkeypatch.setattr(pagedjax.checkpoint.safetensors_file.SafetensorsFile, "read", read)
    assert command("info", folder)[0] == 0


def test_what_fits_by_hand():
    # 64 bytes of KV cache a token (128 on a CPU, in float32), 256 tokens a sequence.
    config = ModelConfig.from_hf(CONFIG, dtype="bfloat16")

    def fits(platform, usable):
        facts = facts_of(config, DeviceMemory("x", platform, 10**12, 10**12, usable))
        return facts["kv_tokens_that_fit"], facts["sequences_that_fit"]

    assert fits("cpu", 2 * PARAMETERS + 128 * 600) == (600, 2)
    assert fits("gpu", 2 * PARAMETERS + 64 * 1000) == (1000, 3)
    assert fits("cpu", 10**12) == (2**30 // 128, 2**30 // 128 // 256)  # an LLM takes at most 1 GiB there unless told otherwise
    assert fits("gpu", 2 * PARAMETERS - 500) == (-8, 0)


def test_info_says_what_an_llm_takes(command, folder):
    facts = json.loads(command("info", folder, "--json")[1])
    model = LLM(folder)
    room = min(2**30, facts["device_free_bytes"] - facts["weight_bytes"])
    assert facts["kv_tokens_that_fit"] == room // model.config.kv_bytes_per_token
    # This model is so small that less is enough: 256 sequences of 256 tokens.
    assert model.engine.num_kv_blocks * 16 == 256 * 256 < facts["kv_tokens_that_fit"]


def test_available_memory(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal:       25000000 kB\nMemFree:         1000 kB\nMemAvailable:    2000 kB\n")
    assert machine_memory(tmp_path / "meminfo")[1] == 2_048_000
    total, available = machine_memory(tmp_path / "absent")  # as where there is no /proc
    assert total == available > 10**8


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (269_030_016, "269 MB"), (999_600, "1 MB"), (2_471_645_184, "2.47 GB")],
)
def test_size(num_bytes, text):
    assert size(num_bytes) == text


@pytest.mark.parametrize("command_name", ["generate", "info"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("missing folder", "no such file or folder"),
        ("no weights", "safetensors"),
        ("unknown architecture", "architecture 'MysteryForCausalLM' is not built"),
        ("not JSON", "is not valid JSON"),
        ("missing shard", "model-00002-of-00002.safetensors"),
        ("missing tensors", "lacks 10 tensors: model.layers.0"),
        ("wrong shape", "tensor model.norm.weight has shape (31,); the config asks for (32,)"),
        ("integers", "tensor model.norm.weight has dtype int8; weights are floating point"),
        ("GGUF cut short", "m.gguf"),
    ],
)
def test_a_damaged_model_is_one_line(fails, tmp_path, command_name, damage, message):
    folder = write_model(tmp_path / "model")
    match damage:
        case "missing folder":
            folder = tmp_path / "no-such-model"
        case "no weights":
            (folder / "model.safetensors").unlink()
        case "unknown architecture":
            (folder / "config.json").write_text(json.dumps(CONFIG | {"architectures": ["MysteryForCausalLM"]}))
        case "not JSON":
            (folder / "config.json").write_text("{")
        case "missing shard":
            weights = {name: f"model-0000{1 + n % 2}-of-00002.safetensors" for n, name in enumerate(tensors(folder))}
            (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
            (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
        case "missing tensors":
            save_file({"model.embed_tokens.weight": tensors(folder)["model.embed_tokens.weight"]}, folder / "model.safetensors")
        case "wrong shape":
            save_file(tensors(folder) | {"model.norm.weight": np.zeros(31, np.float32)}, folder / "model.safetensors")
        case "integers":
            save_file(tensors(folder) | {"model.norm.weight": np.zeros(32, np.int8)}, folder / "model.safetensors")
        case "GGUF cut short":
            whole = write_gguf(tmp_path / "whole.gguf").read_bytes()
            folder = tmp_path / "m.gguf"
            folder.write_bytes(whole[: len(whole) - 200])
    arguments = ("--model", str(folder), "--prompt", "Hi") if command_name == "generate" else (str(folder),)
    assert message in fails(command_name, *arguments)


@pytest.mark.parametrize(
    ("damage", "message"),
    [("truncated", "model.safetensors"), ("no tokenizer", "no tokenizer.json"), ("too long", "max_model_len 257 exceeds")],
)
def test_a_model_that_does_not_load_is_one_line(fails, tmp_path, damage, message):
    folder = write_model(tmp_path)
    options = []
    match damage:
        case "truncated":
            whole = (folder / "model.safetensors").read_bytes()
            (folder / "model.safetensors").write_bytes(whole[:-100])
        case "no tokenizer":
            (folder / "tokenizer.json").unlink()
        case "too long":
            options = ["--max-model-len", "257"]
    assert message in fails("generate", "--model", str(folder), "--prompt", "Hi", *options)


@pytest.mark.parametrize(
    ("prompt", "message"), [("", "the prompt is empty"), ("x" * 300, "the prompt has 300 tokens; with max_model_len 256")]
)
def test_a_prompt_that_the_model_cannot_take_is_one_line(fails, folder, prompt, message):
    assert message in fails("generate", "--model", folder, "--prompt", prompt)


def test_extreme_settings(command, fails, folder):
    code, out, _ = command(
        "generate", "--model", folder, "--prompt", "Hi", "--top-k", "9999999999", "--temperature", "1", "--max-tokens", "3", "--json"
    )
    assert (code, len(json.loads(out)["token_ids"]) <= 3) == (0, True)
    assert "temperature is 1e+300; it must be" in fails("generate", "--model", folder, "--prompt", "Hi", "--temperature", "1e300")


def tensors(folder):
    return load_file(folder / "model.safetensors")


def test_the_demo_command(command, folder, monkeypatch):
    monkeypatch.setattr("pagedjax.checkpoint.demo.demo_model", lambda progress: folder)
    code, out, err = command("demo")
    assert code == 0
    assert "The capital of France is" in out
    assert "user: What is the capital of France?\nmodel: " in out
    assert "finish reason" in err
