"""A request on its way through the engine: its tokens so far, the blocks it holds and how far it has been computed."""

from __future__ import annotations

import dataclasses
import enum

from pagedjax.prefix_cache import CachedBlock, PrefixRoot
from pagedjax.request import Request


class Status(enum.Enum):
    """Where a sequence stands."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclasses.dataclass(eq=False, slots=True)
class TokenSequence:
    """What the scheduler knows of one request. Only the scheduler changes it.

    Attributes:
      request_id: unique among the requests in the engine.
      request: the prompt and how to continue it.
      arrival: running number; earlier ones go first within a priority.
      priority: lower ones go first.
      salt: see `PrefixRoot`.
      token_ids: prompt and new tokens, as far as the host has seen them.
      num_computed_tokens: tokens whose keys and values are in the cache once every dispatched step has run.
      num_in_flight: new tokens that dispatched steps may give and that the host has not seen yet.
      block_ids: physical blocks that it holds, in order.
      state_id: its row of the device's state while it runs.
      decoding: whether that row has been started: the last chunk of what was known has been dispatched.
      hashes: of its full blocks under `hashes_root`, as far as they were needed.
      published: the entry of the last block that it made known, or the root; with `num_published` blocks up to there.
      num_cached_tokens: prompt tokens that were found in the prefix cache when it was first admitted.
      num_preemptions: how often it lost its blocks.
      wants_prompt_logprobs: whether the log-probabilities of its prompt are still to come. It reads no known blocks then: each of its
        tokens has to be computed.
    """

    request_id: str
    request: Request
    arrival: int
    priority: int = 0
    salt: str = ""
    status: Status = Status.WAITING
    token_ids: list[int] = dataclasses.field(default_factory=list)
    num_computed_tokens: int = 0
    num_in_flight: int = 0
    block_ids: list[int] = dataclasses.field(default_factory=list)
    state_id: int = -1
    decoding: bool = False
    hashes: list[bytes] = dataclasses.field(default_factory=list)
    hashes_root: PrefixRoot | None = None
    published: CachedBlock | PrefixRoot | None = None
    num_published: int = 0
    num_cached_tokens: int | None = None
    num_preemptions: int = 0
    wants_prompt_logprobs: bool = False

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.prompt_token_ids)
        self.wants_prompt_logprobs = self.request.params.prompt_logprobs is not None and len(self.token_ids) > 1

    @property
    def order(self) -> tuple[int, int]:
        """Smaller goes first."""
        return self.priority, self.arrival

    @property
    def lag(self) -> int:
        """Known tokens to compute before the row can decode."""
        return 0 if self.decoding else len(self.token_ids) - self.num_computed_tokens

    @property
    def num_new_tokens(self) -> int:
        """New tokens that the host has seen."""
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def new_token_ids(self) -> list[int]:
        """The new tokens themselves."""
        return self.token_ids[len(self.request.prompt_token_ids) :]

    @property
    def num_left(self) -> int:
        """New tokens that may still be asked for, those in flight taken off."""
        return self.request.max_new_tokens - self.num_new_tokens - self.num_in_flight
