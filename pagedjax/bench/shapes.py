"""Named models to measure with random weights: speed does not depend on what the weights are."""

from __future__ import annotations

from pagedjax.config import ModelConfig, RopeConfig
from pagedjax.errors import ConfigError

_LLAMA_3 = RopeConfig(theta=500000.0, kind="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192)


def _llama(layers: int, hidden: int, mlp: int, heads: int, kv_heads: int, head_size: int, vocab: int, rope: RopeConfig) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        rms_norm_eps=1e-5,
        rope=rope,
        tie_word_embeddings=True,
        max_model_len=131072 if vocab > 100_000 else 2048,
        dtype="bfloat16",
    )


# The public configs of these models; "tiny" is for trying the bench itself on a CPU.
SHAPES: dict[str, ModelConfig] = {
    "llama-3.2-1b": _llama(16, 2048, 8192, 32, 8, 64, 128256, _LLAMA_3),
    "llama-3.2-3b": _llama(28, 3072, 8192, 24, 8, 128, 128256, _LLAMA_3),
    "smollm2-135m": _llama(30, 576, 1536, 9, 3, 64, 49152, RopeConfig(theta=100000.0)),
    "tiny": _llama(2, 64, 128, 4, 2, 16, 512, RopeConfig()),
}


def shape_config(name: str) -> ModelConfig:
    """The config of a named shape.

    Raises:
      ConfigError: an unknown name; the message lists the known ones.
    """
    if name not in SHAPES:
        raise ConfigError(f"shape is {name!r}; there are {', '.join(SHAPES)}")
    return SHAPES[name]
