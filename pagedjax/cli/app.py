"""The command's frame: its subcommands, its exit codes and how it reports errors.

Exit codes: 0 done; 2 something about the model, the prompt or an option is wrong, said in one line on stderr; 130 stopped with
Ctrl-C; 141 the reader of the output closed it. Anything else is a bug of ours and keeps its traceback.
"""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Sequence
from typing import NoReturn, TextIO

import click

from pagedjax import __version__
from pagedjax.cli.bench import bench
from pagedjax.cli.chat import chat
from pagedjax.cli.demo import demo
from pagedjax.cli.generate import generate
from pagedjax.cli.info import info
from pagedjax.cli.interrupts import EXIT_INTERRUPTED, leave
from pagedjax.cli.serve import serve
from pagedjax.errors import PagedjaxError

EXIT_ERROR = 2
EXIT_CLOSED_PIPE = 141  # 128 + SIGPIPE


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__)
def app() -> None:
    """Run language models with a paged KV cache, in JAX.

    MODEL is a Hugging Face folder, a GGUF file or a hub id. Where it is left out, a small demo model is downloaded once.
    """


for _command in (generate, chat, serve, info, demo, bench):
    app.add_command(_command)


def run(arguments: Sequence[str]) -> int:
    """Run one command line (without the program's name) and return its exit code."""
    try:
        # Not app.main(), which has its own ideas about Ctrl-C, closed pipes and error messages.
        with app.make_context("pagedjax", list(arguments)) as context:
            app.invoke(context)
        sys.stdout.flush()  # a closed pipe shows here and not in the interpreter's shutdown
        return 0
    except click.exceptions.Exit as done:  # --help and --version
        return done.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return EXIT_ERROR
    except click.UsageError as error:
        where = f" (see {error.ctx.command_path} --help)" if error.ctx is not None else ""
        return _fail(f"{error.format_message()}{where}")
    except click.ClickException as error:
        return _fail(error.format_message())
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (`| head`) has what it wanted. Point stdout elsewhere so that the shutdown's flush does not complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_CLOSED_PIPE
    except OSError as error:
        named = error.strerror and error.filename is not None
        return _fail(f"{error.filename}: {error.strerror}" if named else str(error) or type(error).__name__)
    except PagedjaxError as error:
        return _fail(str(error))


def _fail(message: str) -> int:
    click.echo(f"pagedjax: error: {' '.join(message.split())}", err=True)
    return EXIT_ERROR


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: TextIO | None = None, line: str | None = None
) -> None:
    """In the place of `warnings.showwarning`, which adds a path and a line of source."""
    click.echo(f"pagedjax: warning: {' '.join(str(message).split())}", err=True)


def main() -> NoReturn:
    """Entry point of the ``pagedjax`` command."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that cannot show a character is no reason to die
    warnings.showwarning = _show_warning
    exit_code = run(sys.argv[1:])
    if exit_code == EXIT_INTERRUPTED:
        leave(exit_code)  # JAX, interrupted, may crash in the interpreter's shutdown
    sys.exit(exit_code)
