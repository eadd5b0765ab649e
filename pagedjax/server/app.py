"""The application: routes, limits and errors around one model."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from fastapi import FastAPI

from pagedjax import __version__
from pagedjax.llm import LLM
from pagedjax.server import chat, completions, errors, info, page
from pagedjax.server.guard import Guard
from pagedjax.server.service import Service
from pagedjax.server.settings import ServerConfig

_STATUSES = (400, 401, 404, 408, 413, 415, 429, 431, 500, 503)


def create_app(llm: LLM, config: ServerConfig) -> FastAPI:
    """An ASGI application that serves `llm`; its engine runs from the application's startup to its shutdown.

    Args:
      llm: belongs to the application meanwhile.
      config: how it behaves towards its clients.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.service = Service(llm, config)
        try:
            yield
        finally:
            await app.state.service.close()

    app = FastAPI(
        title="pagedjax",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,  # those pages load their scripts from elsewhere
        redoc_url=None,
        responses={status: {"model": errors.ErrorBody} for status in _STATUSES},
    )
    errors.install(app)
    for router in (chat.router, completions.router, info.router, page.router):
        app.include_router(router)
    app.add_middleware(Guard, config=config)
    return app
