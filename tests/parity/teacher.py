"""Teacher forcing: logits for every token of given answers, whatever the model itself would have said. Imports no torch."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import numpy as np

from pagedjax.batch import Chunk, bucket
from pagedjax.config import ModelConfig
from pagedjax.model import forward
from pagedjax.params import Params
from tests.helpers import decode_step, poisoned_cache, prefill, shuffled_blocks

BLOCK_SIZE = 16


@functools.cache
def _step():
    return jax.jit(forward, static_argnames=("config", "mesh", "implementation"), donate_argnames="cache")


def _table_width(lengths: Sequence[int]) -> int:
    return bucket(-(-max(lengths) // BLOCK_SIZE))


def paged_logits(params: Params, config: ModelConfig, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> np.ndarray:
    """Prefill all prompts in one step, then feed the answers token by token: what `generate` runs, in shuffled blocks among NaN.

    Args:
      params: the weights.
      config: the model.
      prompts: token ids of each row, of any lengths.
      answers: token ids of each row, all of one length.

    Returns:
      f32[rows, steps, V], the logits from which each token of the answers would be chosen.
    """
    rows, steps = len(prompts), len(answers[0])
    lengths = [len(p) + steps for p in prompts]
    width = _table_width(lengths)
    blocks = shuffled_blocks(lengths, BLOCK_SIZE, width * rows)
    cache = poisoned_cache(config, width * rows, BLOCK_SIZE)
    inputs = prefill([Chunk(row, 0, len(p)) for row, p in enumerate(prompts)], list(prompts), blocks, width=width)
    out = np.empty((rows, steps, config.vocab_size), np.float32)
    for at in range(steps):
        if at:
            tokens, positions = [a[at - 1] for a in answers], [len(p) + at - 1 for p in prompts]
            inputs = decode_step(tokens, positions, blocks, width=width, pad_to=bucket(rows))
        logits, cache = _step()(params, cache, inputs, config=config)
        out[:, at] = logits[:rows]
    return out


def whole_logits(params: Params, config: ModelConfig, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> np.ndarray:
    """The same in a single step that computes prompts and answers at once. Arguments and result as of `paged_logits`."""
    rows, steps = len(prompts), len(answers[0])
    sequences = [[*p, *a] for p, a in zip(prompts, answers, strict=True)]
    lengths = [len(s) for s in sequences]
    width = _table_width(lengths)
    blocks = shuffled_blocks(lengths, BLOCK_SIZE, width * rows)
    inputs = prefill([Chunk(row, 0, n) for row, n in enumerate(lengths)], sequences, blocks, width=width)
    # A token is chosen from the logits at the position before it.
    ids = np.concatenate([start + len(p) - 1 + np.arange(steps) for start, p in zip(inputs.prefill_query_start_loc, prompts, strict=False)])
    inputs = inputs._replace(logit_ids=ids.astype(np.int32), state_ids=np.arange(rows * steps, dtype=np.int32))
    logits, _ = _step()(params, poisoned_cache(config, width * rows, BLOCK_SIZE), inputs, config=config)
    return np.asarray(logits).reshape(rows, steps, config.vocab_size)
