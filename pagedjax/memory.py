"""How many KV blocks fit on a device: pure functions of byte counts, so that the numbers can be checked by hand."""

from __future__ import annotations

import dataclasses

from pagedjax.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """One device's memory in bytes.

    Attributes:
      total_bytes: all of it.
      limit_bytes: what JAX may take: it reserves ``XLA_CLIENT_MEM_FRACTION`` of the total when it starts (three quarters by default).
      other_bytes: in use already, beside the weights.
    """

    total_bytes: int
    limit_bytes: int
    other_bytes: int = 0


CPU_CACHE_BYTES = 1 << 30
"""The KV cache on a CPU unless told otherwise: its memory is everybody's, so not a share of it."""


def usable_bytes(memory: DeviceMemory, utilization: float) -> int:
    """What weights, workspace and KV cache may take together."""
    return min(int(memory.total_bytes * utilization), memory.limit_bytes) - memory.other_bytes


def num_blocks_that_fit(
    memory: DeviceMemory, *, utilization: float, weight_bytes: int, workspace_bytes: int, block_bytes: int, min_blocks: int = 1
) -> int:
    """Usable KV blocks, the null block taken off.

    ``min(total * utilization, limit) - weights - workspace - other``, divided by the bytes of a block. As in vLLM, `utilization` is a share
    of the device's whole memory, not of what is left of it.

    Args:
      memory: of one device.
      utilization: share of the total for everything, above 0 and at most 1.
      weight_bytes: of the weights on this device.
      workspace_bytes: what the largest compiled step needs beside weights and cache.
      block_bytes: of a block in all layers, keys and values, on this device.
      min_blocks: fewer are of no use.

    Raises:
      ConfigError: fewer than `min_blocks` fit; the message has every number and names the knobs.
    """
    usable = usable_bytes(memory, utilization)
    num_blocks = (usable - weight_bytes - workspace_bytes) // block_bytes - 1
    if num_blocks < min_blocks:
        total, may, limit, weights, step, other = (
            f"{n / (1 << 30):.2f}"
            for n in (
                memory.total_bytes,
                usable + memory.other_bytes,
                memory.limit_bytes,
                weight_bytes,
                workspace_bytes,
                memory.other_bytes,
            )
        )
        raise ConfigError(
            f"{max(num_blocks, 0)} KV blocks fit and at least {min_blocks} are needed: of {total} GiB the engine may use {may} "
            f"(gpu_memory_utilization {utilization:g}, JAX's own limit {limit}); the weights take {weights}, the compiled step {step}, "
            f"other arrays {other} GiB, a block {block_bytes} bytes. Raise gpu_memory_utilization or XLA_CLIENT_MEM_FRACTION, or lower "
            "max_model_len, max_num_seqs or token_budget"
        )
    return num_blocks
