"""What a path or an id stands for; the hub through a stand-in, so that no network is needed."""

from __future__ import annotations

import ast
import json
import types
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
from huggingface_hub import errors
from safetensors.numpy import save_file

import pagedjax.checkpoint
from pagedjax.checkpoint import CheckpointNotFoundError, FolderCheckpoint, GgufCheckpoint, open_checkpoint
from pagedjax.errors import CheckpointError
from tests.host.gguf_files import write_gguf


@pytest.fixture
def hub(monkeypatch, tmp_path_factory):
    """A hub whose only model is owner/model. `hub.calls` records the arguments, `hub.error` is raised when set."""
    folder = model_folder(tmp_path_factory.mktemp("hub"))
    state = types.SimpleNamespace(calls=[], error=None, folder=folder)

    def snapshot_download(repo_id, **kwargs):
        state.calls.append((repo_id, kwargs))
        if state.error is not None:
            raise state.error
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return state


def model_folder(path: Path) -> Path:
    path.mkdir(exist_ok=True, parents=True)
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_file({"a": np.zeros(2, np.float32)}, path / "model.safetensors")
    return path


def test_a_folder_and_a_gguf(tmp_path, hub):
    with open_checkpoint(model_folder(tmp_path / "m")) as checkpoint:
        assert isinstance(checkpoint, FolderCheckpoint)
    gguf = write_gguf(tmp_path / "m.gguf")
    assert isinstance(open_checkpoint(str(gguf)), GgufCheckpoint)
    assert isinstance(open_checkpoint(gguf.rename(tmp_path / "blob")), GgufCheckpoint)  # known by its first bytes
    assert hub.calls == []


def test_home_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    model_folder(tmp_path / "m")
    assert open_checkpoint("~/m").source == str(tmp_path / "m")


def test_a_folder_that_holds_one_gguf(tmp_path):
    write_gguf(tmp_path / "m.gguf")
    assert isinstance(open_checkpoint(tmp_path), GgufCheckpoint)
    write_gguf(tmp_path / "n.gguf")
    with pytest.raises(CheckpointError, match=r"holds 2 GGUF files \(m\.gguf, n\.gguf\); name one of them"):
        open_checkpoint(tmp_path)
    model_folder(tmp_path)
    assert isinstance(open_checkpoint(tmp_path), FolderCheckpoint)


def test_other_files_are_refused(tmp_path):
    folder = model_folder(tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: is neither a GGUF file nor a model folder; give the folder"):
        open_checkpoint(folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"config\.json: is neither a GGUF file nor a model folder$"):
        open_checkpoint(folder / "config.json")
    (tmp_path / "text.gguf").write_text("hello")
    with pytest.raises(CheckpointError, match=r"text\.gguf: is not a GGUF file"):
        open_checkpoint(tmp_path / "text.gguf")


@pytest.mark.parametrize(
    "name", ["/no/such/folder", "./model", "~/no-such-model", "a/b/c", "model.gguf", "owner/x.safetensors", Path("model")]
)
def test_a_missing_path_is_not_looked_up(name, hub):
    with pytest.raises(CheckpointNotFoundError, match="no such file or folder") as caught:
        open_checkpoint(name)
    assert isinstance(caught.value, FileNotFoundError)
    assert isinstance(caught.value, ValueError)
    assert str(name) in str(caught.value)
    assert hub.calls == []


@pytest.mark.parametrize("name", ["", "  "])
def test_an_empty_name(name, hub):
    with pytest.raises(CheckpointError, match="the model's name is empty"):
        open_checkpoint(name)


def test_a_hub_id(hub):
    with open_checkpoint("owner/model-1.0", revision="v2") as checkpoint:
        assert checkpoint.source == str(hub.folder)
    [(repo, arguments)] = hub.calls
    assert repo == "owner/model-1.0"
    assert arguments["revision"] == "v2"
    wanted = ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.model", "chat_template.jinja"]
    wanted += ["additional_chat_templates/tool_use.jinja"]
    others = ["pytorch_model.bin", "original/model.safetensors", "onnx/config.json", "consolidated.safetensors", "README.md", "model.py"]
    allowed = huggingface_hub.utils.filter_repo_objects(
        wanted + others,
        allow_patterns=arguments["allow_patterns"],
        ignore_patterns=arguments["ignore_patterns"],
    )
    assert list(allowed) == wanted


def test_a_local_path_wins_over_the_hub(tmp_path, monkeypatch, hub):
    monkeypatch.chdir(tmp_path)
    model_folder(tmp_path / "owner" / "model")
    assert open_checkpoint("owner/model").source == "owner/model"
    assert hub.calls == []
    with pytest.raises(CheckpointError, match="revision 'v2' is for hub ids, but this is a local path"):
        open_checkpoint("owner/model", revision="v2")


def http_error(kind, message="404 Client Error"):
    """Such an error without the HTTP response that its constructor wants."""
    error = kind.__new__(kind)
    error.args = (message,)
    return error


@pytest.mark.parametrize(
    ("error", "kind", "match"),
    [
        (http_error(errors.RepositoryNotFoundError), CheckpointNotFoundError, "does not exist or is private: check the spelling"),
        (http_error(errors.GatedRepoError), CheckpointError, "is gated: accept its licence"),
        (http_error(errors.RevisionNotFoundError), CheckpointError, "at revision 'v2' has no such revision"),
        (errors.HFValidationError("bad name\nmore"), CheckpointError, "is not a valid hub id: bad name$"),
        (
            errors.LocalEntryNotFoundError("no network"),
            CheckpointNotFoundError,
            "check the network and HF_HUB_OFFLINE, or download the model",
        ),
        (errors.OfflineModeIsEnabled(), CheckpointNotFoundError, r"OfflineModeIsEnabled: no message\): check the network"),
        (RuntimeError("from the HTTP client"), CheckpointNotFoundError, "RuntimeError: from the HTTP client"),
    ],
)
def test_hub_errors_name_the_id_and_what_to_do(hub, error, kind, match):
    hub.error = error
    with pytest.raises(kind, match=r"no local file or folder has that name, and the hub model 'owner/model'.*" + match) as caught:
        open_checkpoint("owner/model", revision="v2")
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)


def test_a_hub_model_without_safetensors(hub):
    (hub.folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has neither model\.safetensors nor"):
        open_checkpoint("owner/model")


def test_no_jax_in_the_readers():
    for path in Path(pagedjax.checkpoint.__file__).parent.glob("*.py"):
        imported = {
            alias.name.split(".")[0] if isinstance(node, ast.Import) else (node.module or "").split(".")[0]
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        assert not imported & {"jax", "flax", "torch", "transformers"}, path
