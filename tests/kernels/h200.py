"""Compile a function for an H200 on a machine without a GPU: kernel errors, copies and memory use become testable anywhere.

Needs jax's CUDA plugin wheels and the compiler's, not CUDA itself or a driver:
`pip install nvidia-cuda-nvcc nvidia-nvvm && pip install --no-deps jax-cuda13-plugin jax-cuda13-pjrt`, of jax's version.
"""

import functools
import importlib.util
import pathlib
from unittest import mock

import jax
import pytest

import pallas_kernels

_HERE = pathlib.Path(__file__).parent


def _found(module):
    """Whether `module` can be imported; `find_spec` alone raises where the package around a module is missing."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _missing():
    """Why it cannot be done here, or None."""
    if jax.default_backend() == "gpu":
        return "a GPU is here: the gpu tests run the kernels themselves"
    if not any(_found(f"jax_plugins.xla_cuda{n}") for n in (12, 13)):
        return "compiling for a GPU needs the wheels jax-cuda13-plugin and jax-cuda13-pjrt"
    if not (_found("nvidia") and _found("jax._src.pallas.triton.gpu_info")):
        return "compiling for a GPU needs the wheels nvidia-cuda-nvcc and nvidia-nvvm, and jax 0.11 or newer"
    return None


MISSING = _missing()
needs_compiler = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


@functools.cache
def _sharding():
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(platform="cuda", target_config=(_HERE / "h200.txtpb").read_text(), topology="1x1x1")
    return jax.sharding.NamedSharding(topologies.make_mesh(topology, (1,), ("x",)), jax.sharding.PartitionSpec())


def lower_for_h200(function, *arrays, **jit_options):
    """Lower `function` for arguments like `arrays` (pytrees of anything with shape and dtype); returns jax's lowered object."""
    from jax._src.pallas.triton import gpu_info

    specs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_sharding()), arrays)
    info = gpu_info._get_gpu_info_impl(gpu_info.GpuVersion.H200)
    # Pallas's Triton lowering asks the live device for its kind.
    with mock.patch.object(gpu_info, "get_gpu_info", return_value=info), pallas_kernels.compiling_for(pallas_kernels.H200):
        return jax.jit(function, **jit_options).lower(*specs)


def compile_for_h200(function, *arrays, **jit_options):
    """Compile `function` likewise; returns jax's compiled object."""
    # Autotuning needs the device.
    return lower_for_h200(function, *arrays, **jit_options).compile(compiler_options={"xla_gpu_autotune_level": 0})
