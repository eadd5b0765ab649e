"""Log-probabilities in the three forms that clients know: OpenAI's for chats, OpenAI's for completions, and vLLM's for prompts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pagedjax.request import TokenLogprobs
from pagedjax.text import Tokenizer

_NUM_KEPT = 1 << 16  # spellings that are kept
Names = Callable[[int], tuple[str, bytes]]


def token_names(tokenizer: Tokenizer) -> Names:
    """A function from a token's id to its text and its bytes; bytes that are no characters are U+FFFD in the text."""

    @functools.lru_cache(maxsize=_NUM_KEPT)
    def name(token_id: int) -> tuple[str, bytes]:
        spelled = tokenizer.token_bytes(token_id)
        return spelled.decode("utf-8", "replace"), spelled

    return name


def of_chat(names: Names, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
    """The entries of ``choices[].logprobs.content``."""
    return [
        _entry(names, token, lp.logprob) | {"top_logprobs": [_entry(names, i, p) for i, p in lp.top]}
        for token, lp in zip(token_ids, logprobs, strict=True)
    ]


def _entry(names: Names, token_id: int, logprob: float) -> dict[str, Any]:
    text, spelled = names(token_id)
    return {"token": text, "logprob": logprob, "bytes": list(spelled)}


class CompletionLogprobs:
    """``choices[].logprobs`` of a completion, four lists side by side, and where the next token's text begins."""

    def __init__(self, names: Names) -> None:
        self._names, self._offset = names, 0

    def of(self, token_ids: Iterable[int], logprobs: Iterable[TokenLogprobs | None]) -> dict[str, list[Any]]:
        """Of the next tokens."""
        lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, lp in zip(token_ids, logprobs, strict=True):
            lists["tokens"].append(self._key(token))
            lists["token_logprobs"].append(None if lp is None else lp.logprob)
            # The token itself is always among them, as OpenAI has it.
            lists["top_logprobs"].append(None if lp is None else {self._key(i): p for i, p in (*lp.top, (token, lp.logprob))})
            lists["text_offset"].append(self._offset)
            self._offset += len(self._names(token)[0])
        return lists

    def _key(self, token_id: int) -> str:
        """A token's text; where it is no character on its own, OpenAI's ``bytes:`` form, so that no two are one key."""
        text, spelled = self._names(token_id)
        return text if "\N{REPLACEMENT CHARACTER}" not in text else "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def of_prompt(names: Names, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
    """The ``prompt_logprobs`` of vLLM: for each token its own and the likeliest, by id; nothing for the first."""
    entries: list[dict[str, Any] | None] = []
    for token, lp in zip(token_ids, logprobs, strict=True):
        if lp is None:
            entries.append(None)
            continue
        ranked = {token: (lp.logprob, lp.rank)} | {i: (p, n) for n, (i, p) in enumerate(lp.top, 1) if i != token}
        entries.append({str(i): {"logprob": p, "rank": rank, "decoded_token": names(i)[0]} for i, (p, rank) in ranked.items()})
    return entries
