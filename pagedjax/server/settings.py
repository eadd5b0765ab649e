"""How a server behaves towards its clients."""

from __future__ import annotations

import dataclasses
import math

from pagedjax.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class ServerConfig:
    """Settings of a server; those of the engine are its own.

    Attributes:
      model_names: what clients may call the model; the first one is what answers say.
      api_keys: one of them has to come with each request; none asks for none.
      max_queue: answers that may wait beside the ``max_num_seqs`` that run; further ones are refused with 429.
      max_body_bytes: the largest request body; a larger one is refused with 413.
      max_headers: the most header lines; more are refused with 431.
      body_s: seconds in which a body has to arrive, else 408.
      stall_s: seconds for which a stream may wait for a client that reads nothing, before its answer is given up.
      stuck_s: seconds after which an engine that is still at the same step counts as stuck; more than the longest compilation.
      drain_s: seconds that running answers get when the server is asked to stop.

    Raises:
      ConfigError: a setting out of range; the message names it.
    """

    model_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    max_queue: int = 512
    max_body_bytes: int = 4 << 20
    max_headers: int = 100
    body_s: float = 30.0
    stall_s: float = 60.0
    stuck_s: float = 300.0
    drain_s: float = 60.0

    def __post_init__(self) -> None:
        for what, lowest in (("max_queue", 0), ("max_body_bytes", 1), ("max_headers", 1)):
            value = getattr(self, what)
            if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
                raise ConfigError(f"{what} is {value!r}; it must be an integer of at least {lowest}")
        for what in ("body_s", "stall_s", "stuck_s", "drain_s"):
            value = getattr(self, what)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
                raise ConfigError(f"{what} is {value!r}; it must be a number of seconds above 0")
        for what in ("model_names", "api_keys"):
            value = getattr(self, what)
            if not isinstance(value, tuple) or any(not isinstance(one, str) or not one.strip() for one in value):
                raise ConfigError(f"{what} is {value!r}; it must be a tuple of texts that are not empty")
        if not self.model_names:
            raise ConfigError("model_names is empty; the model needs a name")
