"""The weights: one declaration for each, from which loading, sharding and random initialisation all read.

Canonical form: one entry a layer (not stacked), query, key and value fused by KV head, gate and up fused, every matrix
output-major as in the checkpoints. Hugging Face names map to it and back by reshapes and concatenations alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pagedjax.config import ModelConfig
from pagedjax.errors import CheckpointError

# Axis of the device mesh over which heads, MLP width and vocabulary are split (tensor parallelism).
MESH_AXIS = "tp"


@struct.dataclass
class LayerParams:
    """One transformer layer. Biases are ``None`` where the model has none.

    Attributes:
      attention_norm: [D]
      wqkv: [K, G + 2, H, D], for each KV head its G query heads, then its key, then its value
      bqkv: [K, G + 2, H]
      wo: [D, N, H]
      bo: [D]
      mlp_norm: [D]
      w_gate_up: [2, F, D]
      b_gate_up: [2, F]
      w_down: [D, F]
      b_down: [D]
    """

    attention_norm: Any
    wqkv: Any
    bqkv: Any
    wo: Any
    bo: Any
    mlp_norm: Any
    w_gate_up: Any
    b_gate_up: Any
    w_down: Any
    b_down: Any


@struct.dataclass
class Params:
    """All weights: embedding [V, D], layers, final norm [D], output head [V, D] (``None`` when tied to the embedding)."""

    embedding: Any
    layers: tuple[LayerParams, ...]
    final_norm: Any
    lm_head: Any


@dataclasses.dataclass(frozen=True)
class Part:
    """A Hugging Face tensor, its shape there, and the shape it takes inside the canonical weight."""

    name: str
    hf_shape: tuple[int, ...]
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Weight:
    """The declaration of one weight.

    Attributes:
      shape: canonical shape.
      split: the axis that a device mesh divides, or ``None`` for replication.
      init_std: standard deviation of a random weight; 0 gives zeros; ``None`` gives ones.
      parts: Hugging Face tensors that make it up, concatenated along `concat_axis`.
      concat_axis: see `parts`.
    """

    shape: tuple[int, ...]
    split: int | None
    init_std: float | None
    parts: tuple[Part, ...]
    concat_axis: int = 0


def declare(config: ModelConfig) -> Params:
    """A `Params` whose leaves are `Weight` declarations."""
    d, f, v = config.hidden_size, config.intermediate_size, config.vocab_size
    n, k, g, h = config.num_heads, config.num_kv_heads, config.group_size, config.head_size
    std = 0.02

    def one(
        name: str, hf_shape: tuple[int, ...], shape: tuple[int, ...] | None = None, *, split: int | None, init_std: float | None
    ) -> Weight:
        shape = hf_shape if shape is None else shape
        return Weight(shape, split, init_std, (Part(name, hf_shape, shape),))

    def norm(name: str) -> Weight:
        return one(name, (d,), split=None, init_std=None)

    def layer(i: int) -> LayerParams:
        at = f"model.layers.{i}."
        projections = (("q_proj", g), ("k_proj", 1), ("v_proj", 1))

        def qkv(suffix: str, tail: tuple[int, ...], init_std: float) -> Weight:
            parts = tuple(Part(f"{at}self_attn.{p}.{suffix}", (k * m * h, *tail), (k, m, h, *tail)) for p, m in projections)
            return Weight((k, g + 2, h, *tail), 0, init_std, parts, concat_axis=1)

        def gate_up(suffix: str, tail: tuple[int, ...], init_std: float) -> Weight:
            parts = tuple(Part(f"{at}mlp.{p}.{suffix}", (f, *tail), (1, f, *tail)) for p in ("gate_proj", "up_proj"))
            return Weight((2, f, *tail), 1, init_std, parts)

        return LayerParams(
            attention_norm=norm(at + "input_layernorm.weight"),
            wqkv=qkv("weight", (d,), std),
            bqkv=qkv("bias", (), std) if config.attention_bias else None,
            wo=one(at + "self_attn.o_proj.weight", (d, n * h), (d, n, h), split=1, init_std=std),
            bo=one(at + "self_attn.o_proj.bias", (d,), split=None, init_std=std) if config.attention_bias else None,
            mlp_norm=norm(at + "post_attention_layernorm.weight"),
            w_gate_up=gate_up("weight", (d,), std),
            b_gate_up=gate_up("bias", (), std) if config.mlp_bias else None,
            w_down=one(at + "mlp.down_proj.weight", (d, f), split=1, init_std=std),
            b_down=one(at + "mlp.down_proj.bias", (d,), split=None, init_std=std) if config.mlp_bias else None,
        )

    return Params(
        embedding=one("model.embed_tokens.weight", (v, d), split=0, init_std=std),
        layers=tuple(layer(i) for i in range(config.num_layers)),
        final_norm=norm("model.norm.weight"),
        lm_head=None if config.tie_word_embeddings else one("lm_head.weight", (v, d), split=0, init_std=std),
    )


def check_mesh(config: ModelConfig, mesh: Mesh) -> None:
    """Refuse a mesh that the model's heads, MLP width or vocabulary cannot be divided over.

    Raises:
      ValueError: the mesh has other axes than `MESH_AXIS`, axes of an explicit type, or a size that does not divide.
    """
    if mesh.axis_names != (MESH_AXIS,):
        raise ValueError(f"the mesh has axes {mesh.axis_names}; it must have the one axis {MESH_AXIS!r}")
    if any(kind != jax.sharding.AxisType.Auto for kind in mesh.axis_types):
        raise ValueError(f"the mesh has axis types {mesh.axis_types}; make it with axis_types=(AxisType.Auto,)")
    for name, size in (
        ("num_kv_heads", config.num_kv_heads),
        ("intermediate_size", config.intermediate_size),
        ("vocab_size", config.vocab_size),
    ):
        if size % mesh.size:
            raise ValueError(f"{name} {size} cannot be divided over {mesh.size} devices")


def sharding_of(weight: Weight, mesh: Mesh) -> NamedSharding:
    """Where a weight's pieces live on the mesh."""
    spec = [None] * len(weight.shape)
    if weight.split is not None:
        spec[weight.split] = MESH_AXIS  # type: ignore[call-overload]
    return NamedSharding(mesh, PartitionSpec(*spec))


