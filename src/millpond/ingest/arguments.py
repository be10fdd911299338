"""The arguments of ingest: wrong types are named before anything is read."""

from __future__ import annotations

import os
from inspect import iscoroutinefunction

from millpond.errors import UnsupportedTaskError
from millpond.values.spec import ModelSpec


def check_engine(engine: object) -> None:
    """Raise TypeError for anything but an Engine, which embeds in the calling thread.

    It is recognized by ``submit`` and ``spec``, so that one can stand around another.
    """
    kind = type(engine).__name__
    if isinstance(engine, str | os.PathLike):
        name = os.fspath(engine)
        raise TypeError(f"engine={name!r} is a name, not an engine; pass millpond.Engine({name!r})")
    if not isinstance(engine, type) and iscoroutinefunction(getattr(engine, "embed", None)):
        raise TypeError(
            f"engine is an {kind}, whose methods are awaited; pass the Engine inside it (engine=engine.engine), from a "
            "coroutine by asyncio.to_thread"
        )
    if hasattr(engine, "submit") and hasattr(engine, "spec") and not isinstance(engine, type):
        return
    raise TypeError(f"engine is {_described(engine)}; pass a millpond.Engine")


def check_embeds(spec: ModelSpec) -> None:
    """Raise UnsupportedTaskError for a model that makes no embeddings."""
    if "embed" not in spec.tasks:
        raise UnsupportedTaskError(
            f"{spec.name} does not embed (it serves {', '.join(sorted(spec.tasks))}); choose an embedding model"
        )


def check_sink(sink: object) -> None:
    """Raise TypeError for anything but a sink."""
    if isinstance(sink, str | os.PathLike):
        raise TypeError(f"sink={os.fspath(sink)!r} is a URL or a path; pass millpond.ingest.open_sink(url)")
    if isinstance(sink, type) or not (hasattr(sink, "prepare") and hasattr(sink, "write")):
        raise TypeError(f"sink is {_described(sink)}; pass a sink, like that of millpond.ingest.open_sink(url)")


def _described(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"of type {type(value).__name__}"
