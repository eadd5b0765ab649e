"""How an engine runs: limits, sizes of a step, and the padded sizes that steps are compiled for. No JAX."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

from pagedjax.allocator import blocks_for
from pagedjax.config import ModelConfig
from pagedjax.errors import ConfigError

_TOKENS_PER_PREFILL_ROW = 16  # a step of T tokens has room for T / 16 chunks: shorter ones are rare


_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Settings of an `Engine`. In float32 none of them changes a token, but for `kv_cache_dtype` and for where an answer is cut.

    Attributes:
      max_num_seqs: the most requests that run side by side.
      max_model_len: the most tokens of prompt and answer together; ``None`` for what the model was made for.
      block_size: tokens a KV block, a power of two.
      token_budget: the most tokens in a step, a decode row counting 1; longer prompts are cut in chunks.
      window: decode steps in a dispatch while no prompt waits.
      num_kv_blocks: blocks of the KV cache; ``None`` takes what the memory allows.
      kv_cache_bytes: memory of the KV cache, where `num_kv_blocks` is not given; ``None`` takes what is left on the device.
      kv_cache_dtype: ``"auto"``, ``"float32"``, ``"bfloat16"`` or ``"float16"``. ``"auto"`` is the model's own dtype, but for bfloat16 on a
        CPU: XLA writes into a bfloat16 array there by converting all of it, so the cache is float32, which holds the same numbers.
      gpu_memory_utilization: the share of the device's memory for weights, workspace and KV cache together.
      enable_prefix_caching: whether requests share the blocks of equal prefixes.
      max_logprobs: the most log-probabilities a token that a request may ask for.
      logprobs_mode: ``"raw"``, of the model's own distribution; or ``"processed"``, of the one that a token is drawn from, after
        everything that a request asks for. The second costs a sort of the vocabulary at each token while somebody wants them. Of prompt
        tokens, it has temperature, top-k, top-p and min-p.
      max_device_stop_ids: stop ids a request that the device looks at; the host looks at the rest, a window later.
      max_bad_words: the most `bad_words` of several tokens a request, each spelling counted; those of one token do not count.
      max_bad_word_tokens: the most tokens of one.
      implementation: of the kernels; ``None`` picks the fastest here.
      fused_decode_rows: windows of up to so many rows run decode steps of few large kernels (`fused_decode`), which agree with the others
        up to the rounding of a 16-bit dtype; ``None`` where that was measured to be faster on this device, 0 nowhere.
      row_buckets: sizes of decode windows in rows; ``None`` for a default that suits the device. So are the next three.
      mixed_row_buckets: decode rows of a step with prefill chunks.
      token_buckets: prefill tokens of a step.
      width_buckets: columns of the block table.

    Raises:
      ConfigError: a setting out of range; the message names it.
    """

    max_num_seqs: int = 256
    max_model_len: int | None = None
    block_size: int = 16
    token_budget: int = 2048
    window: int = 8
    num_kv_blocks: int | None = None
    kv_cache_bytes: int | None = None
    kv_cache_dtype: str = "auto"
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    max_logprobs: int = 20
    logprobs_mode: Literal["raw", "processed"] = "raw"
    max_device_stop_ids: int = 8
    max_bad_words: int = 8
    max_bad_word_tokens: int = 8
    implementation: str | None = None
    fused_decode_rows: int | None = None
    row_buckets: tuple[int, ...] | None = None
    mixed_row_buckets: tuple[int, ...] | None = None
    token_buckets: tuple[int, ...] | None = None
    width_buckets: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        optional = ("max_model_len", "num_kv_blocks", "kv_cache_bytes")
        for name in (
            "max_num_seqs",
            "block_size",
            "token_budget",
            "window",
            "max_device_stop_ids",
            "max_bad_words",
            "max_bad_word_tokens",
            *optional,
        ):
            value = getattr(self, name)
            if name in optional and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} is {value!r}; it must be a positive integer")
        fused = self.fused_decode_rows
        if fused is not None and (isinstance(fused, bool) or not isinstance(fused, int) or fused < 0):
            raise ConfigError(f"fused_decode_rows is {fused!r}; it must be an integer of at least 0")
        if self.block_size & (self.block_size - 1):
            raise ConfigError(f"block_size is {self.block_size}; it must be a power of two")
        if self.kv_cache_dtype not in ("auto", *_ITEMSIZE):
            raise ConfigError(f"kv_cache_dtype is {self.kv_cache_dtype!r}; it must be one of auto, {', '.join(_ITEMSIZE)}")
        if self.logprobs_mode not in ("raw", "processed"):
            raise ConfigError(f"logprobs_mode is {self.logprobs_mode!r}; it must be raw or processed")
        logprobs = self.max_logprobs
        if isinstance(logprobs, bool) or not isinstance(logprobs, int) or not 0 <= logprobs <= 64:
            raise ConfigError(f"max_logprobs is {logprobs!r}; it must be an integer from 0 to 64")
        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, int | float) or not math.isfinite(share) or not 0 < share <= 1:
            raise ConfigError(f"gpu_memory_utilization is {share!r}; it must be above 0 and at most 1")
        for name in ("row_buckets", "mixed_row_buckets", "token_buckets", "width_buckets"):
            sizes = getattr(self, name)
            if sizes is not None and (
                not isinstance(sizes, tuple)
                or not sizes
                or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in sizes)
                or list(sizes) != sorted(set(sizes))
            ):
                raise ConfigError(f"{name} is {sizes!r}; it must be a tuple of positive integers, each larger than the one before")


