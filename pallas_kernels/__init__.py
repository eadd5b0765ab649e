"""Attention over paged key/value pools, the write that fills them, and sampling, as JAX functions with GPU kernels.

Pools are ``[P, K, Z, H]`` (``kv_layout``). Every op takes ``implementation=``: a name runs or raises, ``None`` picks the
fastest that serves these shapes on the default device; ``support`` says which that is, and why the others are not.
This package needs JAX alone and never imports the serving engine that ships beside it.
"""

from collections.abc import Callable
from typing import Any

from pallas_kernels._dispatch import H200, Device, Op, Support, compiling_for, report
from pallas_kernels.kv_layout import NULL_BLOCK, pool_shape, slots_of
from pallas_kernels.kv_write import OP as _WRITE_KV
from pallas_kernels.kv_write import describe as _describe_write_kv
from pallas_kernels.kv_write import write_kv
from pallas_kernels.paged_attention import OP as _PAGED_ATTENTION
from pallas_kernels.paged_attention import describe as _describe_paged_attention
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.prefill_attention import OP as _PAGED_PREFILL_ATTENTION
from pallas_kernels.prefill_attention import describe as _describe_paged_prefill_attention
from pallas_kernels.prefill_attention import paged_prefill_attention
from pallas_kernels.rope_kv import OP as _ROPE_WRITE_KV
from pallas_kernels.rope_kv import describe as _describe_rope_write_kv
from pallas_kernels.rope_kv import rope_write_kv
from pallas_kernels.sampling import GREEDY_TEMPERATURE, Adjustments, sample_tokens, token_logprobs
from pallas_kernels.sampling import LOGPROBS_OP as _TOKEN_LOGPROBS
from pallas_kernels.sampling import SAMPLE_OP as _SAMPLE_TOKENS
from pallas_kernels.sampling import describe_logprobs as _describe_token_logprobs
from pallas_kernels.sampling import describe_sample as _describe_sample_tokens
from pallas_kernels.sampling.sample_reference import adjusted_logits, filter_logits, scaled_logits
from pallas_kernels.skinny_matmul import OP as _SKINNY_MATMUL
from pallas_kernels.skinny_matmul import MatmulOutput, skinny_matmul
from pallas_kernels.skinny_matmul import describe as _describe_skinny_matmul

_OPS: dict[str, tuple[Op, Callable[..., Any]]] = {
    "paged_attention": (_PAGED_ATTENTION, _describe_paged_attention),
    "paged_prefill_attention": (_PAGED_PREFILL_ATTENTION, _describe_paged_prefill_attention),
    "rope_write_kv": (_ROPE_WRITE_KV, _describe_rope_write_kv),
    "sample_tokens": (_SAMPLE_TOKENS, _describe_sample_tokens),
    "skinny_matmul": (_SKINNY_MATMUL, _describe_skinny_matmul),
    "token_logprobs": (_TOKEN_LOGPROBS, _describe_token_logprobs),
    "write_kv": (_WRITE_KV, _describe_write_kv),
}

__all__ = [
    "GREEDY_TEMPERATURE",
    "H200",
    "NULL_BLOCK",
    "Adjustments",
    "Device",
    "MatmulOutput",
    "Support",
    "adjusted_logits",
    "compiling_for",
    "filter_logits",
    "paged_attention",
    "paged_prefill_attention",
    "pool_shape",
    "rope_write_kv",
    "sample_tokens",
    "scaled_logits",
    "skinny_matmul",
    "slots_of",
    "support",
    "token_logprobs",
    "write_kv",
]


def support(op: str, implementation: str | None = None, *arrays: Any, **options: Any) -> Support:
    """Say which implementation of ``op`` runs here, and why the others do not.

    Args:
        op: ``"paged_attention"``, ``"paged_prefill_attention"``, ``"rope_write_kv"``, ``"sample_tokens"``, ``"skinny_matmul"``,
            ``"token_logprobs"`` or ``"write_kv"``.
        implementation: as for the op itself.
        arrays: the op's array arguments, or ``jax.ShapeDtypeStruct`` in their place; none asks about the device alone.
        options: the op's keyword options (``sliding_window`` and so on).

    Returns:
        ``.implementation`` is the name that would run (``None``: the call would raise) and ``.reasons`` maps every
        implementation to ``None`` or to why it does not run. ``str()`` of it is a small report.

    Raises:
        ValueError: no such op or implementation, or arguments that the op itself would reject.
    """
    if op not in _OPS:
        raise ValueError(f"no op {op!r}; there are {', '.join(_OPS)}")
    entry, describe = _OPS[op]
    return report(entry, implementation, describe(*arrays, **options) if arrays else None)
