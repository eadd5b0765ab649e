"""Set JAX up for the tests, before anything imports it, and decide which marked tests run.

Environment variables are used and not `jax.config`, so that the subprocesses that tests start are set up alike.
"""

import importlib.util
import os
import pathlib


def _has_nvidia_gpu() -> bool:
    return pathlib.Path("/proc/driver/nvidia/version").exists() or pathlib.Path("/dev/nvidiactl").exists()


if "JAX_PLATFORMS" not in os.environ and not _has_nvidia_gpu():
    # Without this, an installed CUDA plugin (used to compile for a GPU that is not there) fails loudly at start.
    os.environ["JAX_PLATFORMS"] = "cpu"

# Two fake CPU devices let the sharding tests run anywhere. A count that the caller chose stays.
_DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"
if _DEVICE_COUNT_FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICE_COUNT_FLAG}=2".strip()

# Implicit promotion is how a bfloat16 model quietly becomes a float32 one, and how [B] meets [B, 1] unnoticed.
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"

import jax  # noqa: E402  (the variables above must be set first)
import pytest  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow too")
    parser.addoption("--parity", action="store_true", help="run the tests marked parity too (needs the parity extra)")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--parity"):
        missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
        if missing:
            raise pytest.UsageError(f"--parity needs {' and '.join(missing)}: `make parity` installs the parity extra")


def pytest_report_header() -> str:
    return f"jax {jax.__version__} on {jax.default_backend()}: {', '.join(str(device) for device in jax.devices())}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reasons = {}
    if not config.getoption("--slow"):
        reasons["slow"] = "slow: runs under `make test-slow` (--slow)"
    if not config.getoption("--parity"):
        reasons["parity"] = "compares with torch: runs under `make parity` (--parity)"
    if jax.default_backend() != "gpu":
        reasons["gpu"] = f"needs an NVIDIA GPU; JAX runs on {jax.default_backend()} here"
    for item in items:
        for name, reason in reasons.items():
            if item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=reason))
