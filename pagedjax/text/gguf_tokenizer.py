"""A GGUF file's tokenizer metadata to a `tokenizers.Tokenizer`.

The keys are specified in https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; defaults are llama.cpp's. Two models are built:
``gpt2`` (byte-level BPE, `_byte_level`) and ``llama`` (SentencePiece BPE, `_sentencepiece`). Where llama.cpp and the tokenizer that a
model was trained with disagree, the latter is followed: merges and splits decide what the model can understand.
"""

from __future__ import annotations

import collections
import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from pagedjax.errors import CheckpointError, UnsupportedModelError

_KEY = "tokenizer.ggml."
_SPACE = "▁"  # SentencePiece's spelling of a space

# How Llama 3 and Qwen 2 cut text into words before merging; they differ in how many digits stay together.
# Sources: llama-models' llama3/tokenizer.py and Qwen2's tokenizer.json.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class TokenType(enum.IntEnum):
    """``tokenizer.ggml.token_type``: what an entry of the vocabulary is."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def read_gguf(metadata: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, dict[str, str], dict[str, str]]:
    """The tokenizer, its named special tokens and its chat templates by name. See `Tokenizer.from_gguf`."""
    vocabulary = _Vocabulary(metadata)
    backend = vocabulary.choose("model", {"gpt2": _byte_level, "llama": _sentencepiece})(vocabulary)
    _add_tokens(backend, vocabulary)
    named = {name: vocabulary.tokens[i] for name, i in vocabulary.named_ids.items() if name in ("bos", "eos", "unknown", "padding")}
    renamed = {"unknown": "unk", "padding": "pad"}
    return backend, {f"{renamed.get(name, name)}_token": token for name, token in named.items()}, _chat_templates(metadata)


class _Vocabulary:
    """The metadata, checked for consistency.

    Attributes:
      tokens: spelling of each id.
      types: `TokenType` of each id.
      mergeable: spellings that ordinary text can turn into: single characters and results of merges. Set by the model's builder.
      named_ids: ids by name: ``bos``, ``eos``, ``unknown``, ``padding`` and the others that are present.
    """

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self.tokens: list[str] = list(self.require("tokens"))
        if len(set(self.tokens)) != len(self.tokens):
            [(token, count)] = collections.Counter(self.tokens).most_common(1)
            raise CheckpointError(f"{_KEY}tokens holds {token!r} {count} times")
        self.types = self._read_types()
        self.mergeable: frozenset[str] = frozenset()
        self.named_ids = self._read_named_ids()

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key below ``tokenizer.ggml.``."""
        return self._metadata.get(_KEY + key, default)

    def require(self, key: str) -> Any:
        """Like `get`, for a key that has to be there."""
        value = self.get(key)
        if value is None:
            raise CheckpointError(f"the GGUF metadata has no {_KEY}{key}, without which there is no tokenizer")
        return value

    def choose(self, key: str, built: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
        """The builder that the value of `key` names."""
        name = self.require(key)
        if name not in built:
            raise UnsupportedModelError(f"{_KEY}{key} is {name!r}, which is not built; {', '.join(built)} are")
        return built[name]

    def scores(self) -> list[float]:
        """One number a token; among possible merges the highest goes first."""
        return [float(score) for score in self._one_per_token("scores", self.require("scores"))]

    def merges(self) -> list[tuple[str, str]] | None:
        """Pairs of tokens, first one first; None if the file lists none."""
        lines = self.get("merges")
        if lines is None:
            return None
        pairs = []
        for line in lines:
            space = line.find(" ", 1)
            if space < 0:
                raise CheckpointError(f"{_KEY}merges holds {line!r}, which is not two tokens with a space between")
            pairs.append((line[:space], line[space + 1 :]))
        return pairs

    def ids_of(self, *types: TokenType) -> list[int]:
        """Ids of these types, ascending."""
        return [i for i, kind in enumerate(self.types) if kind in types]

    def _one_per_token(self, key: str, values: Sequence[Any]) -> Sequence[Any]:
        if len(values) != len(self.tokens):
            raise CheckpointError(f"{_KEY}{key} has {len(values)} entries for {len(self.tokens)} tokens")
        return values

    def _read_types(self) -> list[TokenType]:
        types = self.get("token_type")
        if types is None:
            return [TokenType.NORMAL] * len(self.tokens)
        checked = self._one_per_token("token_type", types)
        try:
            return [TokenType(kind) for kind in checked]
        except ValueError as error:
            raise CheckpointError(f"{_KEY}token_type: {error}") from error

    def _read_named_ids(self) -> dict[str, int]:
        found = {}
        for name in ("bos", "eos", "unknown", "padding", "eot", "eom"):
            token_id = self.get(f"{name}_token_id")
            if token_id is None:
                continue
            if not 0 <= token_id < len(self.tokens):
                raise CheckpointError(f"{_KEY}{name}_token_id is {token_id}, but there are {len(self.tokens)} tokens")
            found[name] = int(token_id)
        return found


def _byte_level(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    """Byte-level BPE: a text's UTF-8 bytes, each spelled as a printable character, merged within words."""
    if vocabulary.get("add_space_prefix", False):
        raise UnsupportedModelError(f"{_KEY}add_space_prefix is true for a byte-level vocabulary, which is not built")
    configure = vocabulary.choose("pre", {"smollm": _smollm, "llama-bpe": _llama_bpe, "qwen2": _qwen2})
    vocabulary.require("merges")
    merges = vocabulary.merges() or []
    vocabulary.mergeable = frozenset(pre_tokenizers.ByteLevel.alphabet()).union(left + right for left, right in merges)
    # Llama 3 looks a whole word up before it merges; its merges do not reach every word of its vocabulary.
    backend = _backend(vocabulary, merges, ignore_merges=configure is _llama_bpe)
    backend.decoder = decoders.ByteLevel()
    configure(backend)
    _add_begin_and_end(backend, vocabulary, add_bos=configure is _llama_bpe)
    return backend


def _smollm(backend: tokenizers.Tokenizer) -> None:
    """Digits one by one, then GPT-2's words."""
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )


def _llama_bpe(backend: tokenizers.Tokenizer) -> None:
    """Llama 3: up to three digits together."""
    backend.pre_tokenizer = _split_then_bytes(_SPLIT.format(digits="{1,3}"))


def _qwen2(backend: tokenizers.Tokenizer) -> None:
    """Qwen 2: digits one by one, and text in Unicode's composed form."""
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _split_then_bytes(_SPLIT.format(digits=""))


def _split_then_bytes(pattern: str) -> pre_tokenizers.Sequence:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _sentencepiece(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    """SentencePiece BPE: characters merged by score over the whole text, unknown characters as bytes.

    The space that SentencePiece puts before a text is put before every stretch between special tokens, as SentencePiece does when a
    conversation's turns are encoded one by one, and as llama.cpp does.
    """
    for key in ("remove_extra_whitespaces", "precompiled_charsmap"):
        if vocabulary.get(key):
            raise UnsupportedModelError(f"{_KEY}{key} is set for a SentencePiece BPE vocabulary, which is not built")
    for name, default in (("bos", 1), ("eos", 2), ("unknown", 0)):  # what old files leave unsaid
        expected = TokenType.UNKNOWN if name == "unknown" else TokenType.CONTROL
        if name not in vocabulary.named_ids and default < len(vocabulary.types) and vocabulary.types[default] == expected:
            vocabulary.named_ids[name] = default
    unknown, bytes_ = vocabulary.named_ids.get("unknown"), vocabulary.ids_of(TokenType.BYTE)
    if unknown is None and not bytes_:
        raise CheckpointError(f"{_KEY}token_type marks neither an unknown token nor bytes, so some characters would have no token")
    merges = vocabulary.merges() or _merges_by_score(vocabulary)
    vocabulary.mergeable = frozenset(token for token in vocabulary.tokens if len(token) == 1).union(left + right for left, right in merges)
    backend = _backend(
        vocabulary,
        merges,
        byte_fallback=bool(bytes_),
        fuse_unk=True,
        unk_token=None if unknown is None else vocabulary.tokens[unknown],
    )
    prefix = vocabulary.get("add_space_prefix", True)
    spaces = [normalizers.Replace(" ", _SPACE)]
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), *spaces] if prefix else spaces)
    text = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*text, decoders.Strip(" ", 1, 0)] if prefix else text)
    _add_begin_and_end(backend, vocabulary, add_bos=True)
    return backend


