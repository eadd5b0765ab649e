"""LLM inference in JAX on a paged KV cache.

Two doors: `LLM` takes and gives text; `generate` and `forward` take and give arrays. Names are imported when first used,
so that ``import pagedjax`` costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagedjax.config import ModelConfig, RopeConfig
    from pagedjax.errors import CheckpointError, PagedjaxError, RequestError, UnsupportedModelError
    from pagedjax.generation import GenerateResult, RunOptions, generate
    from pagedjax.inputs import SamplingInputs, StepInputs
    from pagedjax.kv_cache import KVCache, make_cache
    from pagedjax.llm import LLM
    from pagedjax.model import forward
    from pagedjax.params import Params, init_params, params_from_hf_dict, params_to_hf
    from pagedjax.request import CompletionOutput, Logprob, RequestOutput, SamplingParams
    from pagedjax.step import decode_loop, prefill_step

__version__ = "0.1.0"

_HOME = {
    "LLM": "llm",
    "ModelConfig": "config",
    "RopeConfig": "config",
    "PagedjaxError": "errors",
    "CheckpointError": "errors",
    "RequestError": "errors",
    "UnsupportedModelError": "errors",
    "GenerateResult": "generation",
    "RunOptions": "generation",
    "StepInputs": "inputs",
    "SamplingInputs": "inputs",
    "KVCache": "kv_cache",
    "make_cache": "kv_cache",
    "Params": "params",
    "init_params": "params",
    "params_from_hf_dict": "params",
    "params_to_hf": "params",
    "CompletionOutput": "request",
    "Logprob": "request",
    "RequestOutput": "request",
    "SamplingParams": "request",
    "decode_loop": "step",
    "prefill_step": "step",
    "forward": "model",
    "generate": "generation",
}
__all__ = [
    "LLM",
    "CheckpointError",
    "CompletionOutput",
    "GenerateResult",
    "KVCache",
    "Logprob",
    "ModelConfig",
    "PagedjaxError",
    "Params",
    "RequestError",
    "RequestOutput",
    "RopeConfig",
    "RunOptions",
    "SamplingInputs",
    "SamplingParams",
    "StepInputs",
    "UnsupportedModelError",
    "__version__",
    "decode_loop",
    "forward",
    "generate",
    "init_params",
    "make_cache",
    "params_from_hf_dict",
    "params_to_hf",
    "prefill_step",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'pagedjax' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"pagedjax.{_HOME[name]}"), name)
    globals()[name] = value
    return value
