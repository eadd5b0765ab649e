"""JSON as RFC 8259 has it, and nothing that Python's reader lets pass beside."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from fastapi import Request, Response
from fastapi.routing import APIRoute

from pagedjax.server.errors import ApiError


def parse(body: bytes) -> Any:
    """The value of a body.

    Raises:
      ApiError: 400, not UTF-8, not JSON (NaN and Infinity are none), nested too deeply, or half a surrogate pair in a text.
    """
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8: byte {error.start} is 0x{body[error.start]:02x}", code="invalid_json") from None
    try:
        value = json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from None
    except ValueError as error:  # also of an integer of thousands of digits
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    if "\\ud" in text.lower():
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except (UnicodeEncodeError, RecursionError):
            raise ApiError(400, "the body has half a surrogate pair in a text, which is no character", code="invalid_json") from None
    return value


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number there")


class _StrictRequest(Request):
    async def json(self) -> Any:
        return parse(await self.body())


class JsonRoute(APIRoute):
    """A route whose body is read by `parse`; a body of another kind is refused with 415."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's own handler, on a stricter request."""
        handle = super().get_route_handler()

        async def strict(request: Request) -> Response:
            kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
            if request.method == "POST" and kind != "application/json":
                raise ApiError(415, f"Content-Type is {kind!r}; it must be 'application/json'")
            return await handle(_StrictRequest(request.scope, request.receive))

        return strict
