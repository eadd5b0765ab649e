"""Errors as OpenAI's clients expect them: ``{"error": {"message", "type", "param", "code"}}``, and a status that says whose fault it is."""

from __future__ import annotations

import http
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from pagedjax.errors import EngineError, RequestError

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_SHOWN = 60  # characters of a wrong value that a message repeats


class ErrorDetail(BaseModel):
    """What went wrong: in words, what kind it is, which argument, and a name for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every answer that is an error."""

    error: ErrorDetail


class ApiError(HTTPException):
    """An error that a client is told, with the status.

    Args:
      status: of HTTP.
      message: names the argument, the value and what would be right.
      param: the argument's name.
      code: a name for programs, such as ``"context_length_exceeded"``.
      headers: of the response.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(status, message, dict(headers) if headers else None)
        self.message, self.param, self.code = message, param, code

    def body(self) -> dict[str, Any]:
        """The JSON object that the client gets."""
        return error_body(self.status_code, self.message, param=self.param, code=self.code)

    def response(self) -> JSONResponse:
        """The same with status and headers."""
        return JSONResponse(self.body(), self.status_code, self.headers)


def error_body(status: int, message: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An error in OpenAI's form; half a surrogate pair, which no UTF-8 can say, is shown as an escape."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    message = message.encode("utf-8", "backslashreplace").decode()
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def of_exception(error: BaseException) -> ApiError:
    """What a client is told of an exception while its answer was made: its own fault, the engine's, or a bug of ours."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return ApiError(400, str(error), param=_first_word(str(error)))
    if isinstance(error, RecursionError):
        return ApiError(400, "the body is nested too deeply")
    if isinstance(error, EngineError):
        gone = not str(error).startswith("a step failed")
        return ApiError(503 if gone else 500, str(error), code="engine_stopped" if gone else "engine_error")
    return ApiError(500, f"the server has a bug: {type(error).__name__}", code="internal_error")


def of_validation(errors: Sequence[Mapping[str, Any]], body: Any) -> ApiError:
    """Pydantic's findings in one sentence: where, what stands there, and what would be right.

    Args:
      errors: as `RequestValidationError.errors` gives them; of several only what concerns the same place as the first is told.
      body: the parsed JSON.
    """
    places = [(*_place(error["loc"][1:] if error["loc"][:1] == ("body",) else error["loc"], body), error) for error in errors]
    path, value, first = places[0]
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"Unrecognized request argument supplied: {path}", param=path, code="unknown_parameter")
    if first["type"] == "missing":
        return ApiError(400, f"{path or 'the body'} is missing", param=path or None, code="missing_required_parameter")
    wanted = " or ".join(dict.fromkeys(_wish(error) for where, _, error in places if where == path))
    return ApiError(400, f"{path or 'the body'} is {_shown(value)}; {wanted}", param=path or None, code="invalid_value")


def _wish(error: Mapping[str, Any]) -> str:
    message = str(error["msg"]).removeprefix("Value error, ")
    return message[:1].lower() + message[1:]


def _place(loc: Sequence[str | int], body: Any) -> tuple[str, Any]:
    """The path and the value there. Pydantic puts names of a union's members between; the body itself says which parts are real."""
    path, value = "", body
    for position, part in enumerate(loc):
        try:
            value = value[part]
        except (LookupError, TypeError):
            if position == len(loc) - 1 and isinstance(value, Mapping) and isinstance(part, str):
                path, value = f"{path}.{part}", None  # what is missing
            continue
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    return path.lstrip("."), value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _first_word(message: str) -> str | None:
    word = message.split(" ", 1)[0]
    return word if word.replace("_", "a").isalnum() and word not in ("the", "a", "there") else None


def install(app: FastAPI) -> None:
    """Let every error of `app` have this form."""

    @app.exception_handler(HTTPException)
    async def known(request: Request, error: HTTPException) -> JSONResponse:
        if isinstance(error, ApiError):
            return error.response()
        phrase = http.HTTPStatus(error.status_code).phrase
        message = f"{phrase}: {request.method} {request.url.path}" if error.detail == phrase else str(error.detail)
        return JSONResponse(error_body(error.status_code, message), error.status_code, error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return of_validation(error.errors(), error.body).response()

    @app.exception_handler(RequestError)
    async def refused(request: Request, error: RequestError) -> JSONResponse:
        return of_exception(error).response()

    @app.exception_handler(EngineError)
    async def failed(request: Request, error: EngineError) -> JSONResponse:
        return of_exception(error).response()

    @app.exception_handler(RecursionError)
    async def deep(request: Request, error: RecursionError) -> JSONResponse:
        return of_exception(error).response()

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> JSONResponse:
        return of_exception(error).response()
