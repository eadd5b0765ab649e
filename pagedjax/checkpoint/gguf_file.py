"""The GGUF container: header, metadata and where each tensor's bytes lie. It knows nothing of models.

Parsed here and not by `gguf.GGUFReader`, which makes one NumPy view for each vocabulary entry (2.3 s to open a 98 MB model, against
a tenth of that here) and ends in an IndexError somewhere inside when the file is cut short. Every length is checked against the file.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from pagedjax.checkpoint.base import CheckpointNotFoundError
from pagedjax.errors import CheckpointError, UnsupportedModelError

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMS = 4  # ggml's GGML_MAX_DIMS
_MAX_DEPTH = 4  # arrays in arrays; real files have none
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "?", 10: "Q", 11: "q", 12: "d"}


class GgufTensor(NamedTuple):
    """Where one tensor lies. `shape` is row-major, the last axis contiguous (GGUF stores it reversed)."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int  # bytes from the start of the file
    num_bytes: int


class GgufFile:
    """A mapped GGUF file.

    Args:
      path: the file.

    Raises:
      CheckpointNotFoundError: no such file.
      CheckpointError: not a GGUF, cut short, or damaged. The message names the file and what is wrong.
      UnsupportedModelError: a GGUF version or a tensor type that is not known.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                if file.read(4) != MAGIC:
                    raise CheckpointError(f"{path}: is not a GGUF file (it does not start with 'GGUF')")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError as error:
            raise CheckpointNotFoundError(f"{path}: no such file") from error
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from error
        try:
            self.metadata, self.tensors = _parse(_Cursor(self._map, path))
        except BaseException:
            self._map.close()
            raise

    def data(self, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The raw bytes of tensor `name`, as rows ``[..., bytes a row]``: a read-only view; copy what outlives the file."""
        tensor = self.tensors[name]
        rows = tensor.shape[:-1]
        raw = np.frombuffer(self._map, np.uint8, tensor.num_bytes, tensor.offset)
        return raw.reshape(*rows, tensor.num_bytes // max(1, math.prod(rows)))

    def close(self) -> None:
        """Unmap."""
        self._map.close()


class _Cursor:
    """Reads forward through the header; any read past the end is the error 'cut short'."""

    def __init__(self, buffer: mmap.mmap, path: Path) -> None:
        self.buffer, self.path, self.at, self.size = buffer, path, 0, len(buffer)
        self.where = "the header"

    def skip(self, count: int) -> int:
        start = self.at
        if count > self.size - start:
            raise CheckpointError(
                f"{self.path}: is cut short or damaged: {self.where} needs {count:,} bytes at {start:,}, the file has {self.size:,}"
            )
        self.at = start + count
        return start

    def scalar(self, code: str) -> Any:
        return struct.unpack_from("<" + code, self.buffer, self.skip(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        length = self.scalar("Q")
        start = self.skip(length)
        try:
            return self.buffer[start : start + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path}: {self.where} holds text that is not UTF-8 ({error})") from error

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.string()
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind != _ARRAY or depth == _MAX_DEPTH:
            raise CheckpointError(f"{self.path}: {self.where} has metadata type {kind} (depth {depth}), which GGUF does not define")
        item, count = self.scalar("I"), self.scalar("Q")
        if item in _SCALARS:
            code = _SCALARS[item]
            start = self.skip(count * struct.calcsize("<" + code))
            return np.frombuffer(self.buffer, "<" + code if code != "?" else "?", count, start).tolist() if count else []
        return [self.value(item, depth + 1) for _ in range(count)]


def _parse(cursor: _Cursor) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    cursor.skip(len(MAGIC))
    version = cursor.scalar("I")
    if version not in _VERSIONS:
        what = "is big-endian" if version & 0xFFFF == 0 and version else f"has GGUF version {version}"
        raise UnsupportedModelError(f"{cursor.path}: {what}; built are little-endian versions 2 and 3")
    num_tensors, num_values = cursor.scalar("Q"), cursor.scalar("Q")
    metadata: dict[str, Any] = {}
    for index in range(num_values):
        cursor.where = f"metadata entry {index + 1} of {num_values}"
        key = cursor.string()
        if key in metadata:
            raise CheckpointError(f"{cursor.path}: metadata key {key!r} appears twice")
        cursor.where = f"metadata value {key!r}"
        metadata[key] = cursor.value(cursor.scalar("I"))
    tensors: dict[str, GgufTensor] = {}
    for index in range(num_tensors):
        cursor.where = f"tensor description {index + 1} of {num_tensors}"
        name, tensor = _tensor(cursor)
        if name in tensors:
            raise CheckpointError(f"{cursor.path}: tensor {name!r} appears twice")
        tensors[name] = tensor
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise CheckpointError(f"{cursor.path}: general.alignment is {alignment!r}; it must be a power of two")
    start = -(-cursor.at // alignment) * alignment
    placed = {name: tensor._replace(offset=start + tensor.offset) for name, tensor in tensors.items()}
    for name, tensor in placed.items():
        end = tensor.offset + tensor.num_bytes
        if end > cursor.size:
            raise CheckpointError(f"{cursor.path}: is cut short: tensor {name!r} ends at byte {end:,}, the file has {cursor.size:,}")
    return metadata, placed


def _tensor(cursor: _Cursor) -> tuple[str, GgufTensor]:
    """One tensor description; its offset still counts from the start of the data."""
    name = cursor.string()
    num_dims = cursor.scalar("I")
    if not 1 <= num_dims <= _MAX_DIMS:
        raise CheckpointError(f"{cursor.path}: tensor {name!r} has {num_dims} dimensions; GGUF allows 1 to {_MAX_DIMS}")
    shape = tuple(cursor.scalar("Q") for _ in range(num_dims))[::-1]
    number, offset = cursor.scalar("I"), cursor.scalar("Q")
    try:
        kind = GGMLQuantizationType(number)
        block, block_bytes = GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError) as error:
        raise UnsupportedModelError(
            f"{cursor.path}: tensor {name!r} has type number {number}, which the installed gguf library does not know"
        ) from error
    if shape[-1] % block:
        raise CheckpointError(
            f"{cursor.path}: tensor {name!r} has rows of {shape[-1]} values, not a multiple of {kind.name}'s block of {block}"
        )
    return name, GgufTensor(shape, kind, offset, math.prod(shape) // block * block_bytes)