def _merges_by_score(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """The merges that SentencePiece's scores imply: every way to put a piece together from two others, best piece first."""
    scores = vocabulary.scores()
    pieces = {vocabulary.tokens[i]: scores[i] for i in vocabulary.ids_of(TokenType.NORMAL, TokenType.UNDEFINED)}
    long_scores = {score for piece, score in pieces.items() if len(piece) > 1}
    if len(long_scores) == 1 and sum(len(piece) > 1 for piece in pieces) > 1:
        raise CheckpointError(f"{_KEY}scores gives every piece the same score, so the order of merges is lost")
    ranked = [
        (-score, -cut, piece)
        for piece, score in pieces.items()
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    return [(piece[:-minus_cut], piece[-minus_cut:]) for _, minus_cut, piece in sorted(ranked)]


def _backend(vocabulary: _Vocabulary, merges: list[tuple[str, str]], **options: Any) -> tokenizers.Tokenizer:
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    for left, right in merges:
        for token in (left, right, left + right):
            if token not in ids:
                raise CheckpointError(f"{_KEY}merges joins {left!r} and {right!r}, but {token!r} is not among the tokens")
    return tokenizers.Tokenizer(models.BPE(vocab=ids, merges=merges, **options))


def _add_tokens(backend: tokenizers.Tokenizer, vocabulary: _Vocabulary) -> None:
    """Make the tokens that are matched whole in a text known: control tokens, and those that a user added."""
    special = set(vocabulary.ids_of(TokenType.CONTROL, TokenType.UNKNOWN))
    for name in ("bos", "eos", "eot", "eom"):
        # Some files forget to mark these. One that ordinary text can turn into (a comma, say) must stay ordinary.
        token_id = vocabulary.named_ids.get(name)
        if token_id is not None and vocabulary.tokens[token_id] not in vocabulary.mergeable:
            special.add(token_id)
    added = special.union(vocabulary.ids_of(TokenType.USER_DEFINED))
    backend.add_tokens(
        [AddedToken(vocabulary.tokens[i], normalized=False, special=i in special) for i in sorted(added) if vocabulary.tokens[i]]
    )


def _add_begin_and_end(backend: tokenizers.Tokenizer, vocabulary: _Vocabulary, *, add_bos: bool) -> None:
    """Add the tokens around a text; `add_bos` is the default of a file that says nothing."""
    around = {"bos": bool(vocabulary.get("add_bos_token", add_bos)), "eos": bool(vocabulary.get("add_eos_token", False))}
    wanted = {}
    for name, add in around.items():
        if add and name not in vocabulary.named_ids:
            raise CheckpointError(f"a text is to get a {name.upper()} token, but the metadata has no {_KEY}{name}_token_id")
        if add:
            wanted[name] = vocabulary.named_ids[name]
    if wanted:
        single = [name for name in ("bos", "$A", "eos") if name in (*wanted, "$A")]
        backend.post_processor = processors.TemplateProcessing(single=" ".join(single), special_tokens=list(wanted.items()))


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    key = "tokenizer.chat_template"
    templates = {name.removeprefix(f"{key}."): source for name, source in metadata.items() if name.startswith(f"{key}.")}
    if metadata.get(key):
        templates["default"] = metadata[key]
    return templates
