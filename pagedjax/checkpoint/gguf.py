"""A Llama-family GGUF file as a `Checkpoint`: Hugging Face names, layout and config.

llama.cpp rotates neighbouring pairs of a head, Hugging Face rotates its halves, so the converter reorders the rows of q and k in each
head; `_unpermute` puts them back. Quantised tensors go through the `gguf` library's dequantiser.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from pagedjax.checkpoint.gguf_config import check_architecture, hf_config, hf_generation_config
from pagedjax.checkpoint.gguf_file import GgufFile
from pagedjax.errors import CheckpointError, UnsupportedModelError

if TYPE_CHECKING:
    from pagedjax.text import Tokenizer

Array = np.ndarray[Any, np.dtype[Any]]

_TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", "output.weight": "lm_head.weight"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE = "rope_freqs.weight"
_PLAIN: dict[GGMLQuantizationType, np.dtype[Any]] = {
    GGMLQuantizationType.F32: np.dtype("<f4"),
    GGMLQuantizationType.F16: np.dtype("<f2"),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}
_DEQUANTISED: np.dtype[Any] = np.dtype(np.float32)


class GgufCheckpoint:
    """A `Checkpoint` over one GGUF file. Opening reads the header; `read` dequantises one tensor.

    F32, F16 and BF16 tensors keep their dtype; quantised ones (every type that the `gguf` library dequantises: Q4_0, Q4_1, Q5_0,
    Q5_1, Q8_0, the K-quants, the IQ types) become float32. ``config["torch_dtype"]`` says "bfloat16" for a quantised file.

    Args:
      path: the file.

    Raises:
      CheckpointNotFoundError: no such file.
      CheckpointError: cut short, damaged or inconsistent. The message names the file and what is wrong.
      UnsupportedModelError: another architecture, a tensor, key or quantisation type that is not built. The message names it.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._file: GgufFile | None = GgufFile(self._path)
        try:
            self.metadata: dict[str, Any] = self._file.metadata
            check_architecture(self.metadata, self._path)
            self._tensors = self._file.tensors
            self._gguf_names = self._translate_names()
            self._check_types()
            divisors = self._raw(_ROPE).astype(np.float64) if _ROPE in self._tensors else None
            self.config: dict[str, Any] = hf_config(self.metadata, self._tensors, divisors, self._path)
            self.generation_config: dict[str, Any] = hf_generation_config(self.metadata, self._path)
            self._check_permuted_shapes()
        except BaseException:
            self.close()
            raise

    def _translate_names(self) -> dict[str, str]:
        """Hugging Face name -> GGUF name."""
        names: dict[str, str] = {}
        for name in self._tensors:
            if name == _ROPE:
                continue  # part of the config, not of the weights
            match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
            if name in _TOP:
                names[_TOP[name]] = name
            elif match and match[2] in _IN_LAYER and not (match[3] == "bias" and match[2].endswith("norm")):
                names[f"model.layers.{match[1]}.{_IN_LAYER[match[2]]}.{match[3]}"] = name
            else:
                raise UnsupportedModelError(f"{self._path}: tensor {name!r} has no place in a Llama model as built here")
        return names

    def _check_types(self) -> None:
        for kind in {tensor.kind for tensor in self._tensors.values()} - set(_PLAIN):
            try:
                dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
            except NotImplementedError as error:
                name = next(name for name, tensor in self._tensors.items() if tensor.kind == kind)
                raise UnsupportedModelError(
                    f"{self._path}: tensor {name!r} has type {kind.name}, which the gguf library cannot dequantise"
                ) from error

    def _check_permuted_shapes(self) -> None:
        for name in self._gguf_names:
            heads = self._num_permuted_heads(name)
            if heads is not None and self.shape(name)[0] != heads * self.config["head_dim"]:
                raise CheckpointError(
                    f"{self._path}: tensor {self._gguf_names[name]!r} has {self.shape(name)[0]} rows, "
                    f"but the metadata's {heads} heads of {self.config['head_dim']} need {heads * self.config['head_dim']}"
                )

    def _num_permuted_heads(self, name: str) -> int | None:
        if ".q_proj." in name:
            return int(self.config["num_attention_heads"])
        return int(self.config["num_key_value_heads"]) if ".k_proj." in name else None

    def _raw(self, gguf_name: str) -> Array:
        """The tensor in the file's order; plain floats as a view of the file."""
        if self._file is None:
            raise CheckpointError(f"{self._path}: the checkpoint is closed")
        tensor, data = self._tensors[gguf_name], self._file.data(gguf_name)
        if tensor.kind in _PLAIN:
            return data.view(_PLAIN[tensor.kind])
        return dequantize(data, tensor.kind)

    @property
    def source(self) -> str:
        """The file."""
        return str(self._path)

    def names(self) -> frozenset[str]:
        """Hugging Face names of all tensors; no ``lm_head.weight`` when it is tied to the embedding."""
        return frozenset(self._gguf_names)

    def _gguf_name(self, name: str) -> str:
        if name not in self._gguf_names:
            raise CheckpointError(f"{self._path}: has no tensor {name!r}")
        return self._gguf_names[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of tensor `name`."""
        return self._tensors[self._gguf_name(name)].shape

    def dtype(self, name: str) -> np.dtype[Any]:
        """Dtype that `read` gives: the stored one for plain floats, float32 for quantised tensors."""
        return _PLAIN.get(self._tensors[self._gguf_name(name)].kind, _DEQUANTISED)

    def read(self, name: str) -> Array:
        """Tensor `name`, dequantised and in Hugging Face's row order, as a new array."""
        raw = self._raw(self._gguf_name(name))
        heads = self._num_permuted_heads(name)
        return np.array(raw if heads is None else _unpermute(raw, heads), order="C")

    def tokenizer(self) -> Tokenizer:
        """The tokenizer and chat template that the file's metadata describes.

        Raises:
          CheckpointError: the file has none.
          UnsupportedModelError: a kind that is not built.
        """
        from pagedjax.text import Tokenizer  # a reader of weights alone needs no tokenizers library

        return Tokenizer.from_gguf(self.metadata)

    def close(self) -> None:
        """Unmap the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _unpermute(array: Array, num_heads: int) -> Array:
    """Rows in llama.cpp's order ``[heads, H/2, 2]`` to Hugging Face's ``[heads, 2, H/2]``; `array` is ``[heads*H, ...]``."""
    pairs = array.reshape(num_heads, array.shape[0] // num_heads // 2, 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)
