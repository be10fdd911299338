"""``millpond cache``: a vector cache's file checked and counted."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from millpond.cli.arguments.flags import Command, Group
from millpond.errors import CacheError, InvalidRequestError

if TYPE_CHECKING:
    from millpond.cache.vector_cache import VectorCache

app = typer.Typer(
    name="cache", cls=Group, no_args_is_help=True, help="Check and count a vector cache: the file that --cache names."
)

CachePath = Annotated[Path, typer.Argument(help="File of the cache.", metavar="PATH")]


@app.command(cls=Command)
def check(path: CachePath) -> None:
    """Read the whole file, its structure and every vector against its checksum, and print what was found as JSON.

    The exit code is 1 if anything is damaged. Others may use the cache meanwhile: a damaged vector counts as a miss and
    is recomputed.
    """
    with _existing(path) as cache:
        found = cache.check(show_progress=True)
    content = {"path": str(path), "intact": found.intact, **asdict(found)}
    print(json.dumps(content, default=str, ensure_ascii=False))
    if not found.intact:
        recomputed = "delete it, and all vectors are recomputed" if found.problems else "those vectors are recomputed"
        typer.echo(f"millpond: {path} is damaged; {recomputed}", err=True)
        raise typer.Exit(1)


@app.command(cls=Command)
def stats(path: CachePath) -> None:
    """Count vectors and bytes, and print them as JSON.

    Widths are those of the vectors, with the number of vectors of each. Free bytes are filled by the next vectors.
    """
    with _existing(path) as cache:
        stats = cache.stats()
        counts = {"widths": cache.widths(), "bytes": stats.bytes, "free_bytes": cache.free_bytes()}
    print(json.dumps({"path": str(path), "rows": stats.rows, **counts}, default=str, ensure_ascii=False))


def _existing(path: Path) -> VectorCache:
    from millpond.cache.vector_cache import VectorCache

    if not path.exists():
        raise InvalidRequestError(f"{path}: there is no such file; name the file that --cache was given")
    try:
        return VectorCache(path)
    except CacheError as error:
        raise InvalidRequestError(str(error)) from error
