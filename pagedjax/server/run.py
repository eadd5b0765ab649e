"""Run the application in uvicorn: one process, loopback unless told otherwise, and an end that lets answers finish."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from pagedjax.errors import ConfigError
from pagedjax.llm import LLM
from pagedjax.server.app import create_app
from pagedjax.server.errors import error_body
from pagedjax.server.settings import ServerConfig

logger = logging.getLogger("pagedjax.server")

_HEADER_BYTES = 64 << 10
# Longer than clients keep an idle connection (OpenAI's: 5 s): were the two equal, a request could meet the connection's end.
_KEEP_ALIVE_S = 75
_AFTER_DRAIN_S = 5.0  # for streams to tell their clients that the engine was stopped


class _Protocol(H11Protocol):
    """HTTP/1.1 by h11, which bounds the size of headers; what is no HTTP gets an error in the same form as everything else."""

    def send_400_response(self, msg: str) -> None:
        body = json.dumps(error_body(400, msg)).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        for part in (h11.Response(status_code=400, headers=headers, reason=b"Bad Request"), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(part) or b"")
        self.transport.close()


class _Server(uvicorn.Server):
    """Ends on SIGTERM and SIGINT after the answers that run; a second signal ends it now. Neither is raised again afterwards."""

    def __init__(self, config: uvicorn.Config, drain_s: float, stop_engine: Callable[[], object]) -> None:
        super().__init__(config)
        self.stopped_by: int | None = None
        self._drain_s, self._stop_engine = drain_s, stop_engine

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """In the place of uvicorn's, which raises the signal again when everything is done."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal lets answers finish, the second does not."""
        self.force_exit = self.should_exit
        self.should_exit = True
        self.stopped_by = self.stopped_by or sig

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain, and stop the engine under those that take too long: their clients are told."""
        late = asyncio.get_running_loop().call_later(self._drain_s, self._stop_engine)
        try:
            await super().shutdown(sockets)
        finally:
            late.cancel()


def listen(host: str, port: int) -> socket.socket:
    """A socket that is bound before the model loads, so that a port in use is told at once.

    Raises:
      ConfigError: it cannot be.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        bound = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError, OverflowError) as error:
        raise ConfigError(f"host is {host!r} and port {port}; there is no such address: {error}") from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except (OSError, OverflowError) as error:
        bound.close()
        raise ConfigError(f"host is {host!r} and port {port}; that address cannot be had: {error}") from None
    return bound


def server(llm: LLM, config: ServerConfig, *, access_log: bool = False) -> _Server:
    """A server that has not started; its `run` takes a list with the socket of `listen`."""
    app = create_app(llm, config)

    def stop_engine() -> None:
        logger.warning("answers still run after %g seconds; they are ended", config.drain_s)
        app.state.closing = asyncio.ensure_future(app.state.service.front.close())

    settings = uvicorn.Config(
        app,
        http=_Protocol,
        ws="none",
        lifespan="on",
        log_level="info" if access_log else "warning",
        access_log=access_log,
        server_header=False,
        h11_max_incomplete_event_size=_HEADER_BYTES,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(config.drain_s + _AFTER_DRAIN_S) + 1,
    )
    return _Server(settings, config.drain_s, stop_engine)


def serve(llm: LLM, config: ServerConfig, bound: socket.socket, *, access_log: bool = False) -> int | None:
    """Serve until a signal comes.

    Returns:
      the number of the signal that ended it.
    """
    one = server(llm, config, access_log=access_log)
    one.run(sockets=[bound])
    return one.stopped_by
