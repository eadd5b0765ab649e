"""The model: one pure function from weights, cache and a step's inputs to logits and the cache."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from pagedjax.attention import attend
from pagedjax.config import ModelConfig
from pagedjax.inputs import StepInputs
from pagedjax.kv_cache import KVCache
from pagedjax.layers import apply_rope, project, rms_norm, rope_angles
from pagedjax.params import LayerParams, Params, check_mesh


def forward(
    params: Params,
    cache: KVCache,
    inputs: StepInputs,
    config: ModelConfig,
    mesh: Mesh | None = None,
    *,
    implementation: str | None = None,
) -> tuple[jax.Array, KVCache]:
    """One step of `B` decode rows and `T` packed prefill tokens. Nothing else varies: same arguments, same result.

    Args:
      params: the weights.
      cache: the KV cache; donate it, and XLA writes in place.
      inputs: the step. Give it arrays; their shapes are what the step is compiled for.
      config: static.
      mesh: one axis ``"tp"``; shards weights and pools over KV heads, MLP width and vocabulary. Static.
      implementation: of the attention and cache-write kernels (see `pallas_kernels`); ``None`` picks the fastest here. Static.

    Returns:
      logits f32[R, V] at ``inputs.logit_ids``, and the cache with this step's keys and values in it.

    Source: Touvron et al. 2023 (arXiv:2302.13971) and the Llama 3 report (arXiv:2407.21783); casts in the order of the
    Hugging Face implementation, so that float32 and bfloat16 results can be compared with it. Softmax weights stay float32,
    where that rounds them before they meet the values.

    Raises:
      ValueError: the mesh does not divide the model.
    """
    x, cache = hidden_states(params, cache, inputs, config, mesh, implementation=implementation)
    return unembed(params, x[inputs.logit_ids], config, mesh), cache


def hidden_states(
    params: Params,
    cache: KVCache,
    inputs: StepInputs,
    config: ModelConfig,
    mesh: Mesh | None = None,
    *,
    implementation: str | None = None,
) -> tuple[jax.Array, KVCache]:
    """`forward` up to the last layer: [B + T, D] in the model's dtype, and the cache."""
    if mesh is not None:
        check_mesh(config, mesh)
    flat = mesh is None  # under a mesh, weights are split over an inner axis
    x = params.embedding[inputs.token_ids]
    cos, sin = rope_angles(inputs.positions, config.rope, config.head_size, x.dtype)
    keys, values = [], []
    for layer, k_pool, v_pool in zip(params.layers, cache.keys, cache.values, strict=True):
        h = rms_norm(x, layer.attention_norm, config.rms_norm_eps)
        q, k, v = _qkv(h, layer, config, cos, sin, flat)
        attended, k_pool, v_pool = attend(q, k, v, k_pool, v_pool, inputs, mesh, implementation)
        attended = attended.reshape(-1, config.num_heads, config.head_size)
        x = x + _add_bias(project(attended, layer.wo, 1, flat=flat), layer.bo)
        x = x + _mlp(rms_norm(x, layer.mlp_norm, config.rms_norm_eps), layer, flat)
        keys.append(k_pool)
        values.append(v_pool)
    return x, KVCache(tuple(keys), tuple(values))


def unembed(params: Params, x: jax.Array, config: ModelConfig, mesh: Mesh | None = None) -> jax.Array:
    """Logits f32[R, V] of rows ``x [R, D]`` of `hidden_states`."""
    x = rms_norm(x, params.final_norm, config.rms_norm_eps)
    head = params.embedding if params.lm_head is None else params.lm_head
    return project(x, head, 1, flat=mesh is None, out_dtype=jnp.dtype(jnp.float32))


def _qkv(
    h: jax.Array, layer: LayerParams, config: ModelConfig, cos: jax.Array, sin: jax.Array, flat: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    group = config.group_size
    qkv = _add_bias(project(h, layer.wqkv, 3, flat=flat), layer.bqkv)
    turned = apply_rope(qkv[:, :, : group + 1], cos, sin)  # queries and the key; the value is not turned
    return turned[:, :, :group], turned[:, :, group], qkv[:, :, group + 1]


def _mlp(h: jax.Array, layer: LayerParams, flat: bool) -> jax.Array:
    gate_up = _add_bias(project(h, layer.w_gate_up, 2, flat=flat), layer.b_gate_up)
    return _add_bias(project(jax.nn.silu(gate_up[:, 0]) * gate_up[:, 1], layer.w_down, 1, flat=flat), layer.b_down)


def _add_bias(x: jax.Array, bias: jax.Array | None) -> jax.Array:
    return x if bias is None else x + bias[None]
