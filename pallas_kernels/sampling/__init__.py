"""Choose one token a row of logits, every row by its own settings, and report log-probabilities for the rows that want them."""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels._attention import check_array
from pallas_kernels._dispatch import INTERPRET_SUFFIX, Op, current_device

SAMPLE_OP = Op(
    name="sample_tokens",
    modules={
        "reference": "pallas_kernels.sampling.sample_reference",
        "pallas_triton": "pallas_kernels.sampling.sample_triton",
        "pallas_triton_interpret": "pallas_kernels.sampling.sample_triton",
    },
    preference=("pallas_triton", "reference"),
)
LOGPROBS_OP = Op(
    name="token_logprobs",
    modules={
        "reference": "pallas_kernels.sampling.logprobs_reference",
        "pallas_triton": "pallas_kernels.sampling.logprobs_triton",
        "pallas_triton_interpret": "pallas_kernels.sampling.logprobs_triton",
    },
    preference=("pallas_triton", "reference"),
)

# At or below this a row is greedy: dividing by less would only overflow.
GREEDY_TEMPERATURE = 1e-5
HAS_BIAS, HAS_COUNTS, HAS_BANNED = 1, 2, 4


class Adjustments(NamedTuple):
    """What changes the logits of a row before temperature and filters, in this order: banned ids, bias, penalties.

    Attributes:
      flags: i32[B], which of the three count for a row: ``HAS_BANNED``, ``HAS_BIAS``, ``HAS_COUNTS``. What has no flag is not read.
      rows: i32[B] in ``[0, S)``, the row of `bias` and `counts` that is a row's.
      bias: f32[S, V], added; minus infinity for an id that may not come.
      counts: i32[S, V], twice how often the id is in the output, and 1 more if it is in the prompt.
      repetition: f32[B] above 0: an id in prompt or output has its logit divided by it if positive, else multiplied.
      presence: f32[B], taken off an id that is in the output.
      frequency: f32[B], taken off an id for each time that it is in the output.
      banned_ids: i32[B, E], may not come; -1 is none.
    """

    flags: jax.Array
    rows: jax.Array
    bias: jax.Array
    counts: jax.Array
    repetition: jax.Array
    presence: jax.Array
    frequency: jax.Array
    banned_ids: jax.Array


@dataclass(frozen=True)
class SampleProblem:
    """Static description of a call of `sample_tokens`."""

    num_rows: int  # B
    vocab: int  # V, columns of the logits
    vocab_size: int  # ids that may come
    num_tables: int  # S; 0 without adjustments
    num_banned: int  # E


@dataclass(frozen=True)
class LogprobsProblem:
    """Static description of a call of `token_logprobs`."""

    num_rows: int  # B
    vocab: int  # V
    vocab_size: int
    num_top: int  # J


