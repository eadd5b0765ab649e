"""Stop strings: the text of one answer, token by token, that ends where one of some strings turns up.

The search is Aho and Corasick's (1975, "Efficient string matching: an aid to bibliographic search"): one state says how much of
which stop string the text ends with. So each character costs a constant amount of work on average, whatever the stop strings are,
and the state also says which text has to be held back.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Protocol

from pagedjax.errors import RequestError


class Stream(Protocol):
    """What gives the text of ids that come one at a time, such as `TextStream`."""

    def step(self, token_id: int) -> str:
        """The text that became certain with `token_id`."""

    def finish(self) -> str:
        """The rest."""


class AnswerText:
    """The text of one answer, ended by stop strings.

    The steps and the `finish` joined are the text of the answer, up to the stop string where there is one. What could still become a
    stop string is held back, so nothing that was given out is ever taken back. Tokens are searched as they come: the first one that
    completes a stop string ends the answer. Where its text completes several, the one that begins first counts, and of those that
    begin together the shortest.

    Text belongs to the token that made it certain: the bytes of a character to its last token.

    Attributes:
      stopped: the stop string that ended the answer, or None.
      num_tokens: tokens taken, the one that completed the stop string included. Those after the end are not counted.
    """

    def __init__(
        self, stream: Stream, stop: str | Sequence[str] = (), *, include_stop_str_in_output: bool = False, min_tokens: int = 0
    ) -> None:
        """Start at an empty answer.

        Args:
          stream: decodes the tokens, as ``tokenizer.stream(context=prompt_ids)`` does. It yields none of the prompt's text, so a stop
            string is never found there.
          stop: strings that end the answer; a single one may stand alone.
          include_stop_str_in_output: end the text after the stop string, not before it. Nothing is held back then.
          min_tokens: a stop string that is complete before this many tokens were taken is ordinary text.

        Raises:
          RequestError: an empty stop string, one that is no string, or a negative `min_tokens`.
        """
        if isinstance(min_tokens, bool) or not isinstance(min_tokens, int) or min_tokens < 0:
            raise RequestError(f"min_tokens is {min_tokens!r}; it must be an integer of 0 or more")
        self.stopped: str | None = None
        self.num_tokens = 0
        self._stream, self._min_tokens, self._include = stream, min_tokens, include_stop_str_in_output
        self._search = _Search(_checked(stop))
        self._state = 0
        self._ended = False

    def step(self, token_id: int) -> str:
        """The text that became certain with `token_id`, whole characters only; ``""`` after the end."""
        if self._ended:
            return ""
        self.num_tokens += 1
        return self._take(self._stream.step(token_id))

    def finish(self) -> str:
        """The rest, where no stop string ended the answer: what was held back, incomplete characters as U+FFFD. Ends the answer."""
        if self._ended:
            return ""
        text = self._take(self._stream.finish())
        if self.stopped is None:
            text += self._search.source[self._state][: self._num_held()]
        self._ended = True
        return text

    def _take(self, new: str) -> str:
        """Search `new`, and give out what is certain of the text that was held back and of `new`."""
        old, num_old = self._search.source[self._state], self._num_held()
        # What is complete too early does not count, but its end may begin a stop string that is complete in time.
        self._state, match, end = self._search.advance(self._state, new, self.num_tokens >= self._min_tokens)
        if match is None:
            num_certain = num_old + len(new) - self._num_held()
        else:
            self.stopped, self._ended = match, True
            num_certain = num_old + end - (0 if self._include else len(match))
        # Only what is given out is copied, so that a long stop string costs no more than a short one.
        return old[:num_certain] if num_certain <= num_old else old[:num_old] + new[: num_certain - num_old]

    def _num_held(self) -> int:
        return 0 if self._include else self._search.depth[self._state]


class _Search:
    """A tree of the stop strings' beginnings, node 0 the empty one.

    A state is the node of the longest end of the text that a stop string begins with and goes on after. That end is what could still
    become a stop string.

    Attributes:
      depth: characters of each node's text.
      source: for each node a stop string that begins with its text.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.depth, self.source = [0], [""]
        self._children: list[dict[str, int]] = [{}]
        self._match: list[str | None] = [None]  # the longest stop string that the node's text ends with
        for stop in stops:
            self._add(stop)
        self._shorter = [0] * len(self.depth)  # the node of the longest proper end of the node's text
        nodes = collections.deque(self._children[0].values())
        while nodes:  # in order of depth: a node's shorter ones are complete before it
            node = nodes.popleft()
            if self._match[node] is None:
                self._match[node] = self._match[self._shorter[node]]
            for char, child in self._children[node].items():
                self._shorter[child] = self._after(self._shorter[node], char)
                nodes.append(child)

    def _add(self, stop: str) -> None:
        node = 0
        for depth, char in enumerate(stop, 1):
            child = self._children[node].setdefault(char, len(self.depth))
            if child == len(self.depth):
                self.depth.append(depth)
                self.source.append(stop)
                self._children.append({})
                self._match.append(None)
            node = child
        self._match[node] = stop

    def _after(self, node: int, char: str) -> int:
        """The node of the longest end of `node`'s text and `char`."""
        while node and char not in self._children[node]:
            node = self._shorter[node]
        return self._children[node].get(char, 0)

    def advance(self, state: int, text: str, wanted: bool) -> tuple[int, str | None, int]:
        """Read `text`.

        Returns:
          The state afterwards; the stop string that was found, if it is `wanted`, else None; and where in `text` it ends. It may begin
          before `text`.
        """
        if not self._children[0]:
            return 0, None, 0
        found, found_begin, found_end = None, 0, 0
        for end, char in enumerate(text, 1):
            node = self._after(state, char)
            match = self._match[node] if wanted else None
            if match is not None and (found is None or end - len(match) < found_begin):
                found, found_begin, found_end = match, end - len(match), end
            state = node
            while state and not self._children[state]:
                state = self._shorter[state]
            # What begins no earlier than the match would not replace it.
            if found is not None and end - self.depth[state] >= found_begin:
                break
        return state, found, found_end


def _checked(stop: str | Sequence[str]) -> list[str]:
    if isinstance(stop, str):
        named = {"stop": stop}
    elif isinstance(stop, Sequence):
        named = {f"stop[{index}]": item for index, item in enumerate(stop)}
    else:
        raise RequestError(f"stop is a {type(stop).__name__}; it must be a string or a list of strings")
    for name, item in named.items():
        if not isinstance(item, str):
            raise RequestError(f"{name} is {item!r}; it must be a string")
        if not item:
            raise RequestError(f"{name} is empty; it must have at least one character")
    return list(named.values())
