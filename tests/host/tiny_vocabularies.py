"""Vocabularies made by hand, small enough to reason about, as GGUF metadata and as Hugging Face folders."""

import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, pre_tokenizers, processors
from tokenizers import models as backend_models

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

# One printable character a byte, in GPT-2's spelling: "Ġ" is a space, "Ċ" a line feed.
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def gguf(model: str, typed_tokens: Iterable[tuple[str, int]], **keys: Any) -> dict[str, Any]:
    """Metadata of a GGUF file; `keys` stand below ``tokenizer.ggml.``, and one of None is left out."""
    tokens, types = zip(*typed_tokens, strict=True)
    keys = {"model": model, "tokens": list(tokens), "token_type": list(types), **keys}
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}


def byte_level_gguf(
    merges: Iterable[str] = (), *, pre: str = "smollm", extra: Mapping[str, int] | None = None, **keys: Any
) -> dict[str, Any]:
    """Ids: 0 ``<|im_start|>``, 1 ``<|im_end|>``, then all bytes, the merges' results, and `extra` tokens with their types."""
    merges = list(merges)
    tokens = {"<|im_start|>": CONTROL, "<|im_end|>": CONTROL, **dict.fromkeys(ALPHABET, NORMAL)}
    tokens |= {merge.replace(" ", ""): NORMAL for merge in merges} | dict(extra or {})
    return gguf("gpt2", tokens.items(), **{"pre": pre, "merges": merges, "bos_token_id": 0, "eos_token_id": 1, **keys})


def sentencepiece_gguf(pieces: Mapping[str, float], *, extra: Mapping[str, int] | None = None, **keys: Any) -> dict[str, Any]:
    """Ids: 0 ``<unk>``, 1 ``<s>``, 2 ``</s>``, 256 bytes from 3, then the pieces with their scores, and `extra` tokens."""
    tokens = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL, **{f"<0x{byte:02X}>": BYTE for byte in range(256)}}
    tokens |= dict.fromkeys(pieces, NORMAL) | dict(extra or {})
    scores = [pieces.get(token, 0.0) for token in tokens]
    return gguf("llama", tokens.items(), **{"scores": scores, "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, **keys})


def byte_level_backend(*, add_bos: bool = True) -> Backend:
    """``<s>`` 0, ``</s>`` 1, all bytes, ``Ġa``, ``ab``."""
    vocabulary = {token: i for i, token in enumerate(["<s>", "</s>", *ALPHABET, "Ġa", "ab"])}
    backend = Backend(backend_models.BPE(vocabulary, [("Ġ", "a"), ("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    if add_bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return backend


def write_folder(path: pathlib.Path, backend: Backend | None = None, **files: Any) -> pathlib.Path:
    """A model folder: `backend` as ``tokenizer.json``; `files` by stem, mappings as ``.json`` and texts as ``.jinja``."""
    path.mkdir(parents=True, exist_ok=True)
    if backend is not None:
        backend.save(str(path / "tokenizer.json"))
    for stem, content in files.items():
        if isinstance(content, str):
            (path / f"{stem}.jinja").write_text(content, encoding="utf-8")
        else:
            (path / f"{stem}.json").write_text(json.dumps(content), encoding="utf-8")
    return path