def cache_dtype(asked: str, model_dtype: str, platform: str) -> str:
    """The dtype that `EngineConfig.kv_cache_dtype` means for a model of this dtype on ``"gpu"`` or ``"cpu"``."""
    if asked != "auto":
        return asked
    return "float32" if platform == "cpu" and model_dtype == "bfloat16" else model_dtype


def kv_block_bytes(config: ModelConfig, block_size: int, dtype: str) -> int:
    """Bytes of one block, keys and values of all layers. Llama-3.2-1B (16 layers, 8 heads of 64) in bfloat16: 32,768 a token."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_size * block_size * _ITEMSIZE[dtype]


@dataclasses.dataclass(frozen=True)
class Buckets:
    """Padded sizes, smallest first, the largest of each large enough for everything.

    Attributes:
      rows: of a decode window.
      mixed_rows: decode rows of a mixed step.
      tokens: prefill tokens of a mixed step.
      widths: columns of the block table.
    """

    rows: tuple[int, ...]
    mixed_rows: tuple[int, ...]
    tokens: tuple[int, ...]
    widths: tuple[int, ...]

    @property
    def num_executables(self) -> int:
        """How many there are: of sizes of windows and mixed steps, of a step with log-probabilities of prompts, and of setting tables."""
        return len(self.widths) * (len(self.rows) + len(self.mixed_rows) * len(self.tokens)) + 2

    def prefill_rows(self, num_tokens: int) -> int:
        """Chunks that a step of this many padded tokens has room for [C]."""
        return max(1, min(self.rows[-1], num_tokens // _TOKENS_PER_PREFILL_ROW))

    def prefill_size(self, num_tokens: int, num_rows: int) -> int:
        """The smallest padded number of tokens that holds the tokens and the chunks."""
        return next(t for t in self.tokens if t >= num_tokens and self.prefill_rows(t) >= num_rows)


def at_least(sizes: Sequence[int], n: int) -> int:
    """The smallest of `sizes`, in order, that is at least `n`."""
    return next(size for size in sizes if size >= n)


def make_buckets(config: EngineConfig, max_model_len: int, platform: str) -> Buckets:
    """The sizes of `config`, completed by defaults.

    A GPU pays little for padding and much for compiling, so it gets few sizes: at most 24 steps. On a CPU a padded row costs what a
    real one does, so the steps between sizes are smaller; they are compiled when they first occur.

    Args:
      config: of the engine.
      max_model_len: the most tokens of a request.
      platform: ``"gpu"`` or ``"cpu"``.
    """
    full = blocks_for(max_model_len, config.block_size)
    if platform == "gpu":
        ladders = dict(rows=(1, 8, 32, 64, 128), mixed_rows=(32,), tokens=(256,), widths=(512,))
    else:
        ladders = dict(rows=(1, 4, 16, 64, 256), mixed_rows=(1, 4, 16, 64, 256), tokens=(16, 64, 256, 1024), widths=(16, 64, 256, 1024))
    asked = dict(rows=config.row_buckets, mixed_rows=config.mixed_row_buckets, tokens=config.token_buckets, widths=config.width_buckets)
    largest = dict(rows=config.max_num_seqs, mixed_rows=config.max_num_seqs, tokens=max(config.token_budget, 16), widths=full)
    sizes = {}
    for name, ladder in ladders.items():
        given = asked[name]
        sizes[name] = (*(n for n in (ladder if given is None else given) if n < largest[name]), largest[name])
    return Buckets(**sizes)
