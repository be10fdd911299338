"""A late-interaction index on disk, opened alone or with an engine that encodes texts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millpond.cli.arguments.groups import EngineOptions
from millpond.cli.arguments.stored_model import describe_named, describe_stored
from millpond.errors import InvalidRequestError

if TYPE_CHECKING:
    from millpond.engine.engine import Engine
    from millpond.late_interaction import PlaidIndex
    from millpond.values.spec import ModelSpec


def token_engine(model: str, options: EngineOptions) -> Engine:
    """An engine that has token vectors; a model without them is refused before its weights are loaded."""
    _check_tokens(options.describe(model), model)
    return options.load(model)


def _check_tokens(spec: ModelSpec, model: str) -> None:
    if "token_embed" not in spec.tasks:
        raise InvalidRequestError(f"model={model!r} has no token vectors; name an embedder or a ColBERT checkpoint")


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
    if identity is None:
        if model is None:
            raise InvalidRequestError(f"the index at {str(index)!r} names no model; name one with --model")
        found = describe_named(model, options.settings)
    else:
        found = describe_stored(identity, model, options.settings, owner="The index", option="--model")
    _check_tokens(found.spec, model or found.spec.name)
    if identity is not None:
        identity.check(found.spec, owner=f"index {index}", another="build another index")
    with Engine(found.spec.name, **found.settings) as engine, PlaidIndex(index, engine) as opened:
        yield opened
