"""A model folder as Hugging Face's ``save_pretrained`` writes it.

``config.json`` beside either one ``model.safetensors`` or shards named by ``model.safetensors.index.json``. Where there is an
index, it alone decides: a tensor counts in the one file that the index assigns it to, and files it does not name are not opened.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from pagedjax.checkpoint.base import CheckpointNotFoundError, read_json
from pagedjax.checkpoint.safetensors_file import SafetensorsFile
from pagedjax.errors import CheckpointError

if TYPE_CHECKING:
    from pagedjax.text import Tokenizer

INDEX_NAME = "model.safetensors.index.json"
WEIGHTS_NAME = "model.safetensors"


class FolderCheckpoint:
    """A `Checkpoint` over a Hugging Face folder. Opening reads JSON files and safetensors headers only.

    Args:
      path: the folder.

    Raises:
      CheckpointNotFoundError: no such folder.
      CheckpointError: a file is missing, cut short, damaged or contradicts the index. The message names the file and what is wrong.
      UnsupportedModelError: a tensor's storage type is not built.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        if not self._path.is_dir():
            raise CheckpointNotFoundError(f"{self._path}: no such folder")
        if not (self._path / "config.json").is_file():
            raise CheckpointError(f"{self._path}: has no config.json, so it is not a Hugging Face model folder")
        self.config: dict[str, Any] = read_json(self._path / "config.json")
        generation = self._path / "generation_config.json"
        self.generation_config: dict[str, Any] = read_json(generation) if generation.is_file() else {}
        with ExitStack() as stack:
            self._files = self._open(stack)
            for name, file in self._files.items():
                file.dtype(name)  # raises for a storage type that is not built
            self._stack: ExitStack | None = stack.pop_all()

    def _open(self, stack: ExitStack) -> dict[str, SafetensorsFile]:
        """Map tensor name to the open file that holds it."""
        index = self._path / INDEX_NAME
        if not index.is_file():
            single = self._path / WEIGHTS_NAME
            if not single.is_file():
                raise CheckpointError(self._describe_missing_weights())
            file = SafetensorsFile(single)
            stack.callback(file.close)
            return dict.fromkeys(file.names(), file)
        weight_map = _weight_map(index)
        shards: dict[str, SafetensorsFile] = {}
        for shard in sorted(set(weight_map.values())):
            if not (self._path / shard).is_file():
                raise CheckpointError(f"{self._path / shard}: missing shard, which {INDEX_NAME} names")
            shards[shard] = SafetensorsFile(self._path / shard)
            stack.callback(shards[shard].close)
        lacking = sorted(name for name, shard in weight_map.items() if name not in shards[shard].names())
        if lacking:
            more = f" and {len(lacking) - 1} more such tensors" if len(lacking) > 1 else ""
            raise CheckpointError(
                f"{self._path / weight_map[lacking[0]]}: lacks tensor {lacking[0]!r}, which {INDEX_NAME} places there{more}"
            )
        return {name: shards[shard] for name, shard in weight_map.items()}

    def _describe_missing_weights(self) -> str:
        text = f"{self._path}: has neither {WEIGHTS_NAME} nor {INDEX_NAME}"
        others = sorted(p.name for suffix in ("*.safetensors", "*.bin", "*.pt", "*.pth") for p in self._path.glob(suffix))
        if others:
            text += f" (it has {', '.join(others[:3])}{', ...' if len(others) > 3 else ''})"
        if any(not name.endswith(".safetensors") for name in others):
            text += "; pickle files are not read: convert with transformers' save_pretrained(safe_serialization=True)"
        return text

    @property
    def source(self) -> str:
        """The folder."""
        return str(self._path)

    def names(self) -> frozenset[str]:
        """Names of all tensors that count."""
        return frozenset(self._files)

    def _file(self, name: str) -> SafetensorsFile:
        if self._stack is None:
            raise CheckpointError(f"{self._path}: the checkpoint is closed")
        if name not in self._files:
            raise CheckpointError(f"{self._path}: has no tensor {name!r}")
        return self._files[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of tensor `name`."""
        return self._file(name).shape(name)

    def dtype(self, name: str) -> np.dtype[Any]:
        """Dtype of tensor `name` as stored."""
        return self._file(name).dtype(name)

    def read(self, name: str) -> np.ndarray[Any, np.dtype[Any]]:
        """Tensor `name` in its stored dtype, a new array."""
        return self._file(name).read(name)

    def tokenizer(self) -> Tokenizer:
        """The folder's tokenizer.

        Raises:
          CheckpointError: the folder has no usable tokenizer.
        """
        from pagedjax.text import Tokenizer  # a reader of weights alone needs no tokenizers library

        return Tokenizer.from_folder(self._path)

    def close(self) -> None:
        """Unmap the files."""
        if self._stack is not None:
            self._stack.close()
            self._stack = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _weight_map(index: Path) -> dict[str, str]:
    """The index's tensor name -> file name, checked to stay inside the folder."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: has no 'weight_map' object that assigns tensors to files")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not shard or shard in (".", "..") or "/" in shard or "\\" in shard:
            raise CheckpointError(f"{index}: tensor {name!r} is assigned to {shard!r}, which is not the name of a file in the folder")
    return weight_map
