"""A GGUF's metadata, translated to a Hugging Face ``config.json`` and ``generation_config.json``.

Strict as the rest: a ``llama.*`` key that is neither translated nor known to be harmless is refused by name, because llama.cpp
lets such keys change the arithmetic (experts, sliding windows, soft caps, scales).
Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and llama.cpp's `llama-arch.cpp`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType

from pagedjax.checkpoint.gguf_file import GgufTensor
from pagedjax.checkpoint.gguf_rope import Floats, recover_llama3
from pagedjax.errors import CheckpointError, UnsupportedModelError

# Read below, or saying nothing about the arithmetic.
_KNOWN = frozenset(
    "block_count context_length embedding_length feed_forward_length attention.head_count attention.head_count_kv attention.key_length "
    "attention.value_length attention.layer_norm_rms_epsilon rope.freq_base rope.dimension_count rope.scaling.type rope.scaling.factor "
    "rope.scaling.original_context_length rope.scaling.finetuned rope.scale_linear vocab_size tensor_data_layout".split()
)
# Keys that change the arithmetic, with the only values under which they do not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "expert_used_count": (0,),
    "use_parallel_residual": (False,),
    "attention.causal": (True,),
    "attention.sliding_window": (0,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.scale": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "embedding_scale": (0, 1),
    "rope.scaling.attn_factor": (0, 1),
}


def check_architecture(metadata: Mapping[str, Any], path: object) -> None:
    """Refuse by name anything that is not one whole Llama model.

    Raises:
      CheckpointError: no architecture given.
      UnsupportedModelError: another architecture, an adapter or projector file, one part of a split file, a key that is not built.
    """
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise CheckpointError(f"{path}: has no metadata 'general.architecture'")
    kind = metadata.get("general.type", "model")
    if kind != "model":
        raise UnsupportedModelError(f"{path}: holds a GGUF of type {kind!r}, not a model")
    if architecture != "llama":
        raise UnsupportedModelError(f"{path}: GGUF architecture {architecture!r} is not built; built is 'llama'")
    if metadata.get("split.count", 0) not in (0, 1):
        raise UnsupportedModelError(
            f"{path}: is one of {metadata['split.count']} parts of a split GGUF, which is not built; "
            "join them with llama.cpp's gguf-split --merge"
        )
    for key, value in metadata.items():
        short = key.removeprefix("llama.")
        if short == key or short in _KNOWN:
            continue
        if short not in _NEUTRAL:
            raise UnsupportedModelError(f"{path}: unknown metadata {key}={value!r}; it may change the computation, so it is not ignored")
        if value not in _NEUTRAL[short]:
            raise UnsupportedModelError(f"{path}: metadata {key}={value!r} changes the computation and is not built")


def hf_config(metadata: Mapping[str, Any], tensors: Mapping[str, GgufTensor], rope_divisors: Floats | None, path: object) -> dict[str, Any]:
    """The model's config in Hugging Face's form.

    Args:
      metadata: the file's metadata, past `check_architecture`.
      tensors: the file's tensors by GGUF name; they tell what is tied, biased and quantised.
      rope_divisors: float ``[H // 2]``, the content of ``rope_freqs.weight``; None without one.
      path: for messages.

    Raises:
      CheckpointError: a key or the embedding is missing, or two facts contradict each other.
      UnsupportedModelError: the model needs something that is not built. The message names the key.
    """
    read = _Reader(metadata, path)
    num_heads = read.integer("attention.head_count")
    num_kv_heads = read.integer("attention.head_count_kv", num_heads)
    hidden_size = read.integer("embedding_length")
    rotary_size = read.integer("rope.dimension_count", 0)
    head_size = read.integer("attention.key_length", 0) or rotary_size or hidden_size // num_heads
    value_size = read.integer("attention.value_length", head_size)
    if rotary_size not in (0, head_size):
        raise UnsupportedModelError(
            f"{path}: llama.rope.dimension_count={rotary_size} turns part of a head of {head_size}, which is not built"
        )
    if value_size != head_size:
        raise UnsupportedModelError(
            f"{path}: llama.attention.value_length={value_size} differs from the key's {head_size}, which is not built"
        )
    if head_size % 2:
        raise CheckpointError(f"{path}: the head size is {head_size}, which is odd; rotary embedding turns pairs")
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{path}: has no tensor 'token_embd.weight'")
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    if not isinstance(tokens, list) or len(tokens) > embedding.shape[0]:
        what = f"{len(tokens)} tokens" if isinstance(tokens, list) else f"metadata tokenizer.ggml.tokens={tokens!r}"
        raise CheckpointError(f"{path}: has {what} but 'token_embd.weight' has {embedding.shape[0]} rows")
    theta = read.number("rope.freq_base", 10000.0)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": embedding.shape[0],  # a padded embedding has more rows than there are tokens
        "hidden_size": hidden_size,
        "intermediate_size": read.integer("feed_forward_length"),
        "num_hidden_layers": read.integer("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_size,
        "max_position_embeddings": read.integer("context_length"),
        "rms_norm_eps": read.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(read, theta, head_size, rope_divisors),
        "attention_bias": _has_bias(tensors, ("attn_q", "attn_k", "attn_v", "attn_output"), path),
        "mlp_bias": _has_bias(tensors, ("ffn_gate", "ffn_up", "ffn_down"), path),
        "tie_word_embeddings": "output.weight" not in tensors,
        "torch_dtype": _torch_dtype(tensors),
    }
    ids = {"bos_token_id": read.token("bos"), "eos_token_id": read.token("eos"), "pad_token_id": read.token("padding")}
    return config | {key: token for key, token in ids.items() if token is not None}


def hf_generation_config(metadata: Mapping[str, Any], path: object) -> dict[str, Any]:
    """BOS and every id that ends an answer: ``eos``, and ``eot`` (end of turn) and ``eom`` (end of message) where the file has them.

    Raises:
      CheckpointError: such an id is not a token id.
    """
    read = _Reader(metadata, path)
    config: dict[str, Any] = {}
    bos = read.token("bos")
    if bos is not None:
        config["bos_token_id"] = bos
    ends = list(dict.fromkeys(token for name in ("eos", "eot", "eom") if (token := read.token(name)) is not None))
    if ends:
        config["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return config


class _Reader:
    def __init__(self, metadata: Mapping[str, Any], path: object) -> None:
        self.metadata, self.path = metadata, path

    def _value(self, key: str) -> Any:
        value = self.metadata.get("llama." + key)
        if not isinstance(value, list):
            return value
        if not value or any(item != value[0] for item in value):  # a list has one value a layer
            raise UnsupportedModelError(f"{self.path}: llama.{key} differs between layers ({value[:4]}...), which is not built")
        return value[0]

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._value(key)
        value = default if value is None else value
        if value is None:
            raise CheckpointError(f"{self.path}: has no metadata 'llama.{key}'")
        if isinstance(value, bool) or not isinstance(value, int) or value < 0 or (value == 0 and default != 0):
            raise CheckpointError(f"{self.path}: metadata llama.{key} is {value!r}; it must be a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key)
        value = default if value is None else value
        if value is None:
            raise CheckpointError(f"{self.path}: has no metadata 'llama.{key}'")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            raise CheckpointError(f"{self.path}: metadata llama.{key} is {value!r}; it must be a finite number that is not negative")
        return float(str(np.float32(value)))  # GGUF holds float32: 1e-5, not 9.999999747378752e-06

    def token(self, name: str) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        value = self.metadata.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise CheckpointError(f"{self.path}: metadata {key} is {value!r}; it must be a token id")
        return value


def _rope_scaling(read: _Reader, theta: float, head_size: int, divisors: Floats | None) -> dict[str, Any] | None:
    path = read.path
    factor = read.number("rope.scaling.factor", 0.0) or read.number("rope.scale_linear", 0.0)
    # llama.cpp takes a factor without a type as linear, and 0 as "not given".
    kind = read.metadata.get("llama.rope.scaling.type", "linear" if factor else "none")
    if kind not in ("none", "linear"):
        raise UnsupportedModelError(
            f"{path}: llama.rope.scaling.type={kind!r} is not built; built are 'none', 'linear' and llama3's rope_freqs.weight"
        )
    linear = kind == "linear" and factor not in (0.0, 1.0)
    if divisors is None:
        return {"rope_type": "linear", "factor": factor} if linear else None
    if linear:
        raise UnsupportedModelError(f"{path}: has both rope_freqs.weight and llama.rope.scaling.factor={factor}, which is not built")
    scaling = recover_llama3(divisors, theta, head_size)
    if scaling is None:
        raise UnsupportedModelError(f"{path}: rope_freqs.weight holds frequency factors that are not Llama 3's rule, which is not built")
    return None if scaling["rope_type"] == "default" else scaling


def _has_bias(tensors: Mapping[str, GgufTensor], parts: tuple[str, ...], path: object) -> bool:
    """Hugging Face's Llama has all of these biases or none."""
    present = [part for part in parts if any(name.endswith(f".{part}.bias") for name in tensors)]
    if present and len(present) < len(parts):
        raise UnsupportedModelError(f"{path}: has biases on {', '.join(present)} but not on all of {', '.join(parts)}, which is not built")
    return bool(present)


def _torch_dtype(tensors: Mapping[str, GgufTensor]) -> str:
    """The matrices' type where they are plain floats; bfloat16 for quantised ones, which have fewer digits still."""
    kinds = {tensor.kind for tensor in tensors.values() if len(tensor.shape) > 1}
    if kinds <= {GGMLQuantizationType.F32}:
        return "float32"
    return "float16" if kinds <= {GGMLQuantizationType.F32, GGMLQuantizationType.F16} else "bfloat16"
