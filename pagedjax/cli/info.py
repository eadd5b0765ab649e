"""``pagedjax info``: what a model is and what of it fits here. Reads names, shapes and metadata, never a weight."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pagedjax.cli.loading import resolve_model
from pagedjax.cli.options import shape_options

if TYPE_CHECKING:
    from pagedjax.config import ModelConfig


@click.command()
@click.argument("model", required=False)
@shape_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; sizes in bytes.")
def info(model: str | None, dtype: str, max_model_len: int | None, as_json: bool) -> None:
    """Describe MODEL (by default the demo model) without loading it.

    Architecture, parameters, memory of weights and KV cache, and how much would fit in this device's memory.
    """
    path = resolve_model(model)
    from pagedjax.checkpoint import open_checkpoint
    from pagedjax.load import check_tensors, load_config

    with open_checkpoint(path) as checkpoint:
        config = load_config(checkpoint, dtype=dtype, max_model_len=max_model_len)
        check_tensors(checkpoint, config)
        facts = facts_of(config, device_memory())
        facts["model"] = checkpoint.source
    click.echo(json.dumps(facts) if as_json else table(config, facts))


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """A device and its memory in bytes. `platform` is JAX's: ``"cpu"``, ``"gpu"``, ...

    `total` is what there is, `free` what is free of it, and `usable` what weights and KV cache may take together of that.
    """

    name: str
    platform: str
    total: int
    free: int
    usable: int


def device_memory() -> DeviceMemory:
    """Of the first JAX device; for a CPU, of the machine."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # only asking: leave the GPU's memory to others
    import jax

    from pagedjax.engine import device_memory as memory_of
    from pagedjax.engine_config import EngineConfig
    from pagedjax.memory import usable_bytes

    device = jax.devices()[0]
    stats = None if device.platform == "cpu" else device.memory_stats()
    if stats and "bytes_limit" in stats:
        used = stats["bytes_in_use"]
        memory = memory_of(stats)
        usable = usable_bytes(memory, EngineConfig().gpu_memory_utilization) - used
        return DeviceMemory(device.device_kind, device.platform, memory.total_bytes, stats["bytes_limit"] - used, usable)
    total, free = machine_memory()
    return DeviceMemory(device.device_kind, device.platform, total, free, free)


def machine_memory(meminfo: Path = Path("/proc/meminfo")) -> tuple[int, int]:
    """Total and available bytes of this machine's memory.

    Linux counts what it can take back from its caches as available; elsewhere all memory counts, for nothing portable tells.
    """
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        available = re.search(r"^MemAvailable:\s*(\d+) kB$", meminfo.read_text(), re.MULTILINE)
    except OSError:
        available = None
    return total, total if available is None else 1024 * int(available[1])


def facts_of(config: ModelConfig, memory: DeviceMemory) -> dict[str, Any]:
    """Everything that ``info`` says, in bytes and tokens. ``kv_tokens_that_fit`` is negative where the weights alone do not fit."""
    from pagedjax.engine_config import cache_dtype, kv_block_bytes
    from pagedjax.memory import CPU_CACHE_BYTES

    weight_bytes = config.num_parameters * config.dtype_bytes
    kv_bytes = kv_block_bytes(config, 1, cache_dtype("auto", config.dtype, memory.platform))
    left = memory.usable - weight_bytes
    tokens = (min(left, CPU_CACHE_BYTES) if memory.platform == "cpu" else left) // kv_bytes
    return {
        "architecture": "LlamaForCausalLM",
        "config": dataclasses.asdict(config),
        "parameters": config.num_parameters,
        "dtype": config.dtype,
        "weight_bytes": weight_bytes,
        "kv_bytes_per_token": kv_bytes,
        "kv_bytes_per_sequence": kv_bytes * config.max_model_len,
        "device": memory.name,
        "device_bytes": memory.total,
        "device_free_bytes": memory.free,
        "device_usable_bytes": memory.usable,
        "kv_tokens_that_fit": tokens,
        "sequences_that_fit": max(tokens, 0) // config.max_model_len,
    }


def table(config: ModelConfig, facts: dict[str, Any]) -> str:
    """The same for people."""
    rope = config.rope
    scaling = "" if rope.kind == "default" else f", {rope.kind} scaling by {rope.factor:g}"
    groups = f"{config.num_heads} query heads, {config.num_kv_heads} key/value heads of size {config.head_size}"
    extras = [name for name, on in (("attention bias", config.attention_bias), ("MLP bias", config.mlp_bias)) if on]
    head = "tied to the embedding" if config.tie_word_embeddings else "its own weights"
    if facts["kv_tokens_that_fit"] < 0:
        missing = facts["weight_bytes"] - facts["device_usable_bytes"]
        fits = f"not even the weights: {size(missing)} short"
    else:
        fits = (
            f"the weights and {facts['kv_tokens_that_fit']:,} tokens of KV cache: "
            f"{facts['sequences_that_fit']:,} sequences of the full {config.max_model_len:,} tokens"
        )
    rows = {
        "model": facts["model"],
        "architecture": ", ".join([facts["architecture"], *extras]),
        "layers": f"{config.num_layers}, hidden size {config.hidden_size:,}, MLP {config.intermediate_size:,}",
        "attention": groups,
        "rotary": f"theta {rope.theta:g}{scaling}",
        "vocabulary": f"{config.vocab_size:,}, output head {head}",
        "longest sequence": f"{config.max_model_len:,} tokens",
        "parameters": f"{facts['parameters']:,}",
        "weights": f"{size(facts['weight_bytes'])} in {config.dtype}",
        "KV cache": f"{size(facts['kv_bytes_per_token'])} a token, {size(facts['kv_bytes_per_sequence'])} a full sequence",
        "device": f"{facts['device']}, {size(facts['device_free_bytes'])} free of {size(facts['device_bytes'])}",
        "would fit": fits,
    }
    return "\n".join(f"{name:17} {value}" for name, value in rows.items())


def size(num_bytes: int) -> str:
    """Bytes for people, in powers of 1000: ``269 MB``."""
    value, units = float(num_bytes), ["B", "kB", "MB", "GB", "TB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.3g} {units[0]}"
