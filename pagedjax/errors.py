"""Exceptions that pagedjax raises on purpose.

Each one also derives from the built-in exception that a caller would guess, so ``except ValueError`` keeps working.
"""


class PagedjaxError(Exception):
    """Base of every exception that pagedjax raises on purpose."""


class CheckpointError(PagedjaxError, ValueError):
    """A model folder or file is missing, damaged or inconsistent. The message names the file and what is wrong."""


class UnsupportedModelError(PagedjaxError, NotImplementedError):
    """The model is well formed but needs something that is not built. The message names it."""


class ConfigError(PagedjaxError, ValueError):
    """A setting of the model or of a run is unusable. The message names it, its value and what would be right."""


class RequestError(PagedjaxError, ValueError):
    """A prompt or a sampling parameter is unusable. The message names the argument, the value and what would be right."""


class EngineError(PagedjaxError, RuntimeError):
    """A step failed on the device. The message has the cause; requests of that step are lost, the engine goes on."""
