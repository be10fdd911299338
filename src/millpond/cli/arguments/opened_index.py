"""A late-interaction index on disk, opened alone or with an engine that encodes texts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millpond.cli.arguments.groups import EngineOptions
from millpond.errors import InvalidRequestError
from millpond.search.stored_model import check_tokens, describe_index

if TYPE_CHECKING:
    from millpond.engine.engine import Engine
    from millpond.late_interaction import PlaidIndex


def token_engine(model: str, options: EngineOptions) -> Engine:
    """An engine that has token vectors; a model without them is refused before its weights are loaded."""
    check_tokens(options.describe(model), model)
    return options.load(model)


def stored_index(index: Path) -> PlaidIndex:
    """An index that exists, without an engine."""
    from millpond.late_interaction import PlaidIndex

    return PlaidIndex.open(index)


@contextmanager
def opened_index(index: Path, model: str, options: EngineOptions, **created: Any) -> Iterator[PlaidIndex]:
    """The index, which is created if there is none, with an engine."""
    from millpond.late_interaction import PlaidIndex

    width, spec = created.get("dimensions"), options.describe(model)
    if width is not None and "token_embed" in spec.tasks and width > spec.hidden_size:  # before a folder is made
        raise InvalidRequestError(f"dimensions={width} is more than {model} has ({spec.hidden_size}); choose fewer")
    with token_engine(model, options) as engine, PlaidIndex(index, engine, **created) as opened:
        yield opened


@contextmanager
def reopened_index(index: Path, model: str | None, options: EngineOptions) -> Iterator[PlaidIndex]:
    """An index that exists, with an engine of the model named, or of the one that built it."""
    from millpond.engine.engine import Engine
    from millpond.late_interaction import PlaidIndex

    with stored_index(index) as stored:
        identity = stored.model
    found = describe_index(identity, model, options.settings, path=index)
    with Engine(found.spec.name, **found.settings) as engine, PlaidIndex(index, engine) as opened:
        yield opened
