"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pagedjax.config import DTYPES

if TYPE_CHECKING:
    from pagedjax.request import SamplingParams

Command = TypeVar("Command", bound=Callable[..., Any])

_DTYPE = click.option(
    "--dtype",
    type=click.Choice(["auto", *DTYPES]),
    default="auto",
    show_default=True,
    help="Of weights, activations and KV cache; auto is the checkpoint's own.",
)
_MAX_MODEL_LEN = click.option(
    "--max-model-len",
    type=int,
    metavar="TOKENS",
    help="The most tokens of prompt and answer together. [default: what the model was made for]",
)
_MODEL = click.option("-m", "--model", metavar="MODEL", help="A Hugging Face folder, a GGUF file or a hub id. [default: the demo model]")
_SAMPLING = (
    click.option(
        "-t", "--temperature", type=float, default=0.0, show_default=True, help="Divides the logits; 0 always takes the likeliest token."
    ),
    click.option("--top-k", type=int, default=0, help="Keep the K likeliest tokens. [default: 0, all]"),
    click.option("--top-p", type=float, default=1.0, help="Keep the likeliest tokens up to this probability. [default: 1, all]"),
    click.option("--min-p", type=float, default=0.0, help="Keep tokens at least so likely relative to the likeliest. [default: 0, all]"),
    click.option(
        "--repetition-penalty", type=float, default=1.0, help="Above 1, tokens of prompt and answer get less likely. [default: 1]"
    ),
    click.option("--presence-penalty", type=float, default=0.0, help="Taken off the logit of each token of the answer. [default: 0]"),
    click.option("--frequency-penalty", type=float, default=0.0, help="Taken off for each time that it came. [default: 0]"),
    click.option("--stop", multiple=True, metavar="TEXT", help="A text that ends the answer; may be given several times."),
    click.option("--seed", type=int, default=0, show_default=True, help="Makes the sampled tokens reproducible."),
)


def _apply(command: Command, *options: Callable[[Command], Command]) -> Command:
    for option in reversed(options):  # decorators apply from the bottom up; --help shows them from the top down
        command = option(command)
    return command


def model_options(command: Command) -> Command:
    """Add ``--model``, ``--dtype`` and ``--max-model-len``."""
    return _apply(command, _MODEL, *shape_options_list())


def shape_options(command: Command) -> Command:
    """Add ``--dtype`` and ``--max-model-len``, for a command that takes the model as an argument."""
    return _apply(command, *shape_options_list())


def shape_options_list() -> tuple[Callable[[Any], Any], ...]:
    """The options that decide how a model is held."""
    return (_DTYPE, _MAX_MODEL_LEN)


def sampling_options(command: Command) -> Command:
    """Add the options that decide how tokens are chosen and where an answer ends."""
    return _apply(command, *_SAMPLING)


def sampling_params(**values: Any) -> SamplingParams:
    """`SamplingParams` from a command's options, checked before anything slow happens.

    Raises:
      RequestError: a value out of range.
    """
    from pagedjax.request import SamplingParams

    return SamplingParams(**values)
