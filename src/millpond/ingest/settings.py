"""Settings of the model that filled a collection, compared with those of an engine, to name what differs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from millpond.spec import ModelSpec

# Options of an Engine by which a setting is chosen; the others come with the checkpoint.
_OPTIONS = ("revision", "max_length", "pooling", "quantization", "convert", "hf_overrides")
_MAX_CHARS = 200


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One setting that differs.

    Attributes:
        name: The setting, as ``max_length`` or ``prompts['query']``.
        stored: Its value in the collection, written as in Python.
        actual: Its value in the engine.
    """

    name: str
    stored: str
    actual: str

    @property
    def is_option(self) -> bool:
        """Whether the collection's value can be passed to an Engine."""
        return self.name in _OPTIONS


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
