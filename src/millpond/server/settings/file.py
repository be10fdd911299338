"""SettingsFile: the YAML file of a server, split into settings for all models and for each model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from millpond.errors import InvalidRequestError, SourceNotFoundError


@dataclass(frozen=True, kw_only=True)
class ModelEntry:
    """One model from the file or the command line.

    Attributes:
        label: Its name in errors.
        model: Hub id or folder.
        name: Its key, if the models are a mapping.
        options: Its own settings; names with ``_``.
    """

    label: str
    model: str
    name: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, kw_only=True)
class SettingsFile:
    """The content of a settings file.

    Attributes:
        label: The file's name in errors.
        top: Settings for the server and for all models; names with ``_``.
        models: The models with their own options.
    """

    label: str = ""
    top: Mapping[str, Any] = field(default_factory=dict, repr=False)
    models: tuple[ModelEntry, ...] = ()


class _Loader(yaml.SafeLoader):
    """Reads plain data only; a duplicate key is an error, where the standard loader takes the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in keys and key.value != "<<":
                    raise InvalidRequestError(f"line {key.start_mark.line + 1} has {key.value} a second time")
                keys.add(key.value)
        return super().construct_mapping(node, deep)


def read(path: Path) -> SettingsFile:
    """Read the file; the names of the settings are not checked here.

    Raises:
        SourceNotFoundError: The file does not exist.
        InvalidRequestError: Invalid YAML, or another structure. No message quotes the file, which may hold API keys.
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
        position = "" if mark is None else f" at line {mark.line + 1}, column {mark.column + 1}"
        raise InvalidRequestError(
            f"{label} is no YAML{position}; indent with spaces, and put values with special characters in quotes"
        ) from None
    top = _settings({} if content is None else content, label)
    if "model" in top and "models" in top:
        raise InvalidRequestError(f"{label} has both model and models; list all of them under models")
    if "model" in top:
        model = top.pop("model")
        entries = model if isinstance(model, list) else [model]
        return SettingsFile(label=label, top=top, models=_from_list(entries, label))
    models = top.pop("models", None)
    if isinstance(models, Mapping):
        return SettingsFile(label=label, top=top, models=_from_mapping(models, label))
    if models is not None and not isinstance(models, list):
        raise InvalidRequestError(f"{label}: models must be a list, or a mapping of names to options")
    return SettingsFile(label=label, top=top, models=_from_list(models or [], label))


def _from_list(entries: list[Any], label: str) -> tuple[ModelEntry, ...]:
    models = []
    for i, entry in enumerate(entries):
        where = f"{label}: models[{i}]"
        options = {"model": entry} if isinstance(entry, str) else _settings(entry, where)
        if "model" not in options:
            raise InvalidRequestError(f"{where} has no model; name a hub id or a folder as model:")
        models.append(ModelEntry(label=where, model=_model(options.pop("model"), where), options=options))
    return tuple(models)


def _from_mapping(entries: Mapping[Any, Any], label: str) -> tuple[ModelEntry, ...]:
    models = []
    for name, entry in entries.items():
        where = f"{label}: models.{name}"
        if not isinstance(name, str):
            raise InvalidRequestError(f"{where} is no text; put the name in quotes")
        options = {"model": entry} if isinstance(entry, str) else _settings({} if entry is None else entry, where)
        model = _model(options.pop("model", name), where)
        models.append(ModelEntry(label=where, model=model, name=name, options=options))
    return tuple(models)


def _settings(content: Any, where: str) -> dict[str, Any]:
    """A mapping with ``_`` in its keys and without null values."""
    if not isinstance(content, Mapping):
        raise InvalidRequestError(f"{where} must hold settings as key: value")
    settings: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name in settings:
            raise InvalidRequestError(f"{where} has {name} a second time; write it once")
        settings[name] = value
    return {name: value for name, value in settings.items() if value is not None}


def _model(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidRequestError(f"{where}: model must be a hub id or a folder, as text")
    return value
