"""``millpond cache``: a vector cache's file checked and counted."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from millpond.cli.arguments.flags import Command

app = typer.Typer(
    name="cache", no_args_is_help=True, help="Check and count a vector cache: the file that --cache names."
)

CachePath = Annotated[Path, typer.Argument(help="File of the cache.", metavar="PATH")]


@app.command(cls=Command)
def check(path: CachePath) -> None:
    """Read the whole file, its structure and every vector against its checksum, and print what was found as JSON.

    The exit code is 1 if anything is damaged. Others may use the cache meanwhile: a damaged vector counts as a miss and
    is recomputed.
    """
    from millpond.cache.vector_cache import VectorCache, existing_file

    with VectorCache(existing_file(path)) as cache:
        found = cache.check(show_progress=True)
    _print({"path": str(path), "intact": found.intact, **asdict(found)})
    if not found.intact:
        recomputed = "delete it, and all vectors are recomputed" if found.problems else "those vectors are recomputed"
        typer.echo(f"millpond: {path} is damaged; {recomputed}", err=True)
        raise typer.Exit(1)


@app.command(cls=Command)
def stats(path: CachePath) -> None:
    """Count vectors and bytes, and print them as JSON.

    Widths are those of the vectors, with the number of vectors of each. Free bytes are filled by the next vectors. The
    log holds what was written last, until it is moved into the file.
    """
    from millpond.cache.vector_cache import describe_cache

    _print({"path": str(path), **asdict(describe_cache(path))})


def _print(content: dict[str, Any]) -> None:
    print(json.dumps(content, default=str, ensure_ascii=False))
