"""The least time that a workload can take on a device whose copy bandwidth and matmul rate were measured."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pagedjax.bench.workload import Workload
from pagedjax.config import ModelConfig
from pallas_kernels.tuning.timing import bandwidths, measure


@dataclasses.dataclass(frozen=True)
class Limits:
    """What the device did when it had nothing else to do.

    Attributes:
      copy_bytes_per_s: of a large copy, bytes read plus bytes written.
      matmul_flops_per_s: of a large matrix product in the model's dtype, random data, two operations a multiply-add.
    """

    copy_bytes_per_s: float
    matmul_flops_per_s: float


def measure_limits(dtype: str, *, copy_bytes: int | None = None, matmul_size: int | None = None) -> Limits:
    """Measure them; sizes default to some that suit the platform. Takes a second or two."""
    on_gpu = jax.default_backend() == "gpu"
    copy_bytes = copy_bytes or (2 << 30 if on_gpu else 64 << 20)
    size = matmul_size or (8192 if on_gpu else 1024)
    a, b = (jax.random.normal(jax.random.key(i), (size, size), jnp.dtype(dtype)) for i in (0, 1))
    dot = jax.jit(lambda a, b: a @ b)
    (timing,) = measure([lambda i: dot(a, b)], [10])
    return Limits(bandwidths(copy_bytes)["copy"] * 1e12, 2 * size**3 / (timing.us * 1e-6))


def matmul_parameters(config: ModelConfig) -> int:
    """Weights that every decoded token is multiplied with: all but norms, biases and an embedding that is not also the head."""
    attention = config.hidden_size * config.head_size * (2 * config.num_heads + 2 * config.num_kv_heads)
    mlp = 3 * config.hidden_size * config.intermediate_size
    return config.num_layers * (attention + mlp) + config.hidden_size * config.vocab_size


def decode_step_s(config: ModelConfig, limits: Limits, contexts: list[int] | tuple[int, ...]) -> float:
    """A decode step of rows with these contexts: weights and KV read once, or the matmuls, whichever takes longer."""
    num_bytes = matmul_parameters(config) * config.dtype_bytes + sum(contexts) * config.kv_bytes_per_token
    flops = 2 * matmul_parameters(config) * len(contexts)
    return max(num_bytes / limits.copy_bytes_per_s, flops / limits.matmul_flops_per_s)


def prefill_s(config: ModelConfig, limits: Limits, prompt_lens: list[int]) -> float:
    """The matmuls and causal attention of the prompts, the output head for their last tokens alone."""
    layers = matmul_parameters(config) - config.hidden_size * config.vocab_size
    flops = 2 * layers * sum(prompt_lens) + 2 * config.hidden_size * config.vocab_size * len(prompt_lens)
    flops += sum(2 * n * n for n in prompt_lens) * config.num_layers * config.num_heads * config.head_size
    return max(flops / limits.matmul_flops_per_s, layers * config.dtype_bytes / limits.copy_bytes_per_s)


def workload_s(config: ModelConfig, limits: Limits, workload: Workload, max_num_seqs: int) -> float:
    """All of it, with as many rows a step as answers are left, at most `max_num_seqs`; the order in which they run is left open."""
    seconds = prefill_s(config, limits, [len(p) for p in workload.prompts])
    # Each answer's first token comes from its prompt. Rows are packed as full as can be: sum of tokens over steps of full width.
    steps = [n - 1 for n in workload.output_lens]
    kv = sum(sum(range(len(p) + 1, len(p) + 1 + n)) for p, n in zip(workload.prompts, steps, strict=True)) * config.kv_bytes_per_token
    num_steps = max(max(steps, default=0), -(-sum(steps) // max_num_seqs))
    weights = matmul_parameters(config)
    reading = (num_steps * weights * config.dtype_bytes + kv) / limits.copy_bytes_per_s
    return seconds + max(reading, 2 * weights * sum(steps) / limits.matmul_flops_per_s)
