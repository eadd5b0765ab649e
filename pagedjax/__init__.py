"""LLM inference in JAX on a paged KV cache.

Two doors: `LLM` takes and gives text; `generate` and `forward` take and give arrays. Names are imported when first used,
so that ``import pagedjax`` costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagedjax.async_engine import AsyncEngine
    from pagedjax.checkpoint import demo_model, open_checkpoint
    from pagedjax.config import ModelConfig, RopeConfig
    from pagedjax.engine import Engine, RequestResult, TokenDelta
    from pagedjax.engine_config import EngineConfig
    from pagedjax.errors import CheckpointError, ConfigError, EngineError, PagedjaxError, RequestError, UnsupportedModelError
    from pagedjax.generation import GenerateResult, RunOptions, generate
    from pagedjax.inputs import SamplingInputs, StepInputs
    from pagedjax.kv_cache import KVCache, make_cache
    from pagedjax.llm import LLM
    from pagedjax.load import load_config, load_params
    from pagedjax.model import forward
    from pagedjax.params import Params, init_params, params_from_hf_dict, params_to_hf
    from pagedjax.request import CompletionOutput, Logprob, RequestOutput, SamplingParams
    from pagedjax.stats import EngineStats
    from pagedjax.step import RequestState, decode_loop, make_state, prefill_step

__version__ = "0.1.0"

_HOME = {
    "LLM": "llm",
    "AsyncEngine": "async_engine",
    "Engine": "engine",
    "RequestResult": "engine",
    "TokenDelta": "engine",
    "EngineConfig": "engine_config",
    "EngineStats": "stats",
    "EngineError": "errors",
    "ModelConfig": "config",
    "RopeConfig": "config",
    "PagedjaxError": "errors",
    "demo_model": "checkpoint",
    "open_checkpoint": "checkpoint",
    "load_config": "load",
    "load_params": "load",
    "RequestState": "step",
    "make_state": "step",
    "CheckpointError": "errors",
    "ConfigError": "errors",
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
    "AsyncEngine",
    "CheckpointError",
    "CompletionOutput",
    "ConfigError",
    "Engine",
    "EngineConfig",
    "EngineError",
    "EngineStats",
    "GenerateResult",
    "KVCache",
    "Logprob",
    "ModelConfig",
    "PagedjaxError",
    "Params",
    "RequestError",
    "RequestOutput",
    "RequestResult",
    "RequestState",
    "RopeConfig",
    "RunOptions",
    "SamplingInputs",
    "SamplingParams",
    "StepInputs",
    "TokenDelta",
    "UnsupportedModelError",
    "__version__",
    "decode_loop",
    "demo_model",
    "forward",
    "generate",
    "init_params",
    "load_config",
    "load_params",
    "make_cache",
    "make_state",
    "open_checkpoint",
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


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
