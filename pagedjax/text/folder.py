"""A Hugging Face folder's tokenizer files to a `tokenizers.Tokenizer`."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken

from pagedjax.errors import CheckpointError, UnsupportedModelError

# Tokenizer files that say nothing to us, with what they are.
_OTHER_FILES = {
    "tokenizer.model": "a SentencePiece or tiktoken model",
    "tekken.json": "a Tekken vocabulary",
    "vocab.json": "a GPT-2 vocabulary",
    "vocab.txt": "a WordPiece vocabulary",
}


def read_folder(path: str | os.PathLike[str]) -> tuple[tokenizers.Tokenizer, dict[str, str], dict[str, str]]:
    """The tokenizer, its named special tokens and its chat templates by name. See `Tokenizer.from_folder`."""
    folder = pathlib.Path(path)
    backend = _read_backend(folder)
    config = _read_json(folder / "tokenizer_config.json")
    # Files of transformers before 5 may keep the special tokens apart; the config's own entries count first.
    special_tokens = {**_read_json(folder / "special_tokens_map.json"), **config}
    if config.get("clean_up_tokenization_spaces") and not isinstance(backend.model, tokenizers.models.BPE):
        # For BPE transformers ignores the key too, because there it would eat real spaces.
        raise UnsupportedModelError(
            f"{folder / 'tokenizer_config.json'}: clean_up_tokenization_spaces is not built for a {type(backend.model).__name__} tokenizer"
        )
    _add_tokens(backend, config, folder)
    named = {}
    for key, token in _named_tokens(special_tokens):
        known = backend.token_to_id(token) is not None
        if not known and key in ("bos_token", "eos_token"):
            raise CheckpointError(f"{folder}: {key} is {token!r}, which tokenizer.json does not know")
        if known:
            named[key] = token
    # As in transformers, a name makes a token special whatever tokenizer.json says of it, and a list only where that is silent.
    _mark_special(backend, named.values(), force=True)
    _mark_special(backend, _listed_tokens(special_tokens), force=False)
    return backend, named, _read_chat_templates(folder, config)


def _read_backend(folder: pathlib.Path) -> tokenizers.Tokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file():
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: no such folder")
        for name, kind in _OTHER_FILES.items():
            if (folder / name).is_file():
                raise UnsupportedModelError(f"{folder / name}: {kind} without a tokenizer.json is not built; save the tokenizer as one")
        raise CheckpointError(f"{folder}: no tokenizer.json, so the folder has no tokenizer")
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises nothing narrower
        raise CheckpointError(f"{file}: not a tokenizer: {error}") from error


def _read_json(file: pathlib.Path) -> dict[str, Any]:
    """A JSON object, or an empty one where there is no such file."""
    text = _read_text(file)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{file}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: holds a {type(value).__name__}, not an object")
    return value


def _read_text(file: pathlib.Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from error


def _add_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any], folder: pathlib.Path) -> None:
    """Add the tokens that only ``tokenizer_config.json`` lists, under the ids it gives them."""
    file = folder / "tokenizer_config.json"
    added = config.get("added_tokens_decoder") or {}
    if not isinstance(added, dict) or not all(key.isdecimal() for key in added):
        raise CheckpointError(f"{file}: added_tokens_decoder is not an object whose keys are ids")
    for key, entry in sorted(added.items(), key=lambda item: int(item[0])):
        content = _content(entry)
        if content is None:
            raise CheckpointError(f"{file}: added_tokens_decoder[{key!r}] has no content")
        if backend.token_to_id(content) is None:
            backend.add_tokens([_added_token(entry)])
        if (token_id := backend.token_to_id(content)) != int(key):
            raise CheckpointError(f"{folder}: {content!r} has id {key} in tokenizer_config.json, but {token_id} with tokenizer.json")


def _added_token(entry: Any) -> AddedToken:
    if isinstance(entry, str):
        return AddedToken(entry, special=True, normalized=False)
    flags = ("single_word", "lstrip", "rstrip", "special")
    special = bool(entry.get("special", False))
    return AddedToken(
        entry["content"], normalized=bool(entry.get("normalized", not special)), **{flag: bool(entry.get(flag, False)) for flag in flags}
    )


def _mark_special(backend: tokenizers.Tokenizer, tokens: Iterable[str], *, force: bool) -> None:
    """Make tokens of the vocabulary special; those that tokenizer.json calls added but not special only if `force`.

    Unknown ones are left out: an id of their own would lie beyond the model's embedding.
    """
    by_content = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    for content in dict.fromkeys(tokens):
        token = by_content.get(content)
        if backend.token_to_id(content) is None or (token is not None and (token.special or not force)):
            continue
        token = token or AddedToken(content, normalized=False)
        token.special = True
        backend.add_special_tokens([token])


def _named_tokens(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Entries such as ``"bos_token": "<s>"`` or ``"eos_token": {"content": "</s>", ...}``."""
    for key, entry in config.items():
        content = _content(entry)
        if key.endswith("_token") and content:
            yield key, content
    if isinstance(extra := config.get("extra_special_tokens"), dict):
        yield from ((key, content) for key, entry in extra.items() if (content := _content(entry)))


def _listed_tokens(config: Mapping[str, Any]) -> list[str]:
    listed = []
    for key in ("additional_special_tokens", "extra_special_tokens"):
        entries = config.get(key)
        listed += [content for entry in (entries if isinstance(entries, list) else []) if (content := _content(entry))]
    return listed


def _content(entry: Any) -> str | None:
    content = entry.get("content") if isinstance(entry, dict) else entry
    return content if isinstance(content, str) else None


def _read_chat_templates(folder: pathlib.Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name. Files of their own count before the config's entry, and that before the older ``chat_template.json``."""
    files = {"default": folder / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    templates = {name: source for name, file in files.items() if (source := _read_text(file)) is not None}
    if templates:
        return templates
    for file, holder in (
        ("tokenizer_config.json", config),
        ("chat_template.json", _read_json(folder / "chat_template.json")),
    ):
        entry = holder.get("chat_template")
        if entry is None:
            continue
        if isinstance(entry, str):
            return {"default": entry}
        if isinstance(entry, dict):
            entry = [{"name": name, "template": source} for name, source in entry.items()]
        try:
            return {str(item["name"]): str(item["template"]) for item in entry}
        except (TypeError, KeyError) as error:
            raise CheckpointError(f"{folder / file}: chat_template is neither a text nor a list of named templates") from error
    return {}
