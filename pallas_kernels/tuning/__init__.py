"""Measured settings of the kernels, one JSON file a device, beside the table of named shapes that they were measured on.

A file holds ``device``, ``date``, ``versions``, ``command`` and ``settings``: op -> implementation -> list of entries, each
with the ``match`` it was measured for (head size, bytes per number) and the ``config`` that was fastest.
"""

import functools
import json
from importlib import resources
from typing import Any

_FILES = {"NVIDIA H200": "h200.json"}


@functools.cache
def load(device_kind: str) -> dict[str, Any]:
    """The tuned settings of a device (``jax.Device.device_kind``), or an empty table."""
    name = _FILES.get(device_kind)
    if name is None:
        return {}
    file = resources.files(__package__) / name
    return json.loads(file.read_text()) if file.is_file() else {}


def lookup(device_kind: str, op: str, implementation: str, **match: int) -> dict[str, Any] | None:
    """The tuned config for exactly these properties, or ``None``: then the implementation's own heuristic decides."""
    entries = load(device_kind).get("settings", {}).get(op, {}).get(implementation, [])
    return next((dict(entry["config"]) for entry in entries if entry["match"] == match), None)
