"""One safetensors file: the header read at once, the data mapped and copied out tensor by tensor.

The `safetensors` package checks the header (lengths, offsets, no holes, nothing beyond the end). The bytes are taken from
a map of our own because its NumPy reader knows no float8 and knows bfloat16 only while `ml_dtypes` happens to be imported.
Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from pagedjax.errors import CheckpointError, UnsupportedModelError

_DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}


class _Entry(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file


class SafetensorsFile:
    """A mapped safetensors file.

    Args:
      path: the file.

    Raises:
      CheckpointError: the file cannot be read, is cut short or is damaged. The message names it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with safe_open(path, framework="np"):
                pass
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(length))
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except SafetensorError as error:
            size = path.stat().st_size
            raise CheckpointError(f"{path}: is cut short or damaged: {error} (the file has {size:,} bytes)") from error
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from error
        header.pop("__metadata__", None)
        self._entries = {
            name: _Entry(entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0]) for name, entry in header.items()
        }

    def names(self) -> frozenset[str]:
        """Names in this file, also those that an index assigns to another one."""
        return frozenset(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of tensor `name`."""
        return self._entries[name].shape

    def dtype(self, name: str) -> np.dtype[Any]:
        """Dtype of tensor `name`.

        Raises:
          UnsupportedModelError: a storage type that NumPy and ml_dtypes have no dtype for.
        """
        stored = self._entries[name].dtype
        if stored not in _DTYPES:
            raise UnsupportedModelError(f"{self.path}: tensor {name!r} has safetensors dtype {stored}, which is not built")
        return _DTYPES[stored]

    def read(self, name: str) -> np.ndarray[Any, np.dtype[Any]]:
        """A new array with the values of tensor `name`.

        A copy, not a view of the map: a view would crash the process (SIGBUS) once somebody saves a new model over the file.
        """
        entry, dtype = self._entries[name], self.dtype(name)
        array = np.empty(entry.shape, dtype)
        if array.size:
            array[...] = np.frombuffer(self._map, dtype, array.size, entry.offset).reshape(entry.shape)
        return array

    def close(self) -> None:
        """Unmap."""
        self._map.close()
