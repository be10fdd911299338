"""``millpond cache``: a vector cache's file checked, repaired and counted."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from millpond.cli.arguments.flags import Command

app = typer.Typer(
    name="cache",
    no_args_is_help=True,
    help="Check, repair and count a vector cache: the file that --cache names.",
)

CachePath = Annotated[Path, typer.Argument(help="File of the cache.", metavar="PATH")]


@app.command(cls=Command)
def check(path: CachePath) -> None:
    """Read the whole file, its structure and every vector against its checksum, and print what was found as JSON.

    The exit code is 1 if anything is damaged. Others may use the cache meanwhile: a damaged vector is none found, and
    is computed again.
    """
    from millpond.cache.repair import existing_file
    from millpond.cache.vector_cache import VectorCache

    with VectorCache(existing_file(path)) as cache:
        found = cache.check(show_progress=True)
    _print({"path": str(path), "intact": found.intact, **asdict(found)})
    if not found.intact:
        typer.echo(f"millpond: {path} is damaged; millpond cache repair {path} keeps its intact vectors", err=True)
        raise typer.Exit(1)


@app.command(cls=Command)
def repair(path: CachePath) -> None:
    """Copy every intact vector into a new file that takes the damaged one's place, and print the counts as JSON.

    The damaged file is kept as PATH.damaged-TIME. Nothing is changed if nothing is wrong. No process may have the cache
    open.
    """
    from millpond.cache.repair import repair_cache

    _print({"path": str(path), **asdict(repair_cache(path, show_progress=True))})


@app.command(cls=Command)
def stats(path: CachePath) -> None:
    """Count vectors and bytes, and print them as JSON.

    Widths are those of the vectors, with the number of vectors of each. Free bytes are filled by the next vectors. The
    log holds what was written last, until it is moved into the file.
    """
    from millpond.cache.repair import describe_cache

    _print({"path": str(path), **asdict(describe_cache(path))})


def _print(content: dict[str, Any]) -> None:
    print(json.dumps(content, default=str, ensure_ascii=False))
