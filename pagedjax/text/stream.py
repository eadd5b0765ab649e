"""Incremental decoding: token ids in, whole characters out, and nothing that a later token could still change.

``tokenizers.decoders.DecodeStream`` has the same aim, but on byte-fallback vocabularies it yields text that later bytes
revise (and then raises "Invalid prefix encountered"), and it never yields what is left at the end.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class TextStream:
    """Decodes a sequence token by token. Made by `Tokenizer.stream`.

    All steps and the `finish` joined are exactly the decoding of the whole sequence.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        piece: Callable[[int], str | None],
        *,
        skipped_ids: frozenset[int] = frozenset(),
        byte_fallback: bool = False,
        context: Iterable[int] = (),
    ) -> None:
        """Start at an empty text.

        Args:
          decode: token ids to text.
          piece: a token id's spelling in the vocabulary; None for an id without one.
          skipped_ids: ids that `decode` leaves out.
          byte_fallback: a run of ``<0x..>`` pieces is text only as a whole, as `tokenizers`' ``ByteFallback`` decoder has it: one
            broken character turns the entire run into replacement characters. Such a run is held back until it ends.
          context: ids that come before the first step and whose text is not yielded.
        """
        self._decode, self._piece = decode, piece
        self._skipped, self._byte_fallback = skipped_ids, byte_fallback
        # The window holds the last piece of settled text and everything after it. Decoding needs that piece in front because some
        # decoders treat the start of a text differently (SentencePiece's drops one space there).
        self._window = [token for token in context if self._has_text(token)]
        self._num_settled = 0  # ids at the window's front whose text is settled and ends between two characters
        self._num_yielded = 0  # characters of the window's text that have been yielded
        if self._window:
            # A context that ends within a character leaves that character to be yielded, once it is whole.
            self._num_yielded = len(decode(self._window).rstrip(_REPLACEMENT))

    def step(self, token_id: int) -> str:
        """The text that became certain with `token_id`: whole characters only, ``""`` while one is incomplete."""
        if not self._has_text(token_id):
            return ""
        self._window.append(token_id)
        return self._advance()

    def finish(self) -> str:
        """The rest: incomplete characters as replacement characters. The stream is empty afterwards."""
        rest = self._decode(self._window)[self._num_yielded :]
        self._window, self._num_settled, self._num_yielded = [], 0, 0
        return rest

    def _has_text(self, token_id: int) -> bool:
        # What `decode` leaves out does not end a run of bytes either.
        return token_id not in self._skipped and self._piece(token_id) is not None

    def _advance(self) -> str:
        """Yield what is settled, and shorten the window when its text ends between two characters."""
        window = self._window
        if not window or (self._byte_fallback and _BYTE_PIECE.fullmatch(self._piece(window[-1]) or "")):
            return ""
        text = self._decode(window)
        # The bytes of an unfinished character decode to exactly one replacement character, the last one; any before it stay.
        unfinished = not self._byte_fallback and text.endswith(_REPLACEMENT)
        settled = text[:-1] if unfinished else text
        new = settled[self._num_yielded :]
        self._num_yielded += len(new)
        if new and not unfinished:
            del window[: self._num_settled]
            self._num_settled = len(window)
            self._num_yielded = len(self._decode(window))
        return new
