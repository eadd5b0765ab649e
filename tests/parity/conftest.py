"""The demo model on both sides, loaded once a session: weights rounded to bfloat16 and held in float32."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pagedjax.checkpoint import demo_model, open_checkpoint
from pagedjax.config import ModelConfig
from pagedjax.load import load_config, load_params
from pagedjax.params import Params
from pagedjax.text import Tokenizer
from tests.parity.prompts import NUM_NEW_TOKENS, prompt_ids


@dataclasses.dataclass(frozen=True)
class Ours:
    """The demo model by our reader; `params` in bfloat16."""

    config: ModelConfig
    params: Params
    tokenizer: Tokenizer

    def in_float32(self) -> tuple[Params, ModelConfig]:
        """The same weights held in float32."""
        return jax.tree.map(lambda w: w.astype(jnp.float32), self.params), dataclasses.replace(self.config, dtype="float32")


@dataclasses.dataclass(frozen=True)
class Expected:
    """What transformers makes of the prompts: ids [rows, steps] and logits f32[rows, steps, V]."""

    prompts: list[list[int]]
    ids: list[list[int]]
    logits: Any


@pytest.fixture(scope="session")
def ours():
    with open_checkpoint(demo_model()) as checkpoint:
        config = load_config(checkpoint, dtype="bfloat16")
        return Ours(config, load_params(checkpoint, config), checkpoint.tokenizer())


@pytest.fixture(scope="session")
def reference():
    from tests.parity.transformers_reference import load_gguf

    return load_gguf(demo_model(), round_to_bfloat16=True)


@pytest.fixture(scope="session")
def expected(reference):
    import numpy as np

    prompts = prompt_ids(reference.tokenizer)
    runs = [reference.greedy(ids, NUM_NEW_TOKENS) for ids in prompts]
    return Expected(prompts, [ids for ids, _ in runs], np.stack([logits for _, logits in runs]))
