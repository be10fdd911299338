"""The model that computed stored vectors, compared with an engine's: vectors of two models do not compare."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from millpond.errors import FingerprintMismatchError
from millpond.values.spec import ModelSpec

# Options of an Engine by which a setting is chosen; the others come with the checkpoint.
_OPTIONS = ("revision", "max_length", "pooling", "quantization", "convert", "hf_overrides")
_MAX_CHARS = 200


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One setting that differs."""

    name: str  # the setting, as `max_length` or `prompts['query']`
    stored: str  # its value in the collection or index, written as in Python
    actual: str  # its value in the engine

    @property
    def is_option(self) -> bool:
        """Whether the collection's value can be passed to an Engine."""
        return self.name in _OPTIONS


@dataclass(frozen=True, kw_only=True)
class ModelIdentity:
    """The model of a collection or an index, stored with it when it is created."""

    fingerprint: str  # :attr:`~millpond.values.spec.ModelSpec.fingerprint` of the model
    model: str  # the model's name, for error messages; of a local folder the last part
    # its settings, as :func:`stored_settings` makes them; empty if they were not stored. Only error messages use them
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    folder: str | None = None  # where its files were, if that was a local folder: a search looks there first

    @classmethod
    def of(cls, spec: ModelSpec) -> ModelIdentity:
        """The identity of an engine's model."""
        return cls(
            fingerprint=spec.fingerprint,
            model=stored_name(spec),
            settings=stored_settings(spec),
            folder=stored_folder(spec),
        )

    def to_json(self) -> dict[str, Any]:
        """The identity as it is stored; ``ModelIdentity(**...)`` reads it."""
        content = {"fingerprint": self.fingerprint, "model": self.model, "settings": dict(self.settings)}
        return content if self.folder is None else {**content, "folder": self.folder}

    def check(self, spec: ModelSpec, *, owner: str, another: str) -> None:
        """Compare with the model of an engine."""
        if self.fingerprint == spec.fingerprint:
            return
        name, differing = stored_name(spec), differences(self.settings, spec)
        stored = ", ".join(f"{setting.name}={setting.stored}" for setting in differing)
        actual = ", ".join(f"{setting.name}={setting.actual}" for setting in differing)
        options = ", ".join(f"{setting.name}={setting.stored}" for setting in differing if setting.is_option)
        kind = owner.split()[0]
        reason = "vectors of two models do not compare"
        if self.model != name:
            way_out = f"Use {self.model}"
        elif differing:
            reason += ", nor do vectors of one model with two settings"
            way_out = f"Open the engine with {options}" if options else f"Use the checkpoint with the {kind}'s settings"
        else:
            unnamed = "" if self.settings else f", or settings, which the {kind} of an older version does not name"
            reason += f", and their files differ (weights, tokenizer or configuration{unnamed})"
            way_out = "Use the files that it was built from"
        raise FingerprintMismatchError(
            f"{owner} was built by {self.model}{' with ' * bool(stored)}{stored} (fingerprint "
            f"{self.fingerprint[:12]}), and this engine is {name}{' with ' * bool(actual)}{actual} "
            f"({spec.fingerprint[:12]}); {reason}. {way_out}, or {another}"
        )


def stored_name(spec: ModelSpec) -> str:
    """The model's name, for messages; of a local folder only the last part."""
    return os.path.basename(os.path.normpath(spec.name)) if os.path.isdir(spec.name) else spec.name


def stored_folder(spec: ModelSpec) -> str | None:
    """The absolute path of a local folder; ``None`` for a model of the hub."""
    return os.path.abspath(spec.name) if os.path.isdir(spec.name) else None


def stored_settings(spec: ModelSpec) -> dict[str, Any]:
    """The settings as they are stored with a collection: JSON, long texts cut and marked with their hash."""
    settings: dict[str, Any] = json.loads(json.dumps(dict(spec.settings), default=str))
    return {name: _cut(value) for name, value in settings.items()}


def differences(stored: Mapping[str, Any], spec: ModelSpec) -> list[Difference]:
    """The settings whose stored value is not the spec's; empty if nothing is stored."""
    return [
        difference
        for name, actual in stored_settings(spec).items()
        if name in stored
        for difference in _compare(name, stored[name], actual)
    ]


def _compare(name: str, stored: Any, actual: Any) -> Iterator[Difference]:
    if stored == actual:
        return
    if name == "prompts" and isinstance(stored, dict) and isinstance(actual, dict):
        for key in sorted(stored.keys() | actual.keys()):
            if stored.get(key) != actual.get(key):
                yield Difference(name=f"prompts[{key!r}]", stored=repr(stored.get(key)), actual=repr(actual.get(key)))
    else:
        yield Difference(name=name, stored=repr(stored), actual=repr(actual))


def _cut(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _cut(item) for key, item in value.items()}
    if isinstance(value, str) and len(value) > _MAX_CHARS:
        return f"{value[:_MAX_CHARS]}... (sha256 {sha256(value.encode()).hexdigest()[:12]})"
    return value
