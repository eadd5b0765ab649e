"""The chat page: three files, read once at the start. No request names a file."""

from __future__ import annotations

from importlib import resources

from fastapi import APIRouter
from starlette.responses import Response

router = APIRouter(include_in_schema=False)

_HEADERS = {
    # Nothing from elsewhere runs here, and no other site frames it.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def _add(path: str, name: str, media_type: str) -> None:
    content = resources.files(__package__).joinpath(name).read_bytes()

    async def file() -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)

    router.add_api_route(path, file, methods=["GET"])


_add("/", "index.html", "text/html")
_add("/page/chat.js", "chat.js", "text/javascript")
_add("/page/chat.css", "chat.css", "text/css")
