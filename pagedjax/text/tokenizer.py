"""`Tokenizer`: one face for every kind of tokenizer that a checkpoint can bring."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tokenizers

from pagedjax.errors import RequestError
from pagedjax.text.chat_template import Message, render
from pagedjax.text.stream import TextStream

# How byte-level vocabularies spell the 256 bytes (GPT-2, Radford et al. 2019): printable ones as themselves, the others from U+0100 on.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(0x100 + n): byte for n, byte in enumerate(byte for byte in range(256) if byte not in _PRINTABLE)
}


class Tokenizer:
    """Text to token ids and back, and conversations to text.

    Built by `from_folder` or `from_gguf`. Ids are plain Python integers, the rows of the model's embedding.

    Attributes:
      special_tokens: the named tokens, such as ``{"bos_token": "<s>"}``; a chat template sees them under these names.
      chat_templates: jinja2 sources by name; the one that is used unless another is asked for is named ``"default"``.
      bos_token_id, eos_token_id: ids of the tokens that begin and end a text, or None. A model may stop at further ids: those are
        in its generation config.
      vocab_size: one more than the highest id that the tokenizer knows. The model's own vocabulary may be padded beyond it.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        """Wrap a backend; most callers want `from_folder` or `from_gguf`.

        Args:
          backend: does the work; its truncation and padding are switched off.
          special_tokens: named tokens, each of them in the vocabulary.
          chat_templates: jinja2 sources by name.
        """
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.chat_templates = dict(chat_templates or {})
        self.bos_token_id = self._named_id("bos_token")
        self.eos_token_id = self._named_id("eos_token")
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self._special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        decoder = b"" if backend.decoder is None else backend.decoder.__getstate__()
        self._byte_fallback = b"ByteFallback" in decoder
        self._byte_level = b"ByteLevel" in decoder
        self._spaced = "▁".encode() in decoder or b"u2581" in decoder
        self._added_ids = frozenset(backend.get_added_tokens_decoder())

    @classmethod
    def from_folder(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """The tokenizer of a Hugging Face folder: ``tokenizer.json`` and the small files beside it.

        Args:
          path: the folder. ``tokenizer_config.json``, ``special_tokens_map.json``, ``chat_template.jinja``,
            ``additional_chat_templates/*.jinja`` and ``chat_template.json`` are read where they exist.

        Raises:
          CheckpointError: no ``tokenizer.json``, or a file is damaged. The message names it.
          UnsupportedModelError: the folder holds another kind of tokenizer file, or needs something that is not built.
        """
        from pagedjax.text.folder import read_folder

        backend, special_tokens, chat_templates = read_folder(path)
        return cls(backend, special_tokens=special_tokens, chat_templates=chat_templates)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """The tokenizer that a GGUF file describes.

        Args:
          metadata: GGUF keys (``"tokenizer.ggml.model"``, ``"tokenizer.ggml.tokens"``, ...) to Python values. Others are ignored.

        Raises:
          CheckpointError: a key is missing, or keys contradict each other. The message names them.
          UnsupportedModelError: a tokenizer model or pre-tokenizer that is not built. The message names it.
        """
        from pagedjax.text.gguf_tokenizer import read_gguf

        backend, special_tokens, chat_templates = read_gguf(metadata)
        return cls(backend, special_tokens=special_tokens, chat_templates=chat_templates)

    @property
    def chat_template(self) -> str | None:
        """The default chat template's jinja2 source, or None for a model that has none (a base model)."""
        return self.chat_templates.get("default")

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of the special tokens, which `decode` leaves out unless told otherwise."""
        return self._special_ids

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`.

        Special tokens that are written out in `text` become their ids, as everywhere in this ecosystem.

        Args:
          text: any text; the empty one gives no ids of its own.
          add_special_tokens: add what the model expects around a text, mostly one token before it, or nothing.

        Raises:
          RequestError: not a text, or one with half a surrogate pair.
        """
        if not isinstance(text, str):
            raise RequestError(f"text is a {type(text).__name__}; it must be a str")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"text holds half a surrogate pair at index {error.start}, which is not a character") from error
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids.

        Bytes that are no UTF-8 become U+FFFD. Ids that the tokenizer does not know (a model's vocabulary may be padded) add nothing.

        Raises:
          RequestError: a negative id.
        """
        return self._backend.decode(_checked(ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """One token within a text: perhaps part of a character; the space before a word included. Empty for an unknown id."""
        piece = self._backend.id_to_token(token_id)
        if piece is None:
            return b""
        if token_id not in self._added_ids:
            if self._byte_level and all(char in _BYTE_OF for char in piece):
                return bytes(_BYTE_OF[char] for char in piece)
            if self._byte_fallback and len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
                return bytes.fromhex(piece[3:5])
            if self._spaced:
                return piece.replace("▁", " ").encode()
        return self.decode([token_id], skip_special_tokens=False).encode()

    def stream(self, skip_special_tokens: bool = True, *, context: Iterable[int] = ()) -> TextStream:
        """A decoder for ids that come one at a time.

        Args:
          skip_special_tokens: see `decode`.
          context: ids that stand before the first one, such as the prompt. Their text is not yielded, but it counts: a SentencePiece
            tokenizer drops the space before the first word of a text, and with a context the first word is no longer that.

        Returns:
          An object whose ``step(token_id)`` gives the text that became certain, whole characters only, and whose ``finish()`` gives
          the rest. Joined they are the `decode` of all ids (with a context, what they add to it).
        """
        return TextStream(
            lambda window: self._backend.decode(window, skip_special_tokens=skip_special_tokens),
            self._backend.id_to_token,
            skipped_ids=self._special_ids if skip_special_tokens else frozenset(),
            byte_fallback=self._byte_fallback,
            context=_checked(context),
        )

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        """The text of a conversation, special tokens written out.

        Args:
          messages: ``{"role": ..., "content": ...}`` in order, at least one.
          tools: JSON schemas of functions that the model may call. A model with a template named ``"tool_use"`` uses that one then.
          documents: for templates that read them.
          add_generation_prompt: end with the header of the assistant's next message. None: yes, unless the last message is continued.
          continue_final_message: leave the last message open, so that the model goes on with it.
          chat_template: jinja2 source, or the name of one of `chat_templates`, in place of the model's default.
          **variables: further names for the template.

        Raises:
          RequestError: the model has no chat template, the arguments are unusable, or the template refuses them.
          CheckpointError: the template is not valid jinja2.
        """
        return render(
            self._chosen_template(chat_template, tools is not None),
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=not continue_final_message if add_generation_prompt is None else add_generation_prompt,
            continue_final_message=continue_final_message,
            variables={**self.special_tokens, **variables},
        )

    def encode_chat(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """Token ids of a conversation. The template writes every special token itself, so that none is added here.

        Args:
          messages, **options: see `apply_chat_template`, which also lists what is raised.
        """
        return self.encode(self.apply_chat_template(messages, **options), add_special_tokens=False)

    def _chosen_template(self, wanted: str | None, with_tools: bool) -> str:
        if wanted is not None:
            return self.chat_templates.get(wanted, wanted)
        for name in ("tool_use", "default") if with_tools else ("default",):
            if name in self.chat_templates:
                return self.chat_templates[name]
        if self.chat_templates:
            raise RequestError(f"the model has no default chat template; name one of {sorted(self.chat_templates)} as chat_template")
        raise RequestError("the model has no chat template: it was made to continue text, not to chat. Pass one as chat_template")

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)


def _checked(ids: Iterable[int]) -> list[int]:
    checked = [int(i) for i in ids]
    if checked and min(checked) < 0:
        raise RequestError(f"token id {min(checked)} is negative")
    return checked
