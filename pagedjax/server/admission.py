"""How many answers the server takes on at once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from pagedjax.server.errors import ApiError


class Admission:
    """Counts answers from the moment a request is read to its end. Belongs to the event loop.

    Args:
      limit: the most at once, running and waiting.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.num_taken = limit, 0

    @contextlib.contextmanager
    def taking(self, count: int) -> Iterator[None]:
        """Inside, `count` more answers are on their way.

        Raises:
          ApiError: 400 if they could never be taken, 429 if they cannot now.
        """
        if count > self.limit:
            raise ApiError(400, f"n and the prompts make {count} answers; a request may ask for at most {self.limit}", param="n")
        if self.num_taken + count > self.limit:
            message = f"the server is full: {self.num_taken} answers are on their way and it takes {self.limit}; try again later"
            raise ApiError(429, message, code="queue_full", headers={"Retry-After": "1"})
        self.num_taken += count
        try:
            yield
        finally:
            self.num_taken -= count
