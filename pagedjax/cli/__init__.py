"""The ``pagedjax`` command: ``generate``, ``chat``, ``serve``, ``info`` and ``demo``.

Modules here import JAX and the model only inside the functions that need them, so that ``--help`` and a wrong option answer
at once.
"""

from pagedjax.cli.app import main, run

__all__ = ["main", "run"]