def hf_names(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a Hugging Face checkpoint of this model holds, with its shape."""
    return {part.name: part.hf_shape for weight in jax.tree.leaves(declare(config)) for part in weight.parts}


def init_params(config: ModelConfig, key: jax.Array, mesh: Mesh | None = None) -> Params:
    """Random weights: normal with standard deviation 0.02, norms one. For tests and speed measurements.

    Args:
      config: the model.
      key: a `jax.random.key`.
      mesh: shard the weights over it.
    """
    weights, tree = jax.tree.flatten(declare(config))
    keys = jax.random.split(key, len(weights))

    def make(weight: Weight, weight_key: jax.Array) -> jax.Array:
        if weight.init_std is None:
            value = jnp.ones(weight.shape, config.dtype)
        else:
            value = (jax.random.normal(weight_key, weight.shape, jnp.float32) * weight.init_std).astype(config.dtype)
        return value if mesh is None else jax.device_put(value, sharding_of(weight, mesh))

    return jax.tree.unflatten(tree, [make(w, k) for w, k in zip(weights, keys, strict=True)])


def params_from_hf(read: Callable[[str], np.ndarray], config: ModelConfig, mesh: Mesh | None = None) -> Params:
    """Assemble the weights from Hugging Face tensors, one weight at a time, straight to the device.

    Args:
      read: gives a tensor by its Hugging Face name; called once for each name of `hf_names`.
      config: the model; its dtype is what the weights are cast to.
      mesh: shard the weights over it.

    Raises:
      CheckpointError: a tensor of another shape or of a type that is not floating point.
    """
    dtype = jnp.dtype(config.dtype)

    def part(p: Part) -> np.ndarray:
        value = read(p.name)
        if tuple(value.shape) != p.hf_shape:
            raise CheckpointError(f"tensor {p.name} has shape {tuple(value.shape)}; the config asks for {p.hf_shape}")
        if not jnp.issubdtype(value.dtype, jnp.floating):
            raise CheckpointError(f"tensor {p.name} has dtype {value.dtype}; weights are floating point")
        return value.astype(dtype).reshape(p.shape)

    def make(weight: Weight) -> jax.Array:
        parts = [part(p) for p in weight.parts]
        value = parts[0] if len(parts) == 1 else np.concatenate(parts, weight.concat_axis)
        return jax.device_put(value, None if mesh is None else sharding_of(weight, mesh))

    return jax.tree.map(make, declare(config))


def params_to_hf(params: Params, config: ModelConfig) -> dict[str, np.ndarray]:
    """The inverse of `params_from_hf`: Hugging Face names and layouts, on the host."""
    out: dict[str, np.ndarray] = {}

    def put(weight: Weight, value: jax.Array) -> None:
        sizes = [p.shape[weight.concat_axis] for p in weight.parts]
        pieces = np.split(np.asarray(value), np.cumsum(sizes)[:-1], axis=weight.concat_axis)
        for p, piece in zip(weight.parts, pieces, strict=True):
            out[p.name] = np.ascontiguousarray(piece).reshape(p.hf_shape)

    jax.tree.map(put, declare(config), params)
    return out


def params_from_hf_dict(tensors: Mapping[str, np.ndarray], config: ModelConfig, mesh: Mesh | None = None) -> Params:
    """`params_from_hf` from a dict, strict about names.

    Raises:
      CheckpointError: missing or unexpected names, all of them listed.
    """
    check_names(frozenset(tensors), config, "the dict")
    return params_from_hf(lambda name: np.asarray(tensors[name]), config, mesh)


def check_names(names: frozenset[str], config: ModelConfig, source: str) -> None:
    """Raise `CheckpointError` listing the names that are missing or unexpected."""
    expected = hf_names(config)
    for what, wrong in (("lacks", sorted(expected.keys() - names)), ("has unexpected", sorted(names - expected.keys()))):
        if wrong:
            shown = ", ".join(wrong[:8]) + (f" and {len(wrong) - 8} more" if len(wrong) > 8 else "")
            raise CheckpointError(f"{source} {what} {len(wrong)} tensor{'s' if len(wrong) > 1 else ''}: {shown}")
