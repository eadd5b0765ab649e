"""Which implementation of an op runs: one rule for every op of the package.

An implementation is a module that offers two functions and nothing that happens at import:

* ``why_not(problem, device, *, interpret) -> str | None``: why it cannot serve these shapes there, or ``None`` if it can;
* ``run(problem, *arrays, interpret)``: do it; called with a problem that ``why_not`` let pass.

``problem`` is a frozen, hashable description of the call (shapes, dtypes, options) that the op's public function built
after it had validated the arguments. Modules are imported when they are first asked for, so that a package that only one
implementation needs is never needed by the others.
"""

import contextlib
import contextvars
import importlib
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import jax

INTERPRET_SUFFIX = "_interpret"


@dataclass(frozen=True)
class Device:
    """What an implementation may ask about the device: jax's platform name, and the compute capability on NVIDIA."""

    platform: str
    compute_capability: tuple[int, int] | None = None
    kind: str = ""

    def __str__(self) -> str:
        name = self.kind or self.platform
        return name if self.compute_capability is None else f"{name} (compute capability {'{}.{}'.format(*self.compute_capability)})"


H200 = Device("gpu", (9, 0), "NVIDIA H200")
_assumed: contextvars.ContextVar[Device | None] = contextvars.ContextVar("pallas_kernels_device", default=None)


@contextlib.contextmanager
def compiling_for(device: Device) -> Iterator[None]:
    """Resolve implementations for ``device`` instead of the default device: for ahead-of-time compilation.

    It changes the choice alone, at trace time; lower with shardings of the device that you compile for. A function that
    ``jax.jit`` has traced before keeps its choice, so wrap a fresh one.
    """
    token = _assumed.set(device)
    try:
        yield
    finally:
        _assumed.reset(token)


def current_device() -> Device:
    """The device that ``compiling_for`` names, else jax's default device."""
    assumed = _assumed.get()
    if assumed is not None:
        return assumed
    default: Any = jax.config.jax_default_device  # type: ignore[attr-defined]  # set at run time
    device = default if isinstance(default, jax.Device) else jax.devices(default)[0]
    capability = getattr(device, "compute_capability", None)
    parsed = None
    if device.platform == "gpu" and capability:
        try:
            major, _, minor = str(capability).partition(".")
            parsed = int(major), int(minor or 0)
        except ValueError:  # an AMD card names its architecture here ("gfx942")
            parsed = None
    return Device(device.platform, parsed, device.device_kind)


class Implementation(Protocol):
    """The two functions of an implementation's module."""

    def why_not(self, problem: Any, device: Device, *, interpret: bool) -> str | None:
        """Why it cannot serve ``problem`` on ``device``; ``None`` if it can."""

    def run(self, problem: Any, *arrays: jax.Array, interpret: bool) -> Any:
        """Do it."""


@dataclass(frozen=True)
class Op:
    """An op's name and its implementations.

    ``modules`` maps implementation names to module names; a name that ends in ``_interpret`` runs the module's kernel
    in Pallas's interpreter. ``preference`` is the order in which ``implementation=None`` tries them.
    """

    name: str
    modules: Mapping[str, str] = field(hash=False)
    preference: tuple[str, ...]

    def load(self, name: str) -> Implementation:
        """Import the module of implementation ``name``.

        Raises:
            ImportError: it, or something that it needs, is not installed.
        """
        return cast(Implementation, importlib.import_module(self.modules[name]))

    def why_not(self, name: str, problem: Hashable | None, device: Device) -> str | None:
        """Why implementation ``name`` does not serve ``problem`` on ``device``, or ``None``."""
        try:
            module = self.load(name)
        except ImportError as error:
            return f"it cannot be imported here: {error}"
        return module.why_not(problem, device, interpret=name.endswith(INTERPRET_SUFFIX))

    def resolve(self, implementation: str | None, problem: Hashable | None, device: Device) -> str:
        """Name of the implementation that runs.

        Raises:
            ValueError: there is none of that name.
            NotImplementedError: it does not run here, and why.
        """
        if implementation is not None:
            if implementation not in self.modules:
                raise ValueError(f"{self.name} has no implementation {implementation!r}; it has {', '.join(self.modules)}")
            reason = self.why_not(implementation, problem, device)
            if reason is not None:
                raise NotImplementedError(f"{self.name}: {implementation} does not run on {device}: {reason}")
            return implementation
        reasons = []
        for name in self.preference:
            reason = self.why_not(name, problem, device)
            if reason is None:
                return name
            reasons.append(f"{name}: {reason}")
        raise NotImplementedError(f"{self.name}: nothing serves this call on {device}: {'; '.join(reasons)}")


@dataclass(frozen=True)
class Support:
    """Answer of ``pallas_kernels.support``."""

    op: str
    device: Device
    implementation: str | None  # what the call would run, or None if it would raise
    reasons: Mapping[str, str | None]  # every implementation: None if it runs here, else why not

    def __str__(self) -> str:
        lines = [f"{self.op} on {self.device}: {self.implementation or 'nothing'} runs"]
        lines += [f"  {name}: {'yes' if reason is None else reason}" for name, reason in self.reasons.items()]
        return "\n".join(lines)


def report(op: Op, implementation: str | None, problem: Hashable | None) -> Support:
    """What ``op.resolve`` would say about every implementation."""
    device = current_device()
    try:
        chosen = op.resolve(implementation, problem, device)
    except NotImplementedError:
        chosen = None
    return Support(op.name, device, chosen, {name: op.why_not(name, problem, device) for name in op.modules})
