"""``millpond mcp``: search for agents, over standard input and output or HTTP."""

from __future__ import annotations

import logging
import os
import signal
import sys
from importlib.util import find_spec
from typing import Annotated, Any

import typer

from millpond.cli.arguments import options
from millpond.cli.arguments.groups import EngineOptions, grouped
from millpond.cli.output.search_stages import RERANK
from millpond.errors import InvalidRequestError, MissingExtraError

logger = logging.getLogger(__name__)

_KEY = "MILLPOND_API_KEY"


@grouped
def mcp(
    ctx: typer.Context,
    targets: Annotated[
        list[str],
        typer.Argument(
            help="Folders of files, folders of indexes, and URLs of collections, {sinks}.", metavar="TARGET"
        ),
    ],
    *,
    http: Annotated[
        str | None, typer.Option(help="Serve streamable HTTP at /mcp, instead of standard input.", metavar="HOST:PORT")
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(help="Key that clients must send; repeat for more. Safer: MILLPOND_API_KEY.", metavar="KEY"),
    ] = None,
    writable: Annotated[
        bool, typer.Option("--writable", help="Add the tools add and delete, for indexes and collections.")
    ] = False,
    max_characters: Annotated[
        int, typer.Option(help="Most characters of an answer; longer texts are cut.", metavar="N", min=1000)
    ] = 16000,
    wait: Annotated[
        float,
        typer.Option(
            help="Seconds that a search waits for an index of files; after that it says how far it is.",
            metavar="SECONDS",
            min=0,
        ),
    ] = 45.0,
    rerank: Annotated[
        str | None,
        typer.Option(
            help=RERANK,
            metavar="MODEL",
        ),
    ] = None,
    model: options.StoredModel = None,
    engine: EngineOptions,
) -> None:
    """Let agents search folders, indexes and collections, by the Model Context Protocol.

    Tools: search, get and explain. A folder of files is read as it is at each search: changed, new and deleted files
    are noticed, and what git ignores is left out. Its index is kept in ~/.cache/millpond/mcp, by all-MiniLM-L6-v2
    unless --model names another embedder. The log is on standard error.
    """
    from millpond.ingest.units.languages import PACKAGES

    if missing := [name for name in ("mcp", *PACKAGES) if find_spec(name) is None]:
        raise MissingExtraError(f"millpond mcp needs {', '.join(missing)}: pip install 'millpond[mcp]'")
    from millpond.mcp import launch
    from millpond.mcp.targets.target import TargetOptions
    from millpond.search.stages import StagePlan
    from millpond.support.api_keys import ApiKeys

    plan = StagePlan(model=model, rerank=rerank)
    opened = TargetOptions(plan=plan, settings=engine.settings, writable=writable, wait=wait)
    level = ctx.parent.params["log_level"] if ctx.parent is not None else "warning"
    common: dict[str, Any] = {"budget": max_characters, "log_level": level}
    if http is None:
        if api_key:
            raise typer.BadParameter("it is of --http; whoever starts the program needs no key", param_hint="--api-key")
        _greet_terminal()
        return launch.serve_stdio(targets, opened, **common)
    keys = ApiKeys(_keys(api_key))
    launch.serve_http(targets, opened, **common, address=launch.read_address(http), keys=keys, ready=_announce)


def _greet_terminal() -> None:
    """Tell whoever types the command that it is not stuck, and let Ctrl-C end it."""
    if sys.stdin.isatty():
        print("waiting for a client on standard input; agents start this command. Ctrl-C ends it", file=sys.stderr)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        # Python's handler would wait for the thread that reads standard input; indexes are made to be killed.
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _keys(given: list[str] | None) -> list[str]:
    """The keys of the command, else that of the environment; an empty one would leave the server open."""
    keys = given or ([os.environ[_KEY]] if _KEY in os.environ else [])
    if not all(keys):
        raise InvalidRequestError(
            f"api_key is empty, which would open the server; give one, or leave it and {_KEY} out"
        )
    return keys


def _announce(url: str) -> None:
    print(f"serving at {url}", file=sys.stderr, flush=True)
