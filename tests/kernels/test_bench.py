"""The benchmark's command on a CPU: what it measures, what it writes and what it refuses."""

import importlib.util
import json

import jax
import pytest

from pallas_kernels import bench
from pallas_kernels.paged_attention.mosaic_gpu import Tiling
from pallas_kernels.paged_attention.split import TileConfig
from pallas_kernels.tuning import shapes, tuner
from pallas_kernels.tuning.cases import Case, tables
from pallas_kernels.tuning.timing import Timing

SMALL = ["--only", "decode-h16", "--blocks", "64", "--bandwidth-bytes", str(1 << 20)]


@pytest.mark.parametrize("implementation", ["reference", "pallas_triton_interpret"])
def test_a_small_run_prints_and_writes_what_it_measured(tmp_path, capsys, implementation):
    file = tmp_path / "bench.jsonl"
    assert bench.main([*SMALL, "--implementation", implementation, "--json", str(file)]) == 0
    header, record = (json.loads(line) for line in file.read_text().splitlines())
    assert header["versions"]["jax"] == jax.__version__
    assert header["command"].startswith("python -m pallas_kernels.bench --only decode-h16")
    assert set(header["terabytes_per_second"]) == {"read", "copy"}
    assert record["shape"] == "decode-h16-2x40-z8-n4k2-float32"
    assert record["implementation"] == implementation
    assert record["error"] < 1e-5
    assert record["us"] == sorted(record["us_rounds"])[1]
    assert record["GB_per_s"] == pytest.approx(record["bytes"] / record["us"] / 1e3, rel=1e-3)
    assert record["fraction_of_read"] == pytest.approx(record["GB_per_s"] / 1e3 / header["terabytes_per_second"]["read"])
    out = capsys.readouterr().out
    assert record["shape"] in out
    assert header["device"] in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "nothing"], "--only: no shape's name contains 'nothing'; --list shows the names"),
        (["--implementation", "foo"], "--implementation: no op has 'foo'; there are reference, pallas_triton"),
        (["--blocks", "1"], "--blocks must be at least 2, got 1"),
        (["--bandwidth-bytes", "7"], "--bandwidth-bytes must be at least 1048576, got 7"),
        (["--repeat", "0"], "--repeat must be at least 1, got 0"),
        (["--json", "no-such-folder/x.json"], "--json: there is no folder 'no-such-folder' to write x.json into"),
        (
            ["--only", "decode-h16", "--blocks", "2", "--bandwidth-bytes", "1048576"],
            "--blocks 2 is too few: 2 rows of 5 blocks need 10 blocks, the pool has 3",
        ),
    ],
)
def test_what_it_refuses(capsys, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        bench.main(arguments)
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="asks for what a CPU cannot do")
def test_what_it_refuses_without_a_gpu(capsys, tmp_path):
    for arguments, message in (
        (["--implementation", "mosaic_gpu"], "mosaic_gpu does not run on cpu: it needs a Hopper GPU"),
        (["--tune", str(tmp_path / "x.json")], "--tune: there is nothing to tune about what runs here"),
    ):
        with pytest.raises(SystemExit, match="2"):
            bench.main(arguments)
        assert message in capsys.readouterr().err.splitlines()[-1]


