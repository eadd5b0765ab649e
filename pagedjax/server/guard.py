"""What a request has to pass before anything of it is read into the application: its headers, its key and the size of its body."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagedjax.server.errors import ApiError
from pagedjax.server.settings import ServerConfig

# What works without a key: the page, whose reader types the key in, and what monitors ask.
_OPEN = frozenset({"/", "/health", "/metrics"})
_OPEN_FOLDER = "/page/"


class Guard:
    """Refuses too many headers (431), a missing or wrong key (401), and a body that is too large (413) or too slow (408).

    The body is read here, whole, and handed on: so no handler waits for it, and memory has its bound.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app, self._config = app, config
        self._keys = [_digest(key.encode()) for key in config.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            headers = scope["headers"]
            if len(headers) > self._config.max_headers:
                raise ApiError(431, f"the request has {len(headers)} headers; at most {self._config.max_headers} are read")
            path = scope["path"]
            if self._keys and path not in _OPEN and not path.startswith(_OPEN_FOLDER):
                self._check_key(headers)
            body = await self._body(headers, receive)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        except _GoneError:
            return
        given = False

        async def replay() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, replay, send)

    def _check_key(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        given = next((value for name, value in headers if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        digest = _digest(key.strip())
        # Digests are of one length, and every key is looked at: the time says nothing about any of them.
        known = [secrets.compare_digest(digest, one) for one in self._keys]
        if scheme.lower() != b"bearer" or not any(known):
            what = "no API key" if not given else "a wrong API key"
            message = f"the request has {what}; send it as 'Authorization: Bearer KEY'"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    async def _body(self, headers: Iterable[tuple[bytes, bytes]], receive: Receive) -> bytes:
        limit = self._config.max_body_bytes
        stated = next((value for name, value in headers if name == b"content-length"), b"")
        if stated.isdigit() and int(stated) > limit:
            raise ApiError(413, f"the body has {int(stated)} bytes; at most {limit} are read", code="request_too_large")
        parts, size = [], 0
        try:
            async with asyncio.timeout(self._config.body_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _GoneError
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > limit:
                        raise ApiError(413, f"the body has more than {limit} bytes; no more are read", code="request_too_large")
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {self._config.body_s:g} seconds") from None


class _GoneError(Exception):
    """The client left before its request was complete."""


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
