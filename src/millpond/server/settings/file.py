"""The YAML file of a server, split into settings for all models and for each model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from millpond.errors import InvalidRequestError, SourceNotFoundError


@dataclass(frozen=True, kw_only=True)
class ModelEntry:
    """One model from the file or the command line."""

    label: str  # in errors
    model: str  # hub id or folder
    name: str | None = None  # its key, if the models are a mapping
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)  # its own settings; names with _


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


def read(path: Path) -> tuple[dict[str, Any], list[ModelEntry]]:
    """(the settings at the top of the file, its models); no message quotes the file, which may hold API keys."""
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
    models = top.pop("model", None)
    if models is not None and not isinstance(models, list):
        models = [models]
    return top, list(_entries(top.pop("models", []) if models is None else models, label))


def _entries(models: Any, label: str) -> Iterator[ModelEntry]:
    named = isinstance(models, Mapping)
    if not named and not isinstance(models, list):
        raise InvalidRequestError(f"{label}: models must be a list, or a mapping of names to options")
    for i, (name, entry) in enumerate(models.items() if named else ((None, entry) for entry in models)):
        where = f"{label}: models.{name}" if named else f"{label}: models[{i}]"
        if named and not isinstance(name, str):
            raise InvalidRequestError(f"{where} is no text; put the name in quotes")
        plain = {} if named and entry is None else entry
        options = {"model": entry} if isinstance(entry, str) else _settings(plain, where)
        model = options.pop("model", name)
        if model is None:
            raise InvalidRequestError(f"{where} has no model; name a hub id or a folder as model:")
        if not isinstance(model, str) or not model:
            raise InvalidRequestError(f"{where}: model must be a hub id or a folder, as text")
        yield ModelEntry(label=where, model=model, name=name, options=options)


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