def test_plot_needs_matplotlib(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        bench.main([*SMALL, "--plot", str(tmp_path / "x.png")])
    assert "--plot needs matplotlib; pip install matplotlib" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
def test_plot_draws_a_panel_for_each_head_size_and_implementation(tmp_path):
    records = [
        {"shape": f"decode-h{head}-{batch}x{context}", "implementation": "mosaic_gpu", "fraction_of_read": 0.5}
        for head in (64, 128)
        for batch in (1, 8)
        for context in (512, 2048)
    ]
    header = {"device": "a card", "versions": {"jax": "1"}, "date": "2026-01-01"}
    bench.plot(records, header, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_the_table_holds_the_shapes_that_the_readme_names():
    names = {shape.name for shape in shapes.named("")}
    assert {"decode-h64-128x2048", "decode-h128-1x65536", "decode-h128-64xragged", "decode-h64-8x2048-z128"} <= names
    assert {"write-h128-8192", "prefill-h128-64x128+1024", "mixed-h128-64x2048-and-1x2048+0"} <= names
    assert len(names) == len(shapes.named(""))


def test_bytes_count_what_the_op_must_move_once():
    shape = shapes.DecodeShape(2, 20, 64)
    assert shape.table_width == 2
    assert shape.bytes_needed == 2 * 2 * (2 * 20 * 8 * 64 + 2 * 32 * 64) + 2 * 2 * 4


def test_tables_use_each_block_once_until_the_pool_is_used_up():
    made = tables(num_blocks=13, rows=2, width=3, count=4)
    first = [set(map(int, table.ravel())) for table in made]
    assert all(len(ids) == 6 and 0 not in ids for ids in first)
    assert not first[0] & first[1]


def test_a_timing_is_the_median_and_a_span_holds_the_gaps():
    timing = Timing((3.0, 1.0, 2.0), "device", ("a", "b"), (4.0, 5.0, 3.0))
    assert (timing.us, timing.span_us) == (2.0, 4.0)
    assert Timing((3.0, 1.0, 2.0), "host").span_us == 2.0


def test_the_tuner_takes_the_least_geometric_mean_and_keeps_other_settings(tmp_path, monkeypatch):
    def case(shape, implementation, pools, config):
        us = {Tiling(64, 8): 4.0, Tiling(128, 8): 1.0}.get(config, 9.0) if implementation == "mosaic_gpu" else config.tile + config.chunk
        return Case(shape.name, implementation, lambda i: us, calls=1)

    monkeypatch.setattr(tuner, "measure", lambda cells, calls: [Timing((cell(0),), "device") for cell in cells])
    monkeypatch.setattr(tuner, "decode_case", case)
    monkeypatch.setattr(tuner, "with_settings", lambda implementation, config: config)
    found = tuner.tune((64, 128), ("mosaic_gpu", "pallas_triton"), None, lambda line: None)
    for entry in found["paged_attention"]["mosaic_gpu"]:
        assert Tiling(**entry["config"]) == Tiling(128, 8)
    for entry in found["paged_attention"]["pallas_triton"]:
        best = TileConfig(**entry["config"])
        assert (best.tile, best.direct, best.chunk) == (32, 512, 256)
    path = tmp_path / "card.json"
    path.write_text(json.dumps({"settings": {"paged_attention": {"jax_triton": [1]}, "other": {}}}))
    tuner.write_table(path, {"device": "a card"}, found)
    written = json.loads(path.read_text())
    assert written["device"] == "a card"
    assert set(written["settings"]["paged_attention"]) == {"jax_triton", "mosaic_gpu", "pallas_triton"}
    assert written["settings"]["other"] == {}


@pytest.mark.parametrize(
    ("shape", "implementation"),
    [
        ("matmul-small-1", "reference"),
        ("matmul-small-3", "pallas_triton_interpret"),
        ("rope-h16", "reference"),
        ("rope-h16", "pallas_triton_interpret"),
    ],
)
def test_the_other_ops_of_a_decode_step(tmp_path, shape, implementation):
    file = tmp_path / "bench.jsonl"
    arguments = ["--only", shape, "--blocks", "64", "--bandwidth-bytes", str(1 << 20), "--repeat", "1"]
    assert bench.main([*arguments, "--implementation", implementation, "--json", str(file)]) == 0
    _, record = map(json.loads, file.read_text().splitlines())
    assert record["implementation"] == implementation and record["shape"].startswith(shape)
    assert record["error"] < 2**-8 and record["us"] > 0  # one rounding to bfloat16
    if shape.startswith("matmul"):
        assert record["bytes"] == 2 * 2 * 64 * 128


def test_settings_of_skinny_matmul_are_raced(monkeypatch):
    raced = []

    def measure(cells, calls):
        for cell in cells[:2]:
            jax.block_until_ready(cell(0))
        raced.append(len(cells))
        return [Timing((float(1 + (i - 3) ** 2),), "device") for i in range(len(cells))]

    monkeypatch.setattr(tuner, "measure", measure)
    said = []
    found = tuner.tune_matmul(said.append, (shapes.MatmulShape("small", 3),))
    (entry,) = found["skinny_matmul"]["pallas_triton"]
    assert entry["match"] == dict(num_rows=4, num_inputs=128, num_outputs=64, gate_up=1, itemsize=2)
    assert (
        entry["us"] == 1.0 and raced[0] > 10 and set(entry["config"]) == {"rows", "tile_k", "fold", "by_number", "num_warps", "num_stages"}
    )
    assert "matmul-small-3: " in said[0] and "by the heuristic 10.00 us" in said[0]


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="asks for what a CPU cannot do")
def test_tuning_skinny_matmul_needs_a_gpu(capsys, tmp_path):
    with pytest.raises(SystemExit, match="2"):
        bench.main(["--tune", str(tmp_path / "x.json"), "--tune-op", "skinny_matmul"])
    assert "--tune: skinny_matmul's pallas_triton does not run here: it needs an NVIDIA GPU" in capsys.readouterr().err
