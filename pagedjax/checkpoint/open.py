"""Find out what a path or an id stands for and open it."""

from __future__ import annotations

import re
from pathlib import Path

from pagedjax.checkpoint.base import Checkpoint, CheckpointNotFoundError
from pagedjax.checkpoint.folder import FolderCheckpoint
from pagedjax.checkpoint.gguf import GgufCheckpoint
from pagedjax.checkpoint.gguf_file import MAGIC
from pagedjax.checkpoint.hub import download
from pagedjax.errors import CheckpointError

# "name" or "owner/name" as the hub allows them.
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9_][\w.-]*)?")
_FILE_SUFFIXES = (".gguf", ".safetensors", ".json", ".bin", ".pt", ".pth")


def open_checkpoint(path_or_id: str | Path, revision: str | None = None) -> Checkpoint:
    """Open a model folder, a GGUF file or a hub id. What exists on disk wins over the hub.

    Args:
      path_or_id: a folder with ``config.json`` and safetensors, a ``.gguf`` file, a folder that holds exactly one such file,
        or a hub id such as ``"HuggingFaceTB/SmolLM2-135M-Instruct"`` (downloaded through huggingface-hub into its own cache).
        ``~`` is expanded.
      revision: branch, tag or commit of a hub id.

    Returns:
      An open `Checkpoint`; a context manager.

    Raises:
      CheckpointNotFoundError: a path that does not exist, or a hub id that could not be fetched (also a `FileNotFoundError`).
      CheckpointError: a damaged or incomplete file, or a hub id without access.
      UnsupportedModelError: well formed, but not built.
    """
    text = str(path_or_id)
    if not text.strip():
        raise CheckpointError("the model's name is empty; give a folder, a .gguf file or a hub id")
    path = Path(text).expanduser()
    if path.exists():
        if revision is not None:
            raise CheckpointError(f"{path}: revision {revision!r} is for hub ids, but this is a local path, which wins over the hub")
        return _open_local(path)
    if isinstance(path_or_id, Path) or not _HUB_ID.fullmatch(text) or text.lower().endswith(_FILE_SUFFIXES):
        raise CheckpointNotFoundError(f"{text}: no such file or folder")
    return _open_local(download(text, revision))


def _open_local(path: Path) -> Checkpoint:
    if path.is_dir():
        if not (path / "config.json").is_file():
            ggufs = sorted(path.glob("*.gguf"))
            if len(ggufs) == 1:
                return GgufCheckpoint(ggufs[0])
            if ggufs:
                some = ", ".join(p.name for p in ggufs[:3]) + (", ..." if len(ggufs) > 3 else "")
                raise CheckpointError(f"{path}: holds {len(ggufs)} GGUF files ({some}); name one of them")
        return FolderCheckpoint(path)
    if path.suffix.lower() == ".gguf" or _starts_as_gguf(path):
        return GgufCheckpoint(path)
    hint = "; give the folder that it lies in" if path.suffix == ".safetensors" else ""
    raise CheckpointError(f"{path}: is neither a GGUF file nor a model folder{hint}")


def _starts_as_gguf(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4) == MAGIC
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from error
