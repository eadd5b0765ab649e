"""From a model folder, GGUF file or hub id to a `ModelConfig` and `Params`. Strict: every tensor is accounted for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from pagedjax.config import ModelConfig
from pagedjax.errors import CheckpointError
from pagedjax.params import Params, check_names, hf_names, params_from_hf

if TYPE_CHECKING:
    from pagedjax.checkpoint import Checkpoint

# Constants that old Llama checkpoints store beside the weights; they are computed from the config.
_RECOMPUTED = "rotary_emb.inv_freq"


def load_config(checkpoint: Checkpoint, *, dtype: str = "auto", max_model_len: int | None = None) -> ModelConfig:
    """The checkpoint's `ModelConfig`; see `ModelConfig.from_hf` for arguments and errors."""
    return ModelConfig.from_hf(checkpoint.config, dtype=dtype, max_model_len=max_model_len)


def load_params(
    checkpoint: Checkpoint, config: ModelConfig, *, mesh: Mesh | None = None, progress: Callable[[int, int], None] | None = None
) -> Params:
    """Read all weights, cast to ``config.dtype`` and put on the device one at a time.

    Args:
      checkpoint: an open checkpoint.
      config: made from this checkpoint.
      mesh: shard the weights over it.
      progress: called with (tensors read, tensors in all).

    Raises:
      CheckpointError: missing, unexpected, mis-shaped or wrongly typed tensors; the message lists names.
    """
    check_tensors(checkpoint, config)
    # Some checkpoints store the tied head a second time. It must then say the same.
    twice = config.tie_word_embeddings and "lm_head.weight" in checkpoint.names()
    if twice and not np.array_equal(checkpoint.read("lm_head.weight"), checkpoint.read("model.embed_tokens.weight")):
        raise CheckpointError(f"{checkpoint.source}: the config ties the output head to the embedding, but lm_head.weight differs from it")
    total, done = len(hf_names(config)), 0

    def read(name: str) -> np.ndarray:
        nonlocal done
        value = checkpoint.read(name)
        done += 1
        if progress is not None:
            progress(done, total)
        return value

    return params_from_hf(read, config, mesh)


def check_tensors(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Check names, shapes and types of all tensors against the model's declaration, from the files' headers alone.

    Raises:
      CheckpointError: missing, unexpected, mis-shaped or wrongly typed tensors.
    """
    names = {name for name in checkpoint.names() if not name.endswith(_RECOMPUTED)}
    if config.tie_word_embeddings:
        names.discard("lm_head.weight")  # perhaps a second copy of the embedding
    check_names(frozenset(names), config, checkpoint.source)
    for name, shape in hf_names(config).items():
        if checkpoint.shape(name) != shape:
            raise CheckpointError(f"{checkpoint.source}: tensor {name} has shape {checkpoint.shape(name)}; the config asks for {shape}")
        if not jnp.issubdtype(checkpoint.dtype(name), jnp.floating):
            raise CheckpointError(f"{checkpoint.source}: tensor {name} has dtype {checkpoint.dtype(name)}; weights are floating point")


def eos_token_ids(checkpoint: Checkpoint) -> tuple[int, ...]:
    """All end-of-sequence ids, from the generation config, else from the model config; empty when neither names one.

    Raises:
      CheckpointError: not ids.
    """
    for source in (checkpoint.generation_config, checkpoint.config):
        value = source.get("eos_token_id")
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            if any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < 2**31 for i in ids):
                raise CheckpointError(f"{checkpoint.source}: eos_token_id is {value!r}; it must be a token id or a list of them")
            return tuple(ids)
    return ()
