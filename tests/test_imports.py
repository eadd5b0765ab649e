"""The order of the modules, enforced: a module imports only what stands to its left.

``pallas_kernels`` knows nothing of ``pagedjax``. In ``pagedjax`` the host column decides and never touches JAX, the traced
column computes and sees of the host column only plain values, and both meet in the last modules.
"""

import ast
import os
import pathlib
import subprocess
import sys
import textwrap

import pytest

ROOT = pathlib.Path(__file__).parent.parent

HOST = (
    "errors",
    "config",
    "inputs",
    "request",
    "prefix_cache",
    "allocator",
    "engine_config",
    "memory",
    "sequence",
    "scheduler",
    "batch",
    "stats",
    "text",
    "checkpoint",
)
TRACED = ("kv_cache", "params", "layers", "attention", "model", "fused_decode", "sampling", "step", "engine_step")
MEETING = ("load", "generation", "runner", "engine", "async_engine", "llm", "server", "bench", "cli", "__main__")
# What the traced column may know of the host: plain values.
SHARED_VALUES = ("errors", "config", "inputs")
# Imported by a host module, each of these would bring JAX along.
DEVICE_PACKAGES = ("jax", "jaxlib", "flax", "pallas_kernels", "optax", "chex", "orbax")
ROOT_MODULE = "__init__"


def allowed(module: str) -> frozenset[str]:
    """Top-level modules of pagedjax that `module`, one of them, may import."""
    if module in HOST:
        return frozenset(HOST[: HOST.index(module)])
    if module in TRACED:
        return frozenset((*SHARED_VALUES, *TRACED[: TRACED.index(module)]))
    if module in MEETING:
        return frozenset((*HOST, *TRACED, *MEETING[: MEETING.index(module)], ROOT_MODULE))
    return frozenset((*HOST, *TRACED, *MEETING))  # the package's own __init__: the public names


