"""Readers of model checkpoints: Hugging Face folders, hub ids and GGUF files, all in one form. Host only, NumPy only.

`open_checkpoint` takes a path or a hub id and returns a `Checkpoint`: a Hugging Face ``config.json``, Hugging Face
tensor names and one tensor at a time in Hugging Face's layout, whatever the file behind it. `demo_model` fetches a small
instruction-tuned model for a first try.
"""

from pagedjax.checkpoint.base import Checkpoint, CheckpointNotFoundError
from pagedjax.checkpoint.demo import demo_model
from pagedjax.checkpoint.folder import FolderCheckpoint
from pagedjax.checkpoint.gguf import GgufCheckpoint
from pagedjax.checkpoint.open import open_checkpoint

__all__ = ["Checkpoint", "CheckpointNotFoundError", "FolderCheckpoint", "GgufCheckpoint", "demo_model", "open_checkpoint"]
