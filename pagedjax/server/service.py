"""What every endpoint shares: the model, the engine's front, the limits and the figures."""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
import uuid
from collections.abc import Callable
from typing import TypeVar

from fastapi import Request

from pagedjax.async_engine import AsyncEngine
from pagedjax.errors import EngineError
from pagedjax.llm import LLM
from pagedjax.server.admission import Admission
from pagedjax.server.errors import ApiError
from pagedjax.server.logprobs import token_names
from pagedjax.server.metrics import Metrics
from pagedjax.server.settings import ServerConfig
from pagedjax.stats import EngineStats

T = TypeVar("T")

_TEXT_THREADS = 2  # that tokenise and check; the tokenizers library lets go of the interpreter's lock meanwhile
_STATS_S = 1.0  # how long to wait for an engine that is in the middle of a step


class Service:
    """One model being served. Made and closed on the event loop that serves it.

    Args:
      llm: belongs to this object until `close`: nobody else may call it or its engine.
      config: the server's settings.

    Attributes:
      front: the engine, on its own thread.
      created: Unix time, for ``/v1/models``.
    """

    def __init__(self, llm: LLM, config: ServerConfig) -> None:
        self.llm, self.config = llm, config
        self.front = AsyncEngine(llm.engine)
        self.admission = Admission(llm.engine.engine_config.max_num_seqs + config.max_queue)
        self.metrics = Metrics()
        self.names = token_names(llm.tokenizer)
        self.created = int(time.time())
        self._threads = concurrent.futures.ThreadPoolExecutor(_TEXT_THREADS, "pagedjax-text")
        self._watching = asyncio.ensure_future(self.metrics.watch_loop())

    async def close(self) -> None:
        """Stop the engine; whoever still waits for tokens gets an `EngineError`."""
        self._watching.cancel()
        await self.front.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def off_loop(self, function: Callable[[], T]) -> T:
        """The result of something whose time grows with the client's text."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    @property
    def trouble(self) -> str | None:
        """Why no answer is to be expected, or ``None``."""
        if not self.front.is_alive:
            return "the engine has stopped"
        busy = self.front.busy_s
        return f"the engine has been at one step for {busy:.0f} seconds" if busy > self.config.stuck_s else None

    async def stats(self) -> EngineStats | None:
        """Of the engine; ``None`` while it is too busy to say."""
        try:
            async with asyncio.timeout(_STATS_S):
                return await self.front.stats()
        except (TimeoutError, EngineError):
            return None

    def model(self, asked: str | None) -> str:
        """The name for the answer.

        Raises:
          ApiError: 404 for a name that this server does not have.
        """
        if asked is not None and asked not in self.config.model_names:
            names = ", ".join(self.config.model_names)
            raise ApiError(404, f"model is {asked[:200]!r}; this server has {names}", param="model", code="model_not_found")
        return asked or self.config.model_names[0]


def service_of(request: Request) -> Service:
    """The one of the application that a request came to."""
    service: Service = request.app.state.service
    return service


def new_id(prefix: str) -> str:
    """A name for an answer that no other has."""
    return f"{prefix}-{uuid.uuid4().hex}"
