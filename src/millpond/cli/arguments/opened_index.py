"""A late-interaction index on disk, opened alone or with an engine that encodes texts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millpond.cli.arguments.groups import EngineOptions
from millpond.errors import InvalidRequestError, ModelLoadError

if TYPE_CHECKING:
    from millpond.engine.engine import Engine
    from millpond.late_interaction import PlaidIndex


def token_engine(model: str, options: EngineOptions) -> Engine:
    """An engine that has token vectors; a model without them is refused before its weights are loaded."""
    if "token_embed" not in options.describe(model).tasks:
        raise InvalidRequestError(f"model={model!r} has no token vectors; name an embedder or a ColBERT checkpoint")
    return options.load(model)


def stored_index(index: Path) -> PlaidIndex:
    """An index that exists, without an engine."""
    from millpond.late_interaction import PlaidIndex

    return PlaidIndex.open(index)


@contextmanager
def opened_index(index: Path, model: str, options: EngineOptions, **created: Any) -> Iterator[PlaidIndex]:
    """The index, which is created if there is none, with an engine."""
    from millpond.late_interaction import PlaidIndex

    with token_engine(model, options) as engine, PlaidIndex(index, engine, **created) as opened:
        yield opened


@contextmanager
def reopened_index(index: Path, model: str | None, options: EngineOptions) -> Iterator[PlaidIndex]:
    """An index that exists, with an engine of the model named, or of the one whose name the index has."""
    with stored_index(index) as stored:
        name = model if model is not None or stored.model is None else stored.model.model
    if name is None:
        raise InvalidRequestError(f"the index at {str(index)!r} names no model; name one with --model")
    try:
        with opened_index(index, name, options) as opened:
            yield opened
    except ModelLoadError as error:
        if model is None:
            error.add_note(f"The index was built by {name}. If that was a folder, name it with --model.")
        raise
