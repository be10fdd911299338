"""The model that built a collection or an index, found again where no command names one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from millpond.errors import InvalidRequestError, ModelLoadError
from millpond.values.config import EngineConfig
from millpond.values.fingerprint import ModelIdentity, differences

if TYPE_CHECKING:
    from millpond.values.spec import ModelSpec


class DescribedModel(NamedTuple):
    """A model that is checked and not loaded."""

    spec: ModelSpec
    settings: Mapping[str, Any]


def describe_named(name: str, settings: Mapping[str, Any]) -> DescribedModel:
    """The model of a name."""
    from millpond.engine.loading import describe

    return DescribedModel(describe(EngineConfig(model=name, **settings)), settings)


def describe_stored(
    identity: ModelIdentity, name: str | None, settings: Mapping[str, Any], *, owner: str, option: str
) -> DescribedModel:
    """The model of a name, or that of an identity: in its folder, if its files are still there, or of the hub.

    Settings that the command does not name are those of then. ``owner`` says what the model built.
    """
    if name is not None:
        return _as_then(identity, name, settings)
    if identity.folder is not None and os.path.isdir(identity.folder):
        with suppress(ModelLoadError, InvalidRequestError):
            stored = {name: value for name, value in settings.items() if name not in identity.settings}
            if _as_then(identity, identity.folder, stored).spec.fingerprint == identity.fingerprint:
                return _as_then(identity, identity.folder, settings)
    try:
        return _as_then(identity, identity.model, settings)
    except ModelLoadError as error:
        place = "If that was a folder"
        if identity.folder is not None:
            state = "holds another model now" if os.path.isdir(identity.folder) else "is not there"
            place = f"Its folder {identity.folder!r} {state}; if it is elsewhere"
        error.add_note(f"{owner} was filled by {identity.model!r}. {place}, name it with {option}.")
        raise


def describe_index(
    identity: ModelIdentity | None, name: str | None, settings: Mapping[str, Any], *, path: object
) -> DescribedModel:
    """The model of a late-interaction index in a folder, checked against the one that built it."""
    if identity is None:
        if name is None:
            raise InvalidRequestError(f"the index at {str(path)!r} names no model; name one with --model")
        found = describe_named(name, settings)
    else:
        found = describe_stored(identity, name, settings, owner="The index", option="--model")
    check_tokens(found.spec, name or found.spec.name)
    if identity is not None:
        identity.check(found.spec, owner=f"index {path}", another="build another index")
    return found


def check_tokens(spec: ModelSpec, model: str) -> None:
    """Refuse a model without token vectors, before its weights are loaded."""
    if "token_embed" not in spec.tasks:
        raise InvalidRequestError(f"model={model!r} has no token vectors; name an embedder or a ColBERT checkpoint")


def placement(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of an engine that a second model shares."""
    return {name: value for name, value in settings.items() if name in ("device", "dtype")}


def _as_then(identity: ModelIdentity, name: str, settings: Mapping[str, Any]) -> DescribedModel:
    """The model of a name with the stored settings that the command does not name."""
    model = describe_named(name, settings)
    stored = {
        each.name: identity.settings[each.name]
        for each in differences(identity.settings, model.spec)
        if each.is_option and settings.get(each.name) is None
    }
    return describe_named(name, {**settings, **stored}) if stored else model
