"""Hugging Face folders: what counts, what is read, and one clear error for each way that a folder can be broken."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from pagedjax.checkpoint import Checkpoint, CheckpointNotFoundError, FolderCheckpoint
from pagedjax.errors import CheckpointError, UnsupportedModelError

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
RNG = np.random.default_rng(0)
TENSORS = {
    "a.weight": RNG.standard_normal((3, 4), np.float32),
    "b.weight": RNG.standard_normal((2, 5), np.float32).astype(np.float16),
    "c.weight": RNG.standard_normal((7,), np.float32).astype(ml_dtypes.bfloat16),
    "d.weight": RNG.standard_normal((2, 2), np.float32).astype(ml_dtypes.float8_e4m3fn),
    "e.weight": RNG.standard_normal((2, 3), np.float32).astype(ml_dtypes.float8_e5m2),
    "f.count": np.array(3, np.int64),
    "g.empty": np.zeros((0, 4), np.float32),
}


def make_folder(path: Path, tensors: dict[str, np.ndarray] | None = None) -> Path:
    """A folder with one safetensors file."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG))
    save_file(TENSORS if tensors is None else tensors, path / "model.safetensors")
    return path


def make_sharded(path: Path, shards: dict[str, dict[str, np.ndarray]], weight_map: dict[str, str] | None = None) -> Path:
    """A folder with shards and an index, by default one that assigns each tensor to the file that holds it."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG))
    for name, tensors in shards.items():
        save_file(tensors, path / name)
    if weight_map is None:
        weight_map = {name: shard for shard, tensors in shards.items() for name in tensors}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def filled(value: float) -> np.ndarray:
    return np.full((2, 2), value, np.float32)


def test_one_file_all_dtypes(tmp_path):
    with FolderCheckpoint(make_folder(tmp_path)) as checkpoint:
        assert isinstance(checkpoint, Checkpoint)
        assert checkpoint.source == str(tmp_path)
        assert checkpoint.config == CONFIG
        assert checkpoint.generation_config == {}
        assert checkpoint.names() == frozenset(TENSORS)
        for name, array in TENSORS.items():
            got = checkpoint.read(name)
            assert checkpoint.dtype(name) == got.dtype == array.dtype
            assert checkpoint.shape(name) == got.shape == array.shape
            assert got.tobytes() == array.tobytes()


def test_generation_config_is_read(tmp_path):
    make_folder(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    assert FolderCheckpoint(tmp_path).generation_config == {"eos_token_id": [2, 5]}


def test_arrays_do_not_depend_on_the_file(tmp_path):
    # Saving a new model over the file that is open must not change (or crash) what was read.
    with FolderCheckpoint(make_folder(tmp_path)) as checkpoint:
        array = checkpoint.read("a.weight")
    (tmp_path / "model.safetensors").write_bytes(b"")
    np.testing.assert_array_equal(array, TENSORS["a.weight"])
    array += 1


def test_opening_reads_the_header_only(tmp_path):
    # 64 GiB that exist only as a hole in the file: reading them would take minutes and all memory.
    make_folder(tmp_path)
    big = 64 << 30
    header = {
        "small": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "big": {"dtype": "F32", "shape": [big // 4], "data_offsets": [8, 8 + big]},
    }
    encoded = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded + np.array([1, 2], np.float32).tobytes())
        file.truncate(8 + len(encoded) + 8 + big)
    with FolderCheckpoint(tmp_path) as checkpoint:
        assert checkpoint.shape("big") == (big // 4,)
        np.testing.assert_array_equal(checkpoint.read("small"), [1, 2])


def test_shards(tmp_path):
    make_sharded(tmp_path, {"model-1.safetensors": {"a": filled(1)}, "model-2.safetensors": {"b": filled(2), "c": filled(3)}})
    with FolderCheckpoint(tmp_path) as checkpoint:
        assert checkpoint.names() == {"a", "b", "c"}
        assert [float(checkpoint.read(name)[0, 0]) for name in "abc"] == [1, 2, 3]


def test_the_index_decides_which_file_counts(tmp_path):
    shards = {"model-1.safetensors": {"a": filled(1), "b": filled(-1), "stray": filled(-1)}, "model-2.safetensors": {"b": filled(2)}}
    make_sharded(tmp_path, shards, {"a": "model-1.safetensors", "b": "model-2.safetensors"})
    save_file({"a": filled(-1)}, tmp_path / "model.safetensors")
    (tmp_path / "consolidated.safetensors").write_bytes(b"not opened")
    with FolderCheckpoint(tmp_path) as checkpoint:
        assert checkpoint.names() == {"a", "b"}
        assert float(checkpoint.read("a")[0, 0]) == 1
        assert float(checkpoint.read("b")[0, 0]) == 2
        with pytest.raises(CheckpointError, match="has no tensor 'stray'"):
            checkpoint.read("stray")


def test_a_tensor_that_its_shard_lacks(tmp_path):
    shards = {"model-1.safetensors": {"a": filled(1)}, "model-2.safetensors": {"b": filled(2), "x": filled(0)}}
    make_sharded(tmp_path, shards, {"a": "model-1.safetensors", "b": "model-2.safetensors", "x": "model-1.safetensors"})
    with pytest.raises(
        CheckpointError, match=r"model-1\.safetensors: lacks tensor 'x', which model\.safetensors\.index\.json places there$"
    ):
        FolderCheckpoint(tmp_path)
    make_sharded(tmp_path, shards, {"a": "model-2.safetensors", "x": "model-1.safetensors"})
    with pytest.raises(CheckpointError, match=r"model-2\.safetensors: lacks tensor 'a', .* and 1 more such tensors"):
        FolderCheckpoint(tmp_path)


def test_missing_shard(tmp_path):
    make_sharded(tmp_path, {"model-1.safetensors": {"a": filled(1)}, "model-2.safetensors": {"b": filled(2)}})
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-2\.safetensors: missing shard, which model\.safetensors\.index\.json names"):
        FolderCheckpoint(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 8, 100, -1])
def test_truncated_file(tmp_path, keep):
    path = make_folder(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: is cut short or damaged: .* \(the file has [\d,]+ bytes\)"):
        FolderCheckpoint(tmp_path)


def test_truncated_shard(tmp_path):
    make_sharded(tmp_path, {"model-1.safetensors": {"a": filled(1)}, "model-2.safetensors": {"b": filled(2)}})
    path = tmp_path / "model-2.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(CheckpointError, match=r"model-2\.safetensors: is cut short or damaged"):
        FolderCheckpoint(tmp_path)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"{", r"is not valid JSON \("),
        (b"\xff\xfe", r"is not valid JSON \("),
        (b"[1]", "holds a JSON list, not an object"),
        (b"[" * 100_000, "is not valid JSON"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_bad_json(tmp_path, name, content, match):
    make_folder(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.") + ": " + match):
        FolderCheckpoint(tmp_path)


@pytest.mark.parametrize("index", [{}, {"weight_map": []}, {"weight_map": {}}])
def test_index_without_weight_map(tmp_path, index):
    make_folder(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"index\.json: has no 'weight_map' object"):
        FolderCheckpoint(tmp_path)


@pytest.mark.parametrize("shard", ["../model.safetensors", "/etc/passwd", "..", "", 3, "a\\b"])
def test_index_stays_in_the_folder(tmp_path, shard):
    make_sharded(tmp_path, {}, {"a": shard})
    with pytest.raises(CheckpointError, match=r"tensor 'a' is assigned to .* which is not the name of a file in the folder"):
        FolderCheckpoint(tmp_path)


def test_missing_folder_config_and_weights(tmp_path):
    with pytest.raises(CheckpointNotFoundError, match="none: no such folder") as caught:
        FolderCheckpoint(tmp_path / "none")
    assert isinstance(caught.value, FileNotFoundError)
    with pytest.raises(CheckpointError, match=r"has no config\.json, so it is not a Hugging Face model folder"):
        FolderCheckpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"has neither model\.safetensors nor model\.safetensors\.index\.json$"):
        FolderCheckpoint(tmp_path)
    (tmp_path / "weights.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"has neither .* \(it has weights\.safetensors\)$"):
        FolderCheckpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="pickle files are not read: convert with"):
        FolderCheckpoint(tmp_path)


def test_a_folder_in_place_of_a_shard(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    make_sharded(tmp_path, {}, {"a": "shard.safetensors"})
    (tmp_path / "shard.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"shard\.safetensors: missing shard"):
        FolderCheckpoint(tmp_path)


def test_unreadable_files_are_our_error(tmp_path, monkeypatch):
    def refuse(self, *args, **kwargs):
        raise PermissionError(13, "Permission denied")

    make_folder(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", refuse)
        with pytest.raises(CheckpointError, match=r"config\.json: cannot be read \(Permission denied\)"):
            FolderCheckpoint(tmp_path)
    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(Path, "read_text", lambda self, encoding: "{}")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read \(Permission denied\)"):
        FolderCheckpoint(tmp_path)


def test_a_storage_type_that_is_not_built_is_named(tmp_path):
    make_folder(tmp_path)
    header = json.dumps({"scale": {"dtype": "F8_E8M0", "shape": [2], "data_offsets": [0, 2]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0")
    with pytest.raises(UnsupportedModelError, match=r"tensor 'scale' has safetensors dtype F8_E8M0, which is not built"):
        FolderCheckpoint(tmp_path)


def test_closed_and_unknown_tensor(tmp_path):
    checkpoint = FolderCheckpoint(make_folder(tmp_path))
    for method in (checkpoint.read, checkpoint.shape, checkpoint.dtype):
        with pytest.raises(CheckpointError, match="has no tensor 'nope'"):
            method("nope")
    checkpoint.close()
    checkpoint.close()
    with pytest.raises(CheckpointError, match="the checkpoint is closed"):
        checkpoint.read("a.weight")


def test_tokenizer_gets_the_folder(tmp_path, monkeypatch):
    text = types.ModuleType("pagedjax.text")
    text.Tokenizer = types.SimpleNamespace(from_folder=lambda path: ("tokenizer of", path))
    monkeypatch.setitem(sys.modules, "pagedjax.text", text)
    assert FolderCheckpoint(make_folder(tmp_path)).tokenizer() == ("tokenizer of", tmp_path)
