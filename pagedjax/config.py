"""The model's shape and arithmetic as one frozen value, read strictly from a Hugging Face ``config.json``.

Strict means: a key that changes the mathematics and is not built is an error that names it. Keys that do not
change it (names, training settings, cache hints) are listed in `_IGNORED`; anything else is unknown and refused.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

from pagedjax.errors import CheckpointError, ConfigError, UnsupportedModelError

DTYPES = ("float32", "bfloat16", "float16")
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

# Keys that say nothing about the arithmetic of a step, as Llama-family configs of transformers 4 and 5 carry them.
_IGNORED = frozenset(
    "_name_or_path architectures attention_dropout auto_map bos_token_id dtype eos_token_id id2label initializer_range is_llama_config "
    "label2id max_position_embeddings model_type output_attentions output_hidden_states pad_token_id return_dict rope_interleaved "
    "torch_dtype torchscript transformers_version unsloth_version use_cache _attn_implementation _attn_implementation_autoset problem_type "
    "chunk_size_feed_forward is_encoder_decoder transformers.js_config unsloth_fixed hidden_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim intermediate_size vocab_size rms_norm_eps rope_theta rope_scaling rope_parameters tie_word_embeddings "
    "attention_bias mlp_bias hidden_act pretraining_tp gradient_checkpointing tokenizer_class finetuning_task task_specific_params prefix "
    "_flash_attn_2_enabled _commit_hash max_sequence_length torch_compile "
    # of generation, where old checkpoints had no generation_config.json
    "max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p "
    "repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores "
    "return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty "
    "suppress_tokens begin_suppress_tokens sep_token_id decoder_start_token_id".split()
)
# Keys that would change the arithmetic, with the only values under which they do not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "pretraining_tp": (1, None),  # sums in slices; the product is the same, the rounding is not
    "rope_interleaved": (False, None),
    "is_encoder_decoder": (False, None),
    "is_decoder": (False, None),
    "pruned_heads": ({}, None),
    "tf_legacy_loss": (False, None),
    "use_bfloat16": (False, None),
    "sliding_window": (None,),
    "use_sliding_window": (False, None),
    "attention_multiplier": (None,),
    "embedding_multiplier": (None, 1, 1.0),
    "residual_multiplier": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "partial_rotary_factor": (None, 1, 1.0),
    "quantization_config": (None,),
    "no_rope_layers": (None, []),
    "add_cross_attention": (False, None),
    "tie_encoder_decoder": (False, None),
    "cross_attention_hidden_size": (None,),
}
# What each kind of rotary embedding reads from config.json beside its base.
_ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding.

    Attributes:
      theta: base of the geometric series of wavelengths.
      kind: ``"default"``, ``"linear"`` (positions divided by `factor`) or ``"llama3"`` (long wavelengths stretched by `factor`,
        short ones kept, a smooth ramp between; Llama 3.1's rule).
      factor, low_freq_factor, high_freq_factor, original_max_position: the rule's constants; unused ones keep their defaults.
    """

    theta: float = 10000.0
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def __post_init__(self) -> None:
        if self.kind not in _ROPE_KEYS:
            raise UnsupportedModelError(f"rope kind {self.kind!r} is not built; built are {', '.join(_ROPE_KEYS)}")
        for field in ("theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ConfigError(f"rope {field} is {value!r}; it must be a positive finite number")

    def inverse_frequencies(self, head_size: int) -> tuple[float, ...]:
        """Radians a position for each of the ``head_size // 2`` pairs, in float64 rounded to float32 only by the user."""
        plain = [self.theta ** (-2.0 * i / head_size) for i in range(head_size // 2)]
        if self.kind == "linear":
            return tuple(f / self.factor for f in plain)
        if self.kind == "llama3":
            return tuple(f * self._llama3_ratio(f) for f in plain)
        return tuple(plain)

    def _llama3_ratio(self, frequency: float) -> float:
        wavelength = 2.0 * math.pi / frequency
        if wavelength < self.original_max_position / self.high_freq_factor:
            return 1.0
        if wavelength > self.original_max_position / self.low_freq_factor:
            return 1.0 / self.factor
        ramp = (self.original_max_position / wavelength - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return (1.0 - ramp) / self.factor + ramp


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Everything static about a Llama-family model. Hashable, so it can be a static argument of `jax.jit`.

    Attributes (shape letters in brackets): vocab_size [V], hidden_size [D], intermediate_size [F], num_layers [L], num_heads [N],
      num_kv_heads [K], head_size [H], rms_norm_eps, rope, tie_word_embeddings, attention_bias (on q, k, v and o), mlp_bias,
      max_model_len: the most tokens, prompt and output together, that a request may have,
      dtype: of weights, activations and the KV cache; one of `DTYPES`.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rms_norm_eps: float = 1e-5
    rope: RopeConfig = RopeConfig()
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    max_model_len: int = 2048
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for field in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_size",
            "max_model_len",
        ):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{field} is {value!r}; it must be a positive integer")
        if isinstance(self.rms_norm_eps, bool) or not 0 < self.rms_norm_eps < math.inf:
            raise ConfigError(f"rms_norm_eps is {self.rms_norm_eps!r}; it must be a positive finite number")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_size % 2:
            raise ConfigError(f"head_size {self.head_size} is odd; rotary embedding turns pairs")
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype {self.dtype!r} is not one of {', '.join(DTYPES)}")

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head [G]."""
        return self.num_heads // self.num_kv_heads

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one element of `dtype`."""
        return _BYTES[self.dtype]

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one token's keys and values take over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_size * self.dtype_bytes

    @property
    def num_parameters(self) -> int:
        """Weights of the model, a tied embedding counted once."""
        d, f, n, k, h = self.hidden_size, self.intermediate_size, self.num_heads, self.num_kv_heads, self.head_size
        layer = d * h * (n + 2 * k) + n * h * d + 3 * d * f + 2 * d
        if self.attention_bias:
            layer += h * (n + 2 * k) + d
        if self.mlp_bias:
            layer += 2 * f + d
        return self.num_layers * layer + self.vocab_size * d * (1 if self.tie_word_embeddings else 2) + d

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, dtype: str = "auto", max_model_len: int | None = None) -> ModelConfig:
        """Read a Hugging Face ``config.json`` (transformers 4 and 5 spellings).

        Args:
          config: the parsed file.
          dtype: one of `DTYPES`, or ``"auto"`` for the checkpoint's own (bfloat16 when it names none).
          max_model_len: the most tokens of a request; by default ``max_position_embeddings``, which it may not exceed.

        Raises:
          UnsupportedModelError: an architecture, key or value that is not built.
          CheckpointError: a missing key, or a value that makes no sense.
          ConfigError: an unusable `dtype` or `max_model_len`, or sizes that do not fit together. Each message names key and value.
        """
        _check_architecture(config)
        _check_keys(config)
        need = _Reader(config)
        positions = need.integer("max_position_embeddings", 2048)
        if max_model_len is not None:
            if isinstance(max_model_len, bool) or not isinstance(max_model_len, int) or max_model_len < 1:
                raise ConfigError(f"max_model_len is {max_model_len!r}; it must be a positive integer")
            if max_model_len > positions:
                raise ConfigError(f"max_model_len {max_model_len} exceeds the {positions} positions that the model was made for")
        num_heads = need.integer("num_attention_heads")
        hidden_size = need.integer("hidden_size")
        if config.get("head_dim") is None and hidden_size % num_heads:
            raise CheckpointError(
                f"hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads} and head_dim is not given"
            )
        return cls(
            vocab_size=need.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=need.integer("intermediate_size"),
            num_layers=need.integer("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=need.integer("num_key_value_heads", num_heads),
            head_size=need.integer("head_dim", hidden_size // num_heads),
            rms_norm_eps=need.number("rms_norm_eps", 1e-6),
            rope=_rope(config),
            tie_word_embeddings=need.boolean("tie_word_embeddings"),
            attention_bias=need.boolean("attention_bias"),
            mlp_bias=need.boolean("mlp_bias"),
            max_model_len=positions if max_model_len is None else max_model_len,
            dtype=_dtype(config) if dtype == "auto" else dtype,
        )


class _Reader:
    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._config.get(key)
        value = default if value is None else value
        if value is None:
            raise CheckpointError(f"config.json has no {key!r}")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(f"config.json: {key} is {value!r}; it must be a positive integer")
        return value

    def number(self, key: str, default: float) -> float:
        value = self._config.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise CheckpointError(f"config.json: {key} is {value!r}; it must be a finite number")
        return float(value)

    def boolean(self, key: str) -> bool:
        value = self._config.get(key)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise CheckpointError(f"config.json: {key} is {value!r}; it must be true or false")
        return value


def _check_architecture(config: Mapping[str, Any]) -> None:
    architectures = config.get("architectures") or []
    model_type = config.get("model_type")
    if architectures and list(architectures) != ["LlamaForCausalLM"]:
        raise UnsupportedModelError(f"architecture {architectures[0]!r} is not built; built is LlamaForCausalLM")
    if model_type != "llama":
        raise UnsupportedModelError(f"model_type {model_type!r} is not built; built is 'llama'")


def _check_keys(config: Mapping[str, Any]) -> None:
    for key, value in config.items():
        if key == "layer_types":
            if value is not None and (not isinstance(value, list) or set(value) != {"full_attention"}):
                raise UnsupportedModelError(f"config.json: {key}={value!r} changes the computation and is not built")
        elif key in _NEUTRAL:
            if not any(value is ok or value == ok for ok in _NEUTRAL[key]):
                raise UnsupportedModelError(f"config.json: {key}={value!r} changes the computation and is not built")
        elif key not in _IGNORED:
            raise UnsupportedModelError(f"config.json: unknown key {key}={value!r}; it may change the computation, so it is not ignored")
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModelError(f"config.json: hidden_act={activation!r} is not built; built is 'silu'")


def _dtype(config: Mapping[str, Any]) -> str:
    name = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    name = str(name).removeprefix("torch.")
    if name not in DTYPES:
        raise UnsupportedModelError(f"config.json: dtype {name!r} is not one of {', '.join(DTYPES)}; choose one with dtype=")
    return name


def _rope(config: Mapping[str, Any]) -> RopeConfig:
    # transformers 5 writes one dict `rope_parameters` that holds rope_theta too; 4 writes rope_theta beside `rope_scaling`.
    parameters = config.get("rope_parameters")
    if parameters is not None and config.get("rope_scaling") is not None and parameters != config["rope_scaling"]:
        raise CheckpointError("config.json has both rope_parameters and rope_scaling and they differ")
    given = parameters if parameters is not None else config.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise CheckpointError(f"config.json: rope parameters are {given!r}; they must be an object")
    scaling = dict(given)
    named, old_kind = scaling.pop("rope_type", None), scaling.pop("type", None)
    if named is not None and old_kind is not None and named != old_kind:
        raise CheckpointError(f"config.json: rope_type={named!r} and type={old_kind!r} differ")
    kind: Any = named or old_kind or "default"
    theta = scaling.pop("rope_theta", None)
    theta = config.get("rope_theta", 10000.0) if theta is None else theta
    partial = scaling.pop("partial_rotary_factor", None)
    if partial not in (None, 1, 1.0):
        raise UnsupportedModelError(f"config.json: partial_rotary_factor={partial!r} changes the computation and is not built")
    if kind not in _ROPE_KEYS:
        raise UnsupportedModelError(f"config.json: rope_type {kind!r} is not built; built are {', '.join(_ROPE_KEYS)}")
    missing, unknown = set(_ROPE_KEYS[kind]) - set(scaling), set(scaling) - set(_ROPE_KEYS[kind])
    if missing or unknown:
        what = f"lacks {sorted(missing)}" if missing else f"has unknown {sorted(unknown)}"
        raise CheckpointError(f"config.json: rope_type {kind!r} {what}")
    values = {"theta": theta, **scaling}
    for key, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise CheckpointError(f"config.json: rope {key} is {value!r}; it must be a positive finite number")
        if key == "original_max_position_embeddings" and value != int(value):
            raise CheckpointError(f"config.json: rope {key} is {value!r}; it must be an integer")
    if kind == "llama3" and not scaling["low_freq_factor"] < scaling["high_freq_factor"]:
        raise CheckpointError(
            f"config.json: rope low_freq_factor {scaling['low_freq_factor']} must be below high_freq_factor {scaling['high_freq_factor']}"
        )
    plain = RopeConfig()
    return RopeConfig(
        theta=float(theta),
        kind=kind,
        factor=float(scaling.get("factor", plain.factor)),
        low_freq_factor=float(scaling.get("low_freq_factor", plain.low_freq_factor)),
        high_freq_factor=float(scaling.get("high_freq_factor", plain.high_freq_factor)),
        original_max_position=int(scaling.get("original_max_position_embeddings", plain.original_max_position)),
    )
