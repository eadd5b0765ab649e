"""Small GGUF files for the tests of the reader, written with the gguf library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter
from gguf.quants import quantize

N, K, H, D, F, V = 4, 2, 8, 32, 64, 48

METADATA: dict[str, Any] = {
    "llama.block_count": 1,
    "llama.context_length": 128,
    "llama.embedding_length": D,
    "llama.feed_forward_length": F,
    "llama.attention.head_count": N,
    "llama.attention.head_count_kv": K,
    "llama.attention.key_length": H,
    "llama.attention.value_length": H,
    "llama.rope.dimension_count": H,
    "llama.rope.freq_base": 10000.0,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.tokens": [f"t{i}" for i in range(V)],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}


def permute(array: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k: halves [2, H/2] of each head become pairs [H/2, 2]."""
    return array.reshape(num_heads, 2, array.shape[0] // num_heads // 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def hf_weights(seed: int = 0, *, bias: bool = False, tied: bool = False) -> dict[str, np.ndarray]:
    """Random float32 weights of the one-layer model above, under GGUF names but in Hugging Face's row order."""
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (V, D),
        "output_norm.weight": (D,),
        "blk.0.attn_norm.weight": (D,),
        "blk.0.ffn_norm.weight": (D,),
        "blk.0.attn_q.weight": (N * H, D),
        "blk.0.attn_k.weight": (K * H, D),
        "blk.0.attn_v.weight": (K * H, D),
        "blk.0.attn_output.weight": (D, N * H),
        "blk.0.ffn_gate.weight": (F, D),
        "blk.0.ffn_up.weight": (F, D),
        "blk.0.ffn_down.weight": (D, F),
    }
    if not tied:
        shapes["output.weight"] = (V, D)
    if bias:
        shapes |= {name.replace("weight", "bias"): shape[:1] for name, shape in shapes.items() if ".attn_" in name and "norm" not in name}
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def write_gguf(
    path: Path,
    weights: dict[str, np.ndarray] | None = None,
    metadata: dict[str, Any] | None = None,
    *,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    architecture: str = "llama",
    drop: tuple[str, ...] = (),
) -> Path:
    """Write a GGUF. `weights` are in Hugging Face's row order; matrices are quantised to `kind`, vectors stay float32.

    `metadata` is laid over `METADATA`; `drop` names keys and tensors to leave out.
    """
    writer = GGUFWriter(path, architecture)
    for key, value in (METADATA | (metadata or {})).items():
        if key == "general.alignment":
            writer.add_custom_alignment(value)
        elif key not in drop:
            add_metadata(writer, key, value)
    for name, array in (hf_weights() if weights is None else weights).items():
        if name in drop:
            continue
        if "attn_q." in name or "attn_k." in name:
            array = permute(array, N if "attn_q." in name else K)
        if array.ndim == 1 or kind == GGMLQuantizationType.F32:
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_metadata(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
        return
    kinds = {bool: GGUFValueType.BOOL, int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32, str: GGUFValueType.STRING}
    writer.add_key_value(key, value, kinds[type(value)])
