"""What several test files share: tiny models, a dense reference that knows no blocks, and hand-made steps."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.batch import Chunk, prefill_inputs
from pagedjax.config import ModelConfig
from pagedjax.inputs import StepInputs
from pagedjax.kv_cache import KVCache, make_cache
from pagedjax.layers import apply_rope, rms_norm, rope_angles
from pagedjax.params import Params, init_params

TINY = ModelConfig(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_size=8,
    max_model_len=256,
    dtype="float32",
)


def tiny_params(config: ModelConfig = TINY, seed: int = 0) -> Params:
    """Random weights, ten times the usual spread, so that logits differ clearly and attention is not flat."""
    return jax.tree.map(lambda w: w * 10 if w.ndim > 1 else w, init_params(config, jax.random.key(seed)))


def variant(**changes: object) -> ModelConfig:
    """`TINY` with fields replaced."""
    return dataclasses.replace(TINY, **changes)  # type: ignore[arg-type]


def prompt(length: int, seed: int = 0, vocab_size: int = TINY.vocab_size) -> list[int]:
    """Random token ids."""
    return [int(t) for t in np.random.default_rng(seed).integers(0, vocab_size, length)]


def dense_logits(params: Params, token_ids: Sequence[int], config: ModelConfig) -> jax.Array:
    """Logits f32[S, V] at every position by plain causal attention over the whole sequence: no cache, no blocks, no packing.

    Norm and rope are the model's own functions: their faults show in the comparison with transformers, not here.
    """
    # Few lengths, few compilations: causal attention never sees the padding behind.
    ids = np.zeros(-(-len(token_ids) // 64) * 64, np.int32)
    ids[: len(token_ids)] = token_ids
    return _dense_logits(params, ids, config)[: len(token_ids)]


@functools.partial(jax.jit, static_argnames="config")
def _dense_logits(params: Params, ids: jax.Array, config: ModelConfig) -> jax.Array:
    x = params.embedding[ids]
    length = ids.shape[0]
    cos, sin = rope_angles(jnp.arange(length, dtype=jnp.int32), config.rope, config.head_size, x.dtype)
    causal = jnp.tril(jnp.ones((length, length), bool))
    for layer in params.layers:
        h = rms_norm(x, layer.attention_norm, config.rms_norm_eps)
        qkv = jnp.einsum("td,kghd->tkgh", h, layer.wqkv, precision="highest")
        if layer.bqkv is not None:
            qkv = qkv + layer.bqkv[None]
        q, k, v = apply_rope(qkv[:, :, :-2], cos, sin), apply_rope(qkv[:, :, -2], cos, sin), qkv[:, :, -1]
        scores = jnp.einsum("tkgh,skh->kgts", q, k, precision="highest").astype(jnp.float32) * config.head_size**-0.5
        weights = jax.nn.softmax(jnp.where(causal[None, None], scores, -jnp.inf), axis=-1).astype(x.dtype)
        attended = jnp.einsum("kgts,skh->tkgh", weights, v, precision="highest").reshape(length, config.num_heads, config.head_size)
        out = jnp.einsum("tnh,dnh->td", attended, layer.wo, precision="highest")
        x = x + (out if layer.bo is None else out + layer.bo[None])
        gate_up = jnp.einsum("td,cfd->tcf", rms_norm(x, layer.mlp_norm, config.rms_norm_eps), layer.w_gate_up, precision="highest")
        if layer.b_gate_up is not None:
            gate_up = gate_up + layer.b_gate_up[None]
        down = jnp.einsum("tf,df->td", jax.nn.silu(gate_up[:, 0]) * gate_up[:, 1], layer.w_down, precision="highest")
        x = x + (down if layer.b_down is None else down + layer.b_down[None])
    head = params.embedding if params.lm_head is None else params.lm_head
    return jnp.einsum("td,vd->tv", rms_norm(x, params.final_norm, config.rms_norm_eps), head, precision="highest").astype(jnp.float32)


def dense_greedy(params: Params, token_ids: list[int], num_new: int, config: ModelConfig) -> list[int]:
    """Greedy continuation by running the dense reference over the whole sequence again for each token."""
    ids = list(token_ids)
    for _ in range(num_new):
        ids.append(int(np.argmax(np.asarray(dense_logits(params, ids, config))[-1])))
    return ids[len(token_ids) :]


def shuffled_blocks(lengths: list[int], block_size: int, num_blocks: int, seed: int = 0) -> list[list[int]]:
    """Block ids for rows of these lengths, drawn at random from ``1 .. num_blocks``."""
    ids = np.random.default_rng(seed).permutation(np.arange(1, num_blocks + 1))
    rows, at = [], 0
    for length in lengths:
        n = -(-length // block_size)
        rows.append([int(i) for i in ids[at : at + n]])
        at += n
    assert at <= num_blocks
    return rows


def poisoned_cache(config: ModelConfig, num_blocks: int, block_size: int = 16) -> KVCache:
    """A cache in which every cell, the null block included, is NaN: only cells that a step writes become finite."""
    return jax.tree.map(lambda pool: jnp.full_like(pool, jnp.nan), make_cache(config, num_blocks, block_size))


def prefill(chunks: list[Chunk], prompts: list[list[int]], blocks: list[list[int]], *, block_size: int = 16, width: int = 16) -> StepInputs:
    """A prefill step whose state rows are the prompts' indices."""
    return prefill_inputs(chunks, prompts, blocks, block_size=block_size, table_width=width, num_state_rows=len(prompts))


def decode_step(
    tokens: list[int], positions: list[int], blocks: list[list[int]], *, block_size: int = 16, width: int = 16, pad_to: int = 0
) -> StepInputs:
    """A step of decode rows alone; `pad_to` adds rows that own nothing."""
    num_rows = max(len(tokens), pad_to)
    table = np.zeros((num_rows, width), np.int32)
    token_ids, position, slots, context = (np.zeros(num_rows, np.int32) for _ in range(4))
    for row, (token, at, ids) in enumerate(zip(tokens, positions, blocks, strict=True)):
        table[row, : len(ids)] = ids
        token_ids[row], position[row], context[row] = token, at, at + 1
        slots[row] = ids[at // block_size] * block_size + at % block_size
    rows = np.arange(num_rows, dtype=np.int32)
    no_prefill = (np.zeros((0, width), np.int32), np.zeros(1, np.int32), np.zeros(0, np.int32))
    return StepInputs(token_ids, position, slots, table, context, *no_prefill, rows, rows.copy())


def mixed_step(decode: StepInputs, new: StepInputs) -> StepInputs:
    """Decode rows and prefill tokens in one step."""
    num_decode = decode.token_ids.shape[0]

    def join(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.concatenate([a, b])

    return StepInputs(
        join(decode.token_ids, new.token_ids),
        join(decode.positions, new.positions),
        join(decode.slot_mapping, new.slot_mapping),
        decode.decode_block_tables,
        decode.decode_context_lens,
        new.prefill_block_tables,
        new.prefill_query_start_loc,
        new.prefill_context_lens,
        join(decode.logit_ids, new.logit_ids + num_decode),
        join(decode.state_ids, new.state_ids),
    )
