"""From a model folder, GGUF file or hub id to a `ModelConfig` and `Params`. Strict: every tensor is accounted for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

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
    names = frozenset(name for name in checkpoint.names() if not name.endswith(_RECOMPUTED))
    if config.tie_word_embeddings and "lm_head.weight" in names:
        # Some checkpoints store the tied head a second time. It must then say the same.
        if not np.array_equal(checkpoint.read("lm_head.weight"), checkpoint.read("model.embed_tokens.weight")):
            raise CheckpointError(
                f"{checkpoint.source}: the config ties the output head to the embedding, but lm_head.weight differs from it"
            )
        names -= {"lm_head.weight"}
    check_names(names, config, checkpoint.source)
    total, done = len(hf_names(config)), 0

    def read(name: str) -> np.ndarray:
        nonlocal done
        value = checkpoint.read(name)
        done += 1
        if progress is not None:
            progress(done, total)
        return value

    try:
        return params_from_hf(read, config, mesh)
    except CheckpointError as error:
        raise error if str(error).startswith(checkpoint.source) else CheckpointError(f"{checkpoint.source}: {error}") from error


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
