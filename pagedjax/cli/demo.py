"""``pagedjax demo``: the first thing to run. One sentence completed, one question answered."""

from __future__ import annotations

import click

from pagedjax.cli.generate import describe, timings_of
from pagedjax.cli.interrupts import leaving_on_interrupt
from pagedjax.cli.loading import load, resolve_model, working
from pagedjax.cli.options import sampling_params

SENTENCE = "The capital of France is"
QUESTION = "What is the capital of France?"


@click.command()
def demo() -> None:
    """Get the demo model (93 MB, once), complete a sentence and answer a question with it."""
    import time

    params = sampling_params(temperature=0.0, max_tokens=32)
    started = time.perf_counter()
    path = resolve_model(None)
    with leaving_on_interrupt():
        llm = load(path, dtype="auto", max_model_len=None)
        load_s = time.perf_counter() - started

        with working("Compiling for this device and completing a sentence"):
            (output,) = llm.generate([SENTENCE], params, use_tqdm=False)
        (completion,) = output.outputs
        click.echo(f"\n{click.style(SENTENCE, bold=True)}{completion.text}")
        click.echo(describe(completion.finish_reason, len(completion.token_ids), timings_of(output, load_s)), err=True)

        click.echo(f"\n{click.style('user:', bold=True)} {QUESTION}\n{click.style('model:', bold=True)} ", nl=False)
        for piece in llm.stream_chat([{"role": "user", "content": QUESTION}], params):
            click.echo(piece, nl=False)
    click.echo("\n\nTalk with it: pagedjax chat. Continue a text of yours: pagedjax generate --prompt '...'")
