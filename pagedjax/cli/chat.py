"""``pagedjax chat``: a conversation in the terminal, streamed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

import click

from pagedjax.cli.interrupts import Interrupts, leaving_on_interrupt
from pagedjax.cli.loading import load, resolve_model
from pagedjax.cli.options import model_options, sampling_options, sampling_params
from pagedjax.errors import PagedjaxError, RequestError

if TYPE_CHECKING:
    from pagedjax.llm import LLM
    from pagedjax.request import SamplingParams

HELP = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer."


@click.command()
@model_options
@click.option("--system", metavar="TEXT", help="A system message that stands before the conversation.")
@click.option("-n", "--max-tokens", type=int, default=1024, show_default=True, metavar="N", help="The most tokens of one answer.")
@sampling_options
def chat(model: str | None, dtype: str, max_model_len: int | None, system: str | None, seed: int, **sampling: Any) -> None:
    """Talk with a model.

    Answers are streamed and the conversation is kept. Ctrl-C stops an answer, /reset starts over, /exit or Ctrl-D leaves.
    """
    params = sampling_params(seed=seed, **sampling)
    path = resolve_model(model)
    with leaving_on_interrupt():
        llm = load(path, dtype=dtype, max_model_len=max_model_len, seed=seed)
    if llm.tokenizer.chat_template is None:
        raise RequestError("this model has no chat template; `pagedjax generate` continues a text")
    conversation = Conversation(llm, params, system)
    llm.tokenizer.apply_chat_template([*conversation.messages, {"role": "user", "content": "Hello"}])  # a broken one shows now
    interactive = sys.stdin.isatty()
    if interactive:
        click.echo(HELP)
    conversation.run(interactive)


class Conversation:
    """The messages so far, and the loop that adds to them."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None = None) -> None:
        self._llm, self._params = llm, params
        self._start = [] if system is None else [{"role": "system", "content": system}]
        self.interrupts = Interrupts()
        self.messages = list(self._start)

    def run(self, interactive: bool) -> None:
        """Read lines until the end of input or ``/exit``, and answer each."""
        if interactive:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  (importing it gives input() line editing and history)
        with self.interrupts.watching():
            while (line := self._read(interactive)) is not None:
                match line.strip():
                    case "":
                        continue
                    case "/exit" | "/quit":
                        return
                    case "/reset":
                        self.messages = list(self._start)
                        click.echo("[conversation forgotten]")
                    case "/help":
                        click.echo(HELP)
                    case word if word.startswith("/") and word[1:].isalpha():
                        click.echo(f"[there is no {word}] {HELP}")
                    case _:
                        self.answer(line)

    def _read(self, interactive: bool) -> str | None:
        while True:
            try:
                with self.interrupts.prompting():
                    return input("> " if interactive else "")
            except EOFError:
                if interactive:
                    click.echo()
                return None
            except KeyboardInterrupt:  # nothing is being answered: drop the half-typed line
                if not interactive:
                    raise
                click.echo(f"\n{HELP}")
            except UnicodeDecodeError as error:
                click.echo(f"pagedjax: error: the line is not valid UTF-8: {error}", err=True)

    def answer(self, line: str) -> None:
        """Stream one answer. What the model cannot take is reported and forgotten; a stopped answer is kept as far as it came."""
        asked = [*self.messages, {"role": "user", "content": line}]
        pieces: list[str] = []
        stopped = False
        try:
            with (
                waiting() as answered,
                self.interrupts.answering() as interrupted,
                contextlib.closing(iter_chat(self._llm, asked, self._params)) as stream,
            ):
                for piece in stream:
                    if piece:  # the empty one only says that a dispatch is over
                        answered()
                        pieces.append(piece)
                        click.echo(piece, nl=False)
                    if interrupted():
                        stopped = True
                        break
        except PagedjaxError as error:
            click.echo(f"pagedjax: error: {' '.join(str(error).split())} [your message was dropped; /reset starts over]", err=True)
            return
        click.echo(" [stopped]" if stopped else "")
        if pieces or not stopped:
            self.messages = [*asked, {"role": "assistant", "content": "".join(pieces)}]


def iter_chat(llm: LLM, messages: list[dict[str, str]], params: SamplingParams) -> Generator[str, None, None]:
    """The answer's pieces; a generator, so that closing it stops the model and a wrong message raises inside the loop."""
    yield from llm.stream_chat(messages, params)


@contextlib.contextmanager
def waiting() -> Iterator[Callable[[], None]]:
    """Show in a terminal that the model is at work until the yielded function is called or the block is left.

    A conversation longer than any before is compiled for first, which takes seconds.
    """
    shown = sys.stdout.isatty()
    if shown:
        click.echo("[reading ...]", nl=False)

    def erase() -> None:
        nonlocal shown
        if shown:
            click.echo("\r\033[K", nl=False)
            shown = False

    try:
        yield erase
    finally:
        erase()
