"""The server: OpenAI's HTTP interface on an `AsyncEngine`. Needs the extra ``serve``.

`create_app` makes the application, `serve` runs it; the README beside this file says what is followed where OpenAI's and vLLM's servers
differ.
"""

from pagedjax.server.app import create_app
from pagedjax.server.run import serve
from pagedjax.server.settings import ServerConfig

__all__ = ["ServerConfig", "create_app", "serve"]
