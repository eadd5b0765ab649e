"""What every checkpoint reader offers, and the error for a path that is not there."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

import numpy as np

from pagedjax.errors import CheckpointError

if TYPE_CHECKING:
    from pagedjax.text import Tokenizer


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """No such file or folder. Also a `FileNotFoundError`, so either ``except`` works."""


@runtime_checkable
class Checkpoint(Protocol):
    """A model on disk in Hugging Face's terms. A context manager: leaving it unmaps the files; arrays already read stay valid."""

    @property
    def source(self) -> str:
        """The path that was opened, for messages."""

    @property
    def config(self) -> dict[str, Any]:
        """The model's ``config.json``; for a GGUF, its metadata translated to that form."""

    @property
    def generation_config(self) -> dict[str, Any]:
        """``generation_config.json``, `{}` when there is none. ``eos_token_id`` is an int or a list of ints."""

    def names(self) -> frozenset[str]:
        """Hugging Face names of the tensors, such as ``"model.layers.0.self_attn.q_proj.weight"``."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the array that `read` returns, known without reading it."""

    def dtype(self, name: str) -> np.dtype[Any]:
        """Dtype of the array that `read` returns, known without reading it."""

    def read(self, name: str) -> np.ndarray[Any, np.dtype[Any]]:
        """One tensor as a new, writable array in Hugging Face's layout (a linear layer is ``[out, in]``).

        Raises:
          CheckpointError: no tensor of that name, or the checkpoint is closed.
        """

    def tokenizer(self) -> Tokenizer:
        """The checkpoint's own tokenizer and chat template."""

    def close(self) -> None:
        """Unmap the files. Calling it twice is fine."""

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`.

    Raises:
      CheckpointError: unreadable, not JSON, or JSON but not an object. The message names the file.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from error
    except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are both ValueErrors
        raise CheckpointError(f"{path}: is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a JSON {type(value).__name__}, not an object")
    return value
