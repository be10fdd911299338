"""SettingsFile: the YAML file of a server, taken apart into what is for all models and what is for one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from millpond.errors import InvalidRequestError, SourceNotFoundError


@dataclass(frozen=True, kw_only=True)
class ModelEntry:
    """One model of the file, or of the command line.

    Attributes:
        label: What errors call it.
        model: Hub id or folder.
        name: Its key, where the models stand under names.
        options: Its own settings, their names with ``_``.
    """

    label: str
    model: str
    name: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, kw_only=True)
class SettingsFile:
    """What a file says.

    Attributes:
        label: What errors call the file.
        top: Settings for the server and for all models, their names with ``_``.
        models: The models, with their own options.
    """

    label: str = ""
    top: Mapping[str, Any] = field(default_factory=dict, repr=False)
    models: tuple[ModelEntry, ...] = ()


class _Loader(yaml.SafeLoader):
    """Plain data only; a key that is written twice is an error, where YAML's own reader takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        written: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in written and key.value != "<<":
                    raise InvalidRequestError(f"line {key.start_mark.line + 1} has {key.value} a second time")
                written.add(key.value)
        return super().construct_mapping(node, deep)


def read(path: Path) -> SettingsFile:
    """Read and take apart; which settings there are is not asked here.

    Raises:
        SourceNotFoundError: There is no such file.
        InvalidRequestError: It is no YAML, or not of this shape. No message quotes the file, which may hold keys.
    """
    label = path.name
    try:
        content = yaml.load(path.expanduser().read_bytes(), _Loader)
    except FileNotFoundError:
        raise SourceNotFoundError(f"config={str(path)!r} is not there; give the path of a YAML file") from None
    except OSError as error:
        raise InvalidRequestError(f"config={str(path)!r} cannot be read ({error.strerror})") from None
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{label}: {error}; write it once") from None
    except (yaml.YAMLError, UnicodeError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        place = "" if mark is None else f" at line {mark.line + 1}, column {mark.column + 1}"
        raise InvalidRequestError(
            f"{label} is no YAML{place}; indent with spaces, and put values with special characters in quotes"
        ) from None
    top = _settings({} if content is None else content, label)
    if "model" in top and "models" in top:
        raise InvalidRequestError(f"{label} has both model and models; list all of them under models")
    if "model" in top:
        one = top.pop("model")
        return SettingsFile(label=label, top=top, models=_listed(one if isinstance(one, list) else [one], label))
    found = top.pop("models", None)
    if isinstance(found, Mapping):
        return SettingsFile(label=label, top=top, models=_named(found, label))
    if found is not None and not isinstance(found, list):
        raise InvalidRequestError(f"{label}: models must be a list, or a mapping of names to options")
    return SettingsFile(label=label, top=top, models=_listed(found or [], label))


def _listed(entries: list[Any], label: str) -> tuple[ModelEntry, ...]:
    found = []
    for i, entry in enumerate(entries):
        where = f"{label}: models[{i}]"
        options = {"model": entry} if isinstance(entry, str) else _settings(entry, where)
        if "model" not in options:
            raise InvalidRequestError(f"{where} has no model; name a hub id or a folder as model:")
        found.append(ModelEntry(label=where, model=_model(options.pop("model"), where), options=options))
    return tuple(found)


def _named(entries: Mapping[Any, Any], label: str) -> tuple[ModelEntry, ...]:
    found = []
    for name, entry in entries.items():
        where = f"{label}: models.{name}"
        if not isinstance(name, str):
            raise InvalidRequestError(f"{where} is no text; put the name in quotes")
        options = {"model": entry} if isinstance(entry, str) else _settings({} if entry is None else entry, where)
        model = _model(options.pop("model", name), where)
        found.append(ModelEntry(label=where, model=model, name=name, options=options))
    return tuple(found)


def _settings(content: Any, where: str) -> dict[str, Any]:
    """A mapping with ``_`` in its keys; what is null is left out."""
    if not isinstance(content, Mapping):
        raise InvalidRequestError(f"{where} must hold settings as key: value")
    found: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name in found:
            raise InvalidRequestError(f"{where} has {name} a second time; write it once")
        found[name] = value
    return {name: value for name, value in found.items() if value is not None}


def _model(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidRequestError(f"{where}: model must be a hub id or a folder, as text")
    return value
