"""The program ``millpond``: its commands, and the exit code of each error.

This module imports no torch, so ``millpond --help`` is fast. A command imports what it needs when it runs.
"""

from __future__ import annotations

import io
import logging
import re
import sys
from contextlib import suppress
from typing import Annotated, Any, Literal

import typer

from millpond.cli.arguments.flags import Command, Group, UsageError
from millpond.cli.arguments.vllm_flags import ServeCommand
from millpond.cli.arguments.written import drop_output, output_problem, watch_output
from millpond.cli.commands.advise import advise
from millpond.cli.commands.audit import audit
from millpond.cli.commands.cache import app as cache
from millpond.cli.commands.collections import app as collections
from millpond.cli.commands.convert import convert
from millpond.cli.commands.copy import copy
from millpond.cli.commands.embed import embed
from millpond.cli.commands.env import env
from millpond.cli.commands.eval import evaluate
from millpond.cli.commands.explain import explain
from millpond.cli.commands.index import app as index
from millpond.cli.commands.ingest import ingest
from millpond.cli.commands.mcp import mcp
from millpond.cli.commands.migrate import app as migrate
from millpond.cli.commands.models import models
from millpond.cli.commands.rerank import rerank
from millpond.cli.commands.search import search
from millpond.cli.commands.serve import serve
from millpond.cli.commands.trace import trace
from millpond.cli.commands.watch import watch
from millpond.cli.demo.command import demo
from millpond.errors import (
    FingerprintMismatchError,
    InvalidRequestError,
    MillpondError,
    MissingExtraError,
    ModelLoadError,
    UnknownModelError,
)

FAILED = 1
USAGE = 2
# Mistakes in the command, in the files that it names, or in the installation: nothing was begun.
_MISTAKES = (InvalidRequestError, ModelLoadError, FingerprintMismatchError, MissingExtraError, UnknownModelError)

app = typer.Typer(
    name="millpond",
    cls=Group,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # words in brackets are no markup
    pretty_exceptions_enable=False,  # keep Python's own traceback, which shows no values of locals
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    demo,
    embed,
    rerank,
    explain,
    ingest,
    watch,
    search,
    copy,
    trace,
    audit,
    mcp,
    advise,
    models,
    convert,
    env,
):
    app.command(cls=Command)(command)
app.command("eval", cls=Command)(evaluate)
app.command(cls=ServeCommand)(serve)
app.add_typer(collections)
app.add_typer(migrate)
app.add_typer(index)
app.add_typer(cache)


def _print_version(requested: bool) -> None:
    if requested:
        from millpond import __version__

        typer.echo(f"millpond {__version__}")
        raise typer.Exit


@app.callback()
def start(
    ctx: typer.Context,
    *,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        typer.Option(help="Lowest level of the log that is written to standard error."),
    ] = "warning",
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """A pooling engine: text in, vectors and scores out, to standard output or into a database.

    Exit codes: 0 success, 1 some or all of the work failed, 2 the request is invalid.
    """
    if sys.stdout is None and ctx.invoked_subcommand != "serve":
        raise MillpondError("standard output is closed; redirect it to a file, or to /dev/null")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # the terminal may not encode every text
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("millpond").setLevel(log_level.upper())


def main() -> None:
    """Run the program on ``sys.argv``."""
    watch_output()
    raise SystemExit(_flush(_run()))


def _run() -> int:
    """The exit code of the command; errors are a line on standard error."""
    try:
        return app(prog_name="millpond", standalone_mode=False) or 0
    except UsageError as error:
        return _usage(error)
    except MillpondError as error:
        _say(str(error), *getattr(error, "__notes__", ()))
        return USAGE if isinstance(error, _MISTAKES) else FAILED
    except typer.Abort:
        return FAILED
    except OSError as error:  # of standard output, or of a disk or a file: no bug
        if output_problem() is None:
            logging.getLogger("millpond").debug("", exc_info=True)
            _say(str(error))
        return FAILED


def _usage(error: Any) -> int:
    """Words that cannot be parsed."""
    context, message = error.ctx, error.format_message().rstrip(".").replace("Value error, ", "")
    if isinstance(error.__cause__, ValueError) and (refused := re.search(r"input_value=(.*), ", str(error.__cause__))):
        message = message.replace("Input should", f"{refused[1]} should")
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
    else:
        _say(message if context is None else f"{message} ({context.command_path} --help explains it)")
    return USAGE


def _flush(code: int) -> int:
    """The exit code, or another one if what was printed could not be written."""
    problem = output_problem()
    if problem is None:
        return code
    if not isinstance(problem, BrokenPipeError):  # whoever reads has read enough
        _say(f"standard output cannot be written ({problem.strerror}); what was printed is not complete")
    drop_output()
    return code or FAILED


def _say(*lines: str) -> None:
    with suppress(OSError):
        print(f"millpond: {lines[0]}", *lines[1:], sep="\n", file=sys.stderr)
