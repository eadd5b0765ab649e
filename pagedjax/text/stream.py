"""Incremental decoding: token ids in, whole characters out, and nothing that a later token could still change.

``tokenizers.decoders.DecodeStream`` has the same aim, but on byte-fallback vocabularies it yields text that later bytes
revise (and then raises "Invalid prefix encountered"), and it never yields what is left at the end.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
# Pieces that are kept where a window is cut within a character. Four bytes would do: no character has more, so after four of them a
# decoder of UTF-8 stands at the same place wherever it began.
_TAIL = 16


class TextStream:
    """Decodes a sequence token by token. Made by `Tokenizer.stream`.

    All steps and the `finish` joined are exactly the decoding of the whole sequence. The time is linear in its length, whatever the ids.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        piece: Callable[[int], str | None],
        *,
        skipped_ids: frozenset[int] = frozenset(),
        byte_fallback: bool = False,
        context: Sequence[int] = (),
    ) -> None:
        """Start at an empty text.

        Args:
          decode: token ids to text.
          piece: a token id's spelling in the vocabulary; None for an id without one.
          skipped_ids: ids that `decode` leaves out.
          byte_fallback: a run of ``<0x..>`` pieces is text only as a whole, as `tokenizers`' ``ByteFallback`` decoder has it: one
            broken character turns the entire run into replacement characters. Such a run is held back until it ends.
          context: ids that come before the first step and whose text is not yielded, but for a last character that the steps change.
        """
        self._decode, self._piece = decode, piece
        self._skipped, self._byte_fallback = skipped_ids, byte_fallback
        # The window holds the last piece of settled text and everything after it. Decoding needs that piece in front because some
        # decoders treat the start of a text differently (SentencePiece's drops one space there).
        self._window = self._end(context)
        self._num_settled = 0  # ids at the window's front whose text is settled and ends between two characters
        # A context may end within a character that the first steps complete, so its last characters are compared with theirs.
        self._context_text = decode(self._window) if self._window else ""
        self._num_yielded = len(self._context_text)  # characters of the window's text that have been yielded

    def step(self, token_id: int) -> str:
        """The text that became certain with `token_id`: whole characters only, ``""`` while one is incomplete."""
        if not self._has_text(token_id):
            return ""
        self._window.append(token_id)
        return self._advance()

    def finish(self, token_ids: Iterable[int] = ()) -> str:
        """The rest, `token_ids` after it included: incomplete characters as replacement characters. The stream is empty afterwards."""
        self._window += [token for token in token_ids if self._has_text(token)]
        rest = self._new(self._decode(self._window))
        self._window, self._num_settled, self._num_yielded, self._context_text = [], 0, 0, ""
        return rest

    def _end(self, context: Sequence[int]) -> list[int]:
        """The ids at the end of `context` on which the text of what follows depends, so that long prompts cost nothing."""
        ids: list[int] = []
        num_left = _TAIL
        for token in reversed(context):
            if num_left == 0:
                break
            if self._has_text(token):
                ids.append(token)
                num_left -= not self._is_byte(token)  # a run of those is text only as a whole
        return ids[::-1]

    def _has_text(self, token_id: int) -> bool:
        # What `decode` leaves out does not end a run of bytes either.
        return token_id not in self._skipped and self._piece(token_id) is not None

    def _is_byte(self, token_id: int) -> bool:
        return self._byte_fallback and _BYTE_PIECE.fullmatch(self._piece(token_id) or "") is not None

    def _new(self, settled: str) -> str:
        """What `settled`, a beginning of the window's text, has beyond what was yielded; it counts as yielded then."""
        if self._context_text:
            self._num_yielded = _num_common(self._context_text, settled)
        new = settled[self._num_yielded :]
        if new:
            self._context_text = ""
            self._num_yielded += len(new)
        return new

    def _advance(self) -> str:
        """Yield what is settled, and shorten the window when its text ends between two characters, or has become long."""
        window = self._window
        if self._is_byte(window[-1]):
            return ""
        text = self._decode(window)
        # The bytes of an unfinished character decode to exactly one replacement character, the last one; any before it stay.
        unfinished = not self._byte_fallback and text.endswith(_REPLACEMENT)
        new = self._new(text[:-1] if unfinished else text)
        if new and not unfinished:
            del window[: self._num_settled]
            self._num_settled = len(window)
            self._num_yielded = len(self._decode(window))
        elif unfinished and len(window) > 2 * _TAIL and not self._context_text:
            # Broken bytes may never end between two characters. What the cut leaves of a character in front has been yielded too.
            del window[:-_TAIL]
            self._num_settled = 0
            self._num_yielded = len(self._decode(window)) - 1
        return new


def _num_common(a: str, b: str) -> int:
    """How many characters two texts begin with in common."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
