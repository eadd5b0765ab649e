"""`pagedjax bench`: what it prints and writes, and what it refuses before anything slow happens."""

import importlib.util
import json

import jax
import pytest

from pagedjax.bench import report
from tests.tiny_model import write_model

SMALL = ("--max-num-seqs", "4", "--token-budget", "64", "--max-model-len", "64", "--kv-blocks", "64")
HEAD = {"device": "a device", "versions": {"jax": "1"}, "date": "2026-01-02", "model": "m", "dtype": "bfloat16", "command": "c"}


@pytest.fixture(autouse=True)
def small_limits(monkeypatch):
    from pagedjax.bench import roofline

    monkeypatch.setattr(roofline, "measure_limits", lambda dtype: roofline.Limits(2e9, 3e10))


def test_throughput_of_a_shape(command, tmp_path):
    file = tmp_path / "out.jsonl"
    arguments = ["--shape", "tiny", "--batch", "1,3", "--prompt-len", "9", "--output-len", "6", "--repeat", "2", "--json", str(file)]
    code, out, err = command("bench", "throughput", *arguments, *SMALL)
    assert code == 0, err
    head, first, second = map(json.loads, file.read_text().splitlines())
    assert (head["model"], head["dtype"], head["num_kv_blocks"], head["max_model_len"]) == ("tiny", "bfloat16", 64, 64)
    assert head["versions"]["jax"] == jax.__version__ and head["date"] and head["device"] and "command" in head
    assert (head["copy_bytes_per_s"], head["matmul_flops_per_s"]) == (2e9, 3e10)
    assert [(r["batch"], r["output_tokens"], len(r["tokens_per_s_all"])) for r in (first, second)] == [(1, 6, 2), (3, 18, 2)]
    lines = out.splitlines()
    assert lines[0].startswith(head["device"]) and f"jax {jax.__version__}" in lines[0]
    assert "measured here: copy 0.002 TB/s, matmul 0.03 TFLOP/s" in out
    table = lines[lines.index("") + 1 :]
    assert table[0].split()[:3] == ["workload", "tokens/s", "spread"] and "of roofline" in table[0] and "first token, ms" in table[0]
    assert table[1].startswith("1 x 9 + 6 ") and table[2].startswith("3 x 9 + 6 ") and len(table) == 3
    assert report.number(first["tokens_per_s"]) in table[1]


def test_latency_and_mixed_of_a_folder(command, tmp_path):
    folder = write_model(tmp_path / "model")
    code, out, err = command("bench", "latency", "--model", str(folder), "--prompt-len", "9", "--output-len", "6", "--repeat", "2", *SMALL)
    assert code == 0, err
    assert "model, float32, 64 KV blocks; ready in" in out and "1 x 9 + 6" in out and "per token, ms" in out


def test_plots(tmp_path):
    records = [{"what": "a" * 60, "n": 3.0, "limit": 4.0}, {"what": "b", "n": 41500.0, "limit": 60000.0}]
    for name, limit in (("with.png", "limit"), ("without.png", None)):
        report.plot_bars(tmp_path / name, HEAD, records, label="what", value="n", unit="things", limit=limit)
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "with.png").read_bytes() != (tmp_path / "without.png").read_bytes()


def test_tables_leave_empty_columns_out():
    columns = (("name", "name", str), ("a", "a", report.number), ("b", "b", report.percent), ("c", "c", str))
    assert report.table([{"name": "x", "a": 41500.4}, {"name": "long", "b": 0.125}], columns) == (
        "name       a       b\nx     41,500\nlong          12.5 %"
    )


@pytest.mark.parametrize(
    ("value", "text"), [(41500.4, "41,500"), (312.4, "312"), (41.234, "41.2"), (4.1834, "4.18"), (0.03123, "0.0312"), (0, "0")]
)
def test_numbers(value, text):
    assert report.number(value) == text


def test_no_nan_reaches_json(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        report.write_json(tmp_path / "x", HEAD, [{"tokens_per_s": float("nan")}])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("throughput", "--shape", "tiny", "--model", "x"), "--model and --shape are two ways"),
        (("throughput", "--shape", "huge"), "shape is 'huge'; there are llama-3.2-1b"),
        (("throughput", "--shape", "tiny", "--batch", "1,x"), "'1,x' is not one or more positive integers, such as 1,8,64"),
        (("throughput", "--shape", "tiny", "--batch", "0"), "'0' is not one or more positive integers"),
        (("throughput", "--shape", "tiny", "--temperature", "-1"), "temperature is -1.0"),
        (("throughput", "--shape", "tiny", "--repeat", "0"), "Invalid value for '--repeat'"),
        (
            ("latency", "--shape", "tiny", "--prompt-len", "3000"),
            "up to 3256 tokens of prompt and answer; max_model_len is 2048",
        ),
        (
            ("mixed", "--shape", "tiny", "--max-model-len", "100"),
            "up to 1536 tokens of prompt and answer; max_model_len is 100",
        ),
        (
            ("mixed", "--shape", "tiny", "--json", "no/such/folder/x.json"),
            "--json: there is no folder 'no/such/folder' to write x.json",
        ),
        (("mixed", "--shape", "tiny", "--plot", "no/such/folder/x.png"), "--plot: there is no folder"),
        (("mixed", "--shape", "tiny", "--gpu-memory-utilization", "2"), "gpu_memory_utilization is 2"),
        (("mixed", "--shape", "tiny", "--fused-decode-rows", "4"), "fused_decode_rows is 4, but windows of 1 rows can't be fused: "),
        (("latency", "--model", "no/such/model"), "no/such/model"),
    ],
)
def test_what_cannot_be_measured_is_said_in_a_line(fails, arguments, message):
    assert message in fails("bench", *arguments)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="a GPU has a profile")
def test_kernels_need_a_gpu(fails):
    assert "read off a GPU's profile; JAX runs on cpu here" in fails("bench", "kernels", "--shape", "tiny")


def test_a_plot_needs_matplotlib(fails, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "--plot needs matplotlib: pip install 'pagedjax[bench]'" in fails("bench", "mixed", "--shape", "tiny", "--plot", "x.png")