def sample_tokens(
    logits: jax.Array,
    keys: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    *,
    adjust: Adjustments | None = None,
    vocab_size: int | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Choose one token a row: adjustments; temperature; top-k; top-p; min-p, each on the distribution that the one before it left.

    A row's token depends on its own logits and settings alone. Noise comes from `noise.gumbel`: it is a function of the key and of the
    token id, so that neither the batch nor columns beyond `vocab_size` change a draw.

    Args:
      logits: ``f32[B, V]``.
      keys: ``u32[B, 2]``, key data of JAX's threefry2x32; a fresh one for each draw.
      temperature: ``f32[B]``; at or below ``GREEDY_TEMPERATURE`` the row takes the likeliest token, the lowest id among ties, and
        its filters do not matter.
      top_k: ``i32[B]``: keep the k likeliest, lowest ids first among ties; below 1 or at least V is off.
      top_p: ``f32[B]``: keep the likeliest until their probabilities reach it, the one that crosses included (Holtzman et al.
        2019, arXiv:1904.09751); 1 and more is off. The likeliest is always kept.
      min_p: ``f32[B]``: keep those that are at least so likely relative to the likeliest (Nguyen et al. 2024, arXiv:2407.01082);
        0 is off.
      adjust: see `Adjustments`; ``None`` where no row has any.
      vocab_size: ids from here on never come and count in no sum; ``None`` is V. Static.
      implementation: a name runs or raises; ``None`` picks the fastest that runs here.

    Returns:
      ``i32[B]``, in ``[0, vocab_size)`` whatever the logits. A row of which nothing is left by its adjustments gives id 0.

    Raises:
      ValueError: the arguments do not fit together, or there is no implementation of that name.
      NotImplementedError: the named implementation does not run here; the message says why.
    """
    problem = describe_sample(logits, keys, temperature, top_k, top_p, min_p, adjust, vocab_size=vocab_size)
    name = SAMPLE_OP.resolve(implementation, problem, current_device())
    token: jax.Array = _sample(name, problem, logits, keys, temperature, top_k, top_p, min_p, adjust)
    return token


def token_logprobs(
    logits: jax.Array,
    token: jax.Array,
    wanted: jax.Array,
    *,
    num_top: int,
    vocab_size: int | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Natural log-probability and rank of a token a row, and the likeliest tokens.

    Args:
      logits: ``f32[B, V]``.
      token: ``i32[B]`` in ``[0, vocab_size)``.
      wanted: ``bool[B]``; the numbers of other rows are zeros and cost nothing.
      num_top: how many of the likeliest to report [J], lowest ids first among ties. Static.
      vocab_size: ids from here on count in no sum and are never reported; ``None`` is V. Static.
      implementation: as for `sample_tokens`.

    Returns:
      ``(logprob f32[B], rank i32[B], top_ids i32[B, J], top_logprobs f32[B, J])``; rank 1 is the likeliest, ties share the better rank.

    Raises:
      ValueError: the arguments do not fit together, or there is no implementation of that name.
      NotImplementedError: the named implementation does not run here; the message says why.
    """
    problem = describe_logprobs(logits, token, wanted, num_top=num_top, vocab_size=vocab_size)
    name = LOGPROBS_OP.resolve(implementation, problem, current_device())
    reported: tuple[jax.Array, jax.Array, jax.Array, jax.Array] = _logprobs(name, problem, logits, token, wanted)
    return reported


def describe_sample(
    logits: Any,
    keys: Any,
    temperature: Any,
    top_k: Any,
    top_p: Any,
    min_p: Any,
    adjust: Adjustments | None = None,
    *,
    vocab_size: int | None = None,
) -> SampleProblem:
    """Validate a call (arrays, or anything with ``shape`` and ``dtype``) and describe it.

    Raises:
      ValueError: naming both values that do not fit together.
    """
    check_array("logits", logits, "B V", "float32")
    rows, vocab = logits.shape
    check_array("keys", keys, "B two", "uint32", B=rows, two=2)
    for name, array, dtype in (
        ("temperature", temperature, "float32"),
        ("top_k", top_k, "int32"),
        ("top_p", top_p, "float32"),
        ("min_p", min_p, "float32"),
    ):
        check_array(name, array, "B", dtype, B=rows)
    num_tables = num_banned = 0
    if adjust is not None:
        for name in ("flags", "rows"):
            check_array(f"adjust.{name}", getattr(adjust, name), "B", "int32", B=rows)
        for name in ("repetition", "presence", "frequency"):
            check_array(f"adjust.{name}", getattr(adjust, name), "B", "float32", B=rows)
        check_array("adjust.bias", adjust.bias, "S V", "float32", V=vocab)
        num_tables = adjust.bias.shape[0]
        check_array("adjust.counts", adjust.counts, "S V", "int32", S=num_tables, V=vocab)
        check_array("adjust.banned_ids", adjust.banned_ids, "B E", "int32", B=rows)
        num_banned = adjust.banned_ids.shape[1]
    return SampleProblem(rows, vocab, _checked_vocab(vocab_size, vocab), num_tables, num_banned)


def describe_logprobs(logits: Any, token: Any, wanted: Any, *, num_top: int, vocab_size: int | None = None) -> LogprobsProblem:
    """Validate a call of `token_logprobs` and describe it; raises as `describe_sample`."""
    check_array("logits", logits, "B V", "float32")
    rows, vocab = logits.shape
    check_array("token", token, "B", "int32", B=rows)
    check_array("wanted", wanted, "B", "bool", B=rows)
    size = _checked_vocab(vocab_size, vocab)
    if not 0 <= num_top <= size:
        raise ValueError(f"num_top is {num_top}; it must be from 0 to the vocabulary's {size}")
    return LogprobsProblem(rows, vocab, size, num_top)


def _checked_vocab(vocab_size: int | None, vocab: int) -> int:
    if vocab_size is None:
        return vocab
    if not 1 <= vocab_size <= vocab:
        raise ValueError(f"vocab_size is {vocab_size}; the logits have {vocab} columns")
    return vocab_size


@functools.partial(jax.jit, static_argnums=(0, 1))
def _sample(name: str, problem: SampleProblem, *arrays: Any) -> Any:
    return SAMPLE_OP.load(name).run(problem, *(_asarrays(a) for a in arrays), interpret=name.endswith(INTERPRET_SUFFIX))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _logprobs(name: str, problem: LogprobsProblem, *arrays: Any) -> Any:
    return LOGPROBS_OP.load(name).run(problem, *(_asarrays(a) for a in arrays), interpret=name.endswith(INTERPRET_SUFFIX))


def _asarrays(tree: Any) -> Any:
    return jax.tree.map(jnp.asarray, tree)