def imported_names(source: str, package: str) -> list[tuple[int, str]]:
    """Line and absolute dotted name of each import in `source`, function bodies included; ``package`` resolves relative ones."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                base = ".".join([*parts[: len(parts) - node.level + 1], *([base] if base else [])])
            found += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
    return sorted(found)


def breaches(root: pathlib.Path) -> list[str]:
    """One line for each import below `root` that breaks the order."""
    lines = []
    for path in sorted((root / "pallas_kernels").rglob("*.py")):
        lines += [
            f"{path.relative_to(root)}:{line}: imports {name}, but pallas_kernels must not know pagedjax"
            for line, name in imported_names(path.read_text(encoding="utf-8"), ".".join(path.relative_to(root).parent.parts))
            if name.split(".")[0] == "pagedjax"
        ]
    modules = {path.stem for path in (root / "pagedjax").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    for path in sorted((root / "pagedjax").rglob("*.py")):
        relative = path.relative_to(root)
        module = pathlib.Path(relative.parts[1]).stem
        if module not in (*HOST, *TRACED, *MEETING, ROOT_MODULE):
            lines.append(f"{relative}:1: pagedjax.{module} has no place in the order yet; give it one in tests/test_imports.py")
            continue
        for line, name in imported_names(path.read_text(encoding="utf-8"), ".".join(relative.parent.parts)):
            top, *rest = name.split(".")
            if module in HOST and top in DEVICE_PACKAGES:
                lines.append(f"{relative}:{line}: imports {name}, but pagedjax.{module} is a host module and must not bring in JAX")
            if top != "pagedjax":
                continue
            target = rest[0] if rest and rest[0] in modules else ROOT_MODULE
            if target not in (*allowed(module), module):
                shown = "pagedjax" if target == ROOT_MODULE else f"pagedjax.{target}"
                lines.append(f"{relative}:{line}: imports {shown}, which does not stand to the left of pagedjax.{module}")
    return lines


def test_modules_import_only_what_stands_to_their_left():
    found = breaches(ROOT)
    assert not found, "imports that break the order of the modules:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("file", "source", "message"),
    [
        ("pallas_kernels/kv_write/x.py", "def f():\n    import pagedjax.config", "x.py:2: imports pagedjax.config, but pallas_kernels"),
        ("pallas_kernels/x.py", "from pagedjax import LLM", "x.py:1: imports pagedjax.LLM, but pallas_kernels"),
        ("pagedjax/allocator.py", "import jax.numpy as jnp", "allocator.py:1: imports jax.numpy, but pagedjax.allocator is a host module"),
        ("pagedjax/batch.py", "from pallas_kernels import kv_layout", "batch.py:1: imports pallas_kernels.kv_layout, but pagedjax.batch"),
        ("pagedjax/checkpoint/x.py", "from flax import struct", "x.py:1: imports flax.struct, but pagedjax.checkpoint"),
        ("pagedjax/errors.py", "from pagedjax.config import C", "errors.py:1: imports pagedjax.config, which does not stand to the left"),
        ("pagedjax/errors.py", "from . import config", "errors.py:1: imports pagedjax.config, which does not stand to the left"),
        ("pagedjax/text/x.py", "from ..checkpoint import open_checkpoint", "text/x.py:1: imports pagedjax.checkpoint, which does not"),
        ("pagedjax/layers.py", "from pagedjax import model", "layers.py:1: imports pagedjax.model, which does not stand to the left"),
        ("pagedjax/model.py", "from .allocator import B", "model.py:1: imports pagedjax.allocator, which does not stand to the left"),
        ("pagedjax/step.py", "from pagedjax import LLM", "step.py:1: imports pagedjax, which does not stand to the left"),
        ("pagedjax/generation.py", "import pagedjax.cli", "generation.py:1: imports pagedjax.cli, which does not stand to the left"),
        ("pagedjax/new.py", "", "pagedjax.new has no place in the order yet"),
    ],
)
def test_each_kind_of_breach_is_found(tmp_path, file, source, message):
    for name in (*HOST, *TRACED, *MEETING):
        path = tmp_path / "pagedjax" / name / "__init__.py"
        if name not in ("text", "checkpoint"):
            path = tmp_path / "pagedjax" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (tmp_path / "pallas_kernels" / "kv_write").mkdir(parents=True)
    assert breaches(tmp_path) == []
    (tmp_path / file).write_text(source, encoding="utf-8")
    (found,) = breaches(tmp_path)
    assert message in found


def test_allowed_imports_are_no_breach(tmp_path):
    (tmp_path / "pallas_kernels").mkdir()
    for name, source in {
        "text/__init__.py": "from .tokenizer import Tokenizer",
        "text/tokenizer.py": "from ..errors import PagedjaxError\nimport numpy",
        "errors.py": "",
        "config.py": "from pagedjax.errors import CheckpointError",
        "model.py": "import jax\nfrom pallas_kernels import write_kv\nfrom .config import ModelConfig",
        "llm.py": "from pagedjax import __version__\nfrom pagedjax.text import Tokenizer",
        "__init__.py": "from pagedjax.llm import LLM",
    }.items():
        path = tmp_path / "pagedjax" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    assert breaches(tmp_path) == []


def test_host_column_and_cli_load_without_jax():
    """The import statements could be clean and a dependency still bring JAX in, which costs every `pagedjax --help` seconds."""
    code = """
        import importlib, pkgutil, sys
        import pagedjax
        for name in sys.argv[1:]:
            module = importlib.import_module("pagedjax." + name)
            for found in pkgutil.walk_packages(getattr(module, "__path__", []), module.__name__ + "."):
                importlib.import_module(found.name)
            assert "jax" not in sys.modules, "pagedjax." + name + " brings in jax"
    """
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code), *HOST, "cli"]
    ran = subprocess.run(command, cwd=ROOT, env=os.environ.copy(), capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
