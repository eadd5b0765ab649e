"""``pagedjax generate``: continue one prompt."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from pagedjax.cli.interrupts import leaving_on_interrupt
from pagedjax.cli.loading import load, resolve_model, working
from pagedjax.cli.options import model_options, sampling_options, sampling_params
from pagedjax.errors import RequestError

if TYPE_CHECKING:
    from pagedjax.request import RequestOutput


@click.command()
@model_options
@click.option("-p", "--prompt", required=True, metavar="TEXT", help="The text to continue; - reads it from standard input.")
@click.option("-n", "--max-tokens", type=int, default=64, show_default=True, metavar="N", help="The most new tokens.")
@sampling_options
@click.option("--ignore-eos", is_flag=True, help="Go on past the model's own end tokens.")
@click.option("--warm-up", is_flag=True, help="Run once before the timed run, so that the timings hold no compilation.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: text, token ids, finish reason, timings.")
def generate(
    model: str | None, dtype: str, max_model_len: int | None, prompt: str, warm_up: bool, as_json: bool, seed: int, **sampling: Any
) -> None:
    """Continue a text.

    The answer goes to standard output, progress and speed to standard error.
    """
    params = sampling_params(seed=seed, **sampling)
    text = read_prompt(prompt)
    started = time.perf_counter()
    path = resolve_model(model)
    with leaving_on_interrupt():
        llm = load(path, dtype=dtype, max_model_len=max_model_len, seed=seed)
        load_s = time.perf_counter() - started
        if warm_up:
            with working("compiling and warming up", lines=False):
                llm.generate([text], params, use_tqdm=False)
        with working("generating" if warm_up else "compiling and generating", lines=False):
            (output,) = llm.generate([text], params, use_tqdm=False)
    timings = timings_of(output, load_s)
    (completion,) = output.outputs
    if as_json:
        click.echo(
            json.dumps(
                {
                    "prompt": text,
                    "prompt_token_ids": output.prompt_token_ids,
                    "text": completion.text,
                    "token_ids": completion.token_ids,
                    "finish_reason": completion.finish_reason,
                    "timings": timings | {"compilation_included": not warm_up},
                }
            )
        )
        return
    click.echo(completion.text)
    click.echo(describe(completion.finish_reason, len(completion.token_ids), timings), err=True)


def read_prompt(prompt: str) -> str:
    """The prompt, from standard input for ``-`` (without the last line's line break).

    Raises:
      RequestError: text that is not valid Unicode.
    """
    try:
        text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
        text.encode()  # bytes of the command line that are not UTF-8 arrive as lone surrogates
    except UnicodeError as error:
        raise RequestError(f"the prompt is not valid UTF-8: {error}") from None
    return text


def timings_of(output: RequestOutput, load_s: float) -> dict[str, float | None]:
    """Seconds of each phase, and new tokens a second after the first (``None`` where there was no second token)."""
    decoded = len(output.outputs[0].token_ids) - 1
    decode_s = float(output.metrics["decode_s"])
    return {
        "load_s": round(load_s, 4),
        "prefill_s": round(float(output.metrics["prefill_s"]), 4),
        "decode_s": round(decode_s, 4),
        "decode_tokens_per_s": round(decoded / decode_s, 2) if decoded > 0 and decode_s > 0 else None,
    }


def describe(finish_reason: str, num_tokens: int, timings: dict[str, float | None]) -> str:
    """One line for people."""
    rate = timings["decode_tokens_per_s"]
    speed = "" if rate is None else f", then {rate:.1f} tokens/s"
    tokens = "1 token" if num_tokens == 1 else f"{num_tokens} tokens"
    times = f"loaded in {timings['load_s']:.1f} s, first token after {timings['prefill_s']:.1f} s{speed}"
    return f"[{tokens}, finish reason {finish_reason}; {times}]"
