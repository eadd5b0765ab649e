"""A decode step of six kernels a layer, for few rows: there, a step is as long as its many small kernels, not as its bytes.

The same function as `model.forward` on a step without prefill tokens. Norms, gate and residual go into the matrix products
(`pallas_kernels.skinny_matmul`), rotary embedding into the KV write (`rope_write_kv`): they round once where the plain step rounds after
each, so the two agree up to the rounding of the model's dtype. `model.forward` stays what the mathematics is read from and compared with.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

import pallas_kernels
from pagedjax.config import ModelConfig
from pagedjax.errors import ConfigError
from pagedjax.inputs import StepInputs
from pagedjax.kv_cache import KVCache
from pagedjax.layers import rope_angles
from pagedjax.params import LayerParams, Params
from pallas_kernels import paged_attention, rope_write_kv, skinny_matmul
from pallas_kernels.skinny_matmul import start

# Rows up to which an engine was measured to be faster with it, by JAX's name of the device. Nothing was measured in an engine yet.
FASTER_UP_TO: dict[str, int] = {}


def fused_forward(
    params: Params, cache: KVCache, inputs: StepInputs, config: ModelConfig, *, implementation: str | None = None
) -> tuple[jax.Array, KVCache]:
    """`model.forward` for decode rows alone.

    Args:
      params: the weights, without biases.
      cache: the KV cache, of the weights' dtype; donate it.
      inputs: a step of `B` decode rows and no prefill tokens, logits wanted of each row.
      config: static.
      implementation: of the kernels; a name applies to all that have one of that name. Static.

    Returns:
      logits f32[B, V] and the cache.
    """
    eps = config.rms_norm_eps
    multiply = functools.partial(skinny_matmul, implementation=_named("skinny_matmul", implementation))
    x = params.embedding[inputs.token_ids]
    rows = x.shape[0]
    cos, sin = rope_angles(inputs.positions, config.rope, config.head_size, x.dtype)
    norms = [*(layer.attention_norm for layer in params.layers[1:]), params.final_norm]
    scaled, squares = start(x, params.layers[0].attention_norm)
    keys, values = [], []
    for layer, next_norm, k_pool, v_pool in zip(params.layers, norms, cache.keys, cache.values, strict=True):
        qkv = multiply(scaled, _matrix(layer.wqkv, 3), sum_squares=squares, eps=eps).out
        qkv = qkv.reshape(rows, config.num_kv_heads, config.group_size + 2, config.head_size)
        q, k_pool, v_pool = rope_write_kv(
            qkv, cos, sin, k_pool, v_pool, inputs.slot_mapping, implementation=_named("rope_write_kv", implementation)
        )
        attended = paged_attention(
            q,
            k_pool,
            v_pool,
            inputs.decode_block_tables,
            inputs.decode_context_lens,
            implementation=_named("paged_attention", implementation),
        )
        x, scaled, squares = _with_norm(multiply(attended.reshape(rows, -1), _matrix(layer.wo, 1), residual=x, next_norm=layer.mlp_norm))
        hidden = multiply(scaled, _matrix(layer.w_gate_up, 2), sum_squares=squares, eps=eps, gate_up=True).out
        x, scaled, squares = _with_norm(multiply(hidden, layer.w_down, residual=x, next_norm=next_norm))
        keys.append(k_pool)
        values.append(v_pool)
    head = params.embedding if params.lm_head is None else params.lm_head
    logits = multiply(scaled, head, sum_squares=squares, eps=eps, out_dtype=jnp.float32).out
    return logits, KVCache(tuple(keys), tuple(values))


def fused_rows(
    asked: int | None,
    row_buckets: tuple[int, ...],
    params: Params,
    config: ModelConfig,
    *,
    kv_dtype: str,
    mesh: Mesh | None,
    implementation: str | None,
) -> int:
    """Up to how many rows an engine's windows run fused steps.

    Args:
      asked: see `EngineConfig.fused_decode_rows`.
      row_buckets: sizes of windows.
      params, config, kv_dtype, mesh, implementation: of the engine.

    Raises:
      ConfigError: a number was asked for, and a window of so many rows or fewer is not served here; the message says why.
    """
    most = FASTER_UP_TO.get(jax.devices()[0].device_kind, 0) if asked is None else asked
    served = 0
    for rows in row_buckets:
        if rows > most:
            break
        reason = why_not_fused(params, config, rows, kv_dtype=kv_dtype, mesh=mesh, implementation=implementation)
        if reason is not None and asked is not None:
            raise ConfigError(f"fused_decode_rows is {asked}, but windows of {rows} rows can't be fused: {reason}")
        if reason is not None:
            break
        served = rows
    return served


def why_not_fused(
    params: Params, config: ModelConfig, num_rows: int, *, kv_dtype: str, mesh: Mesh | None, implementation: str | None
) -> str | None:
    """Why kernels do not serve windows of `num_rows` rows on the device at hand, or ``None`` if they do; see `fused_rows`."""
    if mesh is not None:
        return f"it runs on one device, and the mesh has {mesh.size}"
    if config.dtype != kv_dtype:
        return f"the model is {config.dtype} and its cache {kv_dtype}"
    layer: LayerParams = params.layers[0]
    if any(bias is not None for bias in (layer.bqkv, layer.bo, layer.b_gate_up, layer.b_down)):
        return "the model has biases"
    spec = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.dtype(config.dtype))
    width, inner = config.hidden_size, config.num_heads * config.head_size
    products = [
        (width, (config.num_heads + 2 * config.num_kv_heads) * config.head_size, False),
        (inner, width, False),
        (width, 2 * config.intermediate_size, True),
        (config.intermediate_size, width, False),
        (width, config.vocab_size, False),
    ]
    named = _named("skinny_matmul", implementation)
    for inputs, outputs, gate_up in products:
        found = pallas_kernels.support("skinny_matmul", named, spec((num_rows, inputs)), spec((outputs, inputs)), gate_up=gate_up)
        if found.implementation in (None, "reference") and named != "reference":
            why = found.reasons[named or "pallas_triton"]
            return f"{num_rows} x {inputs} numbers times a weight of {outputs} x {inputs}: {why}"
    return None


def _matrix(weight: jax.Array, out_axes: int) -> jax.Array:
    """``[*outputs, *inputs]`` as ``[N, D]``."""
    outputs = functools.reduce(lambda n, size: n * size, weight.shape[:out_axes], 1)
    return weight.reshape(outputs, -1)


def _with_norm(output: pallas_kernels.MatmulOutput) -> tuple[jax.Array, jax.Array, jax.Array]:
    assert output.scaled is not None and output.sum_squares is not None
    return output.out, output.scaled, output.sum_squares


def _named(op: str, implementation: str | None) -> str | None:
    """A name where the op has it: ``mosaic_gpu`` is one of attention alone."""
    return implementation if implementation in pallas_kernels.support(op).reasons else None
