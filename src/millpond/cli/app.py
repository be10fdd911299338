"""The program ``millpond``: its commands, and the exit code of each error.

This module imports no torch, so ``millpond --help`` is fast. A command imports what it needs when it runs.
"""

from __future__ import annotations

import io
import logging
import sys
from typing import Annotated, Literal

import typer

from millpond.cli.arguments.flags import Command
from millpond.cli.arguments.vllm_flags import ServeCommand
from millpond.cli.commands.advise import advise
from millpond.cli.commands.cache import app as cache
from millpond.cli.commands.embed import embed
from millpond.cli.commands.env import env
from millpond.cli.commands.explain import explain
from millpond.cli.commands.index import app as index
from millpond.cli.commands.ingest import ingest
from millpond.cli.commands.models import models
from millpond.cli.commands.rerank import rerank
from millpond.cli.commands.search import search
from millpond.cli.commands.serve import serve
from millpond.cli.demo.command import demo
from millpond.errors import InvalidRequestError, MillpondError

FAILED = 1
USAGE = 2

app = typer.Typer(
    name="millpond",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # keep Python's own traceback, which shows no values of locals
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (demo, embed, rerank, explain, ingest, search, advise, models, env):
    app.command(cls=Command)(command)
app.command(cls=ServeCommand)(serve)
app.add_typer(index)
app.add_typer(cache)


def _print_version(requested: bool) -> None:
    if requested:
        from millpond import __version__

        typer.echo(f"millpond {__version__}")
        raise typer.Exit


@app.callback()
def start(
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
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # the terminal may not encode every text
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("millpond").setLevel(log_level.upper())


def main() -> None:
    """Run the program on ``sys.argv``."""
    try:
        app(prog_name="millpond")
    except MillpondError as error:
        print(f"millpond: {error}", *getattr(error, "__notes__", ()), sep="\n", file=sys.stderr)
        raise SystemExit(USAGE if isinstance(error, InvalidRequestError) else FAILED) from None
