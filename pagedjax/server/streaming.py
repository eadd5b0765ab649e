"""Server-sent events, and the client who leaves: whoever closes the connection ends what was made for it, at once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

logger = logging.getLogger("pagedjax.server")
T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


def event(content: dict[str, Any]) -> bytes:
    """One event with a JSON object; never NaN or Infinity."""
    return b"data: " + json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n\n"


class ClientGoneError(Exception):
    """The connection was closed before the answer was complete."""


async def until_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves.

    Raises:
      ClientGoneError: it left.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A response of events as they come.

    Args:
      events: whole events, encoded; closed when the response ends, however it ends.
      held: released then.
      stall_s: seconds that one event may wait for the client to read; then the rest is given up.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], held: contextlib.ExitStack, stall_s: float) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events, self._held, self._stall_s = events, held, stall_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        with self._held:
            try:
                await until_gone(receive, self._write(send))
            except ClientGoneError:
                pass
            except TimeoutError:
                logger.warning("a client read nothing for %g seconds; its answer is given up", self._stall_s)
            finally:
                await self._events.aclose()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for data in self._events:
            async with asyncio.timeout(self._stall_s):
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
