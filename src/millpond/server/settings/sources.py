"""Sources: the settings of a server from flags, environment variables and a YAML file.

A flag takes precedence over a variable, a variable over the file, the file over the default. Within the file a
model's own options take precedence over those at the top, which are for all models.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from millpond.errors import InvalidRequestError
from millpond.server.settings.config import ModelConfig, ServerConfig
from millpond.server.settings.file import ModelEntry
from millpond.server.settings.file import read as read_file
from millpond.server.settings.values import RawValue
from millpond.vllm import arguments

Config = TypeVar("Config", ModelConfig, ServerConfig)
Layer = dict[str, RawValue]  # the values of one source, by setting

# Settings whose name differs from their field's.
_SETTING_NAMES = {
    "names": "served_model_name",
    "api_keys": "api_key",
    "indexes": "index",
    "cors_origins": "allowed_origins",
}
# Other names of a setting: vLLM's, current and older.
SYNONYMS = {
    "override_pooler_config": "pooler_config",
    "max_num_batched_tokens": "max_batch_tokens",
    "enable_log_requests": "log_requests",
}
OPPOSITES = {"disable_log_requests": "log_requests"}


def _settings(config: type) -> dict[str, tuple[str, Any]]:
    """The field and the type of each setting."""
    hints = get_type_hints(config)
    fields = (field.name for field in dataclasses.fields(config) if field.name != "model")
    return {_SETTING_NAMES.get(name, name): (name, hints[name]) for name in fields}


MODEL_SETTINGS = _settings(ModelConfig)
SERVER_SETTINGS = _settings(ServerConfig)
NAMES = frozenset((*MODEL_SETTINGS, *SERVER_SETTINGS, *SYNONYMS, *OPPOSITES))


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The models, of which no two have the same name, and the server's configuration."""

    models: tuple[ModelConfig, ...]
    server: ServerConfig
    ignored: tuple[str, ...] = ()  # arguments of vLLM that have no effect here


def read(
    models: Sequence[str],
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    *,
    ignored_args: Mapping[str, Any] | None = None,
) -> Settings:
    """Merge the command line, the environment and the file named by ``config``; no message shows an API key.

    Without ``models`` those in ``MILLPOND_MODEL`` are meant, or all of the file. ``ignored_args`` are arguments on the
    command line that have no effect.
    """
    flags, ignored = dict(flags), dict(ignored_args or {})
    path = flags.pop("config", None) or environ.get(environment_name("config"))
    file = Path(path or "")
    top, listed = read_file(file) if path else ({}, [])
    flagged = _layer(flags, lambda name: f"--{name.replace('_', '-')}")
    environment = _environment(environ)
    shared = _layer(_without_ignored(top, ignored), lambda name: f"{file.name}: {name}")
    server = _build(ServerConfig, SERVER_SETTINGS, (flagged, environment, shared))

    variable = environment_name("model")
    named = RawValue(label=variable, value=environ.get(variable, ""), listed=True).read(tuple[str, ...])
    entries = _chosen(models or named, listed)
    if not entries:
        raise InvalidRequestError(
            "there is no model to serve; name one or more before the flags, or list them in the file of --config"
        )
    layers = [_per_model(layer, len(entries)) for layer in (flagged, environment, shared)]
    own = [_own_layer(entry, ignored) for entry in entries]
    configs = [
        _build(ModelConfig, MODEL_SETTINGS, (layers[0][i], layers[1][i], own[i], layers[2][i]), model=entry.model)
        for i, entry in enumerate(entries)
    ]
    owners: dict[str, str] = {}
    for config in configs:
        for name in config.served_names:
            if name in owners:
                raise InvalidRequestError(
                    f"{owners[name]} and {config.model} are both called {name!r}; give each its served_model_name"
                )
            owners[name] = config.model
    arguments.check_parallel(ignored)
    return Settings(models=tuple(configs), server=server, ignored=tuple(sorted(ignored)))


def environment_name(setting: str) -> str:
    """The environment variable of a setting."""
    return f"MILLPOND_{setting.upper()}"


def _layer(values: Mapping[str, Any], label: Callable[[str], str], *, listed: bool = False) -> Layer:
    """The values of one source, by the settings' current names."""
    layer: Layer = {}
    for name, value in values.items():
        if name not in NAMES:
            near = difflib.get_close_matches(name, sorted(NAMES), n=1)
            hint = f"did you mean {near[0]}?" if near else "millpond serve --help lists what there is"
            raise InvalidRequestError(f"{label(name)} is no setting of the server; {hint}")
        setting = OPPOSITES.get(name) or SYNONYMS.get(name, name)
        if setting in layer:
            raise InvalidRequestError(f"{label(name)} and {layer[setting].label} are one setting; give one of them")
        layer[setting] = RawValue(
            label=label(name), value=value, listed=listed, secret=setting == "api_key", opposite=name in OPPOSITES
        )
    return layer


def _environment(environ: Mapping[str, str]) -> Layer:
    """The environment's values. Empty variables are ignored, except an empty key, which would leave the server open."""
    variables = {name: environ.get(environment_name(name)) for name in sorted(NAMES)}
    layer = _layer({name: value for name, value in variables.items() if value}, environment_name, listed=True)
    for variable in (environment_name("api_key"), "VLLM_API_KEY"):
        if "api_key" in layer:
            break
        key = environ.get(variable)
        if key == "":
            raise InvalidRequestError(f"{variable} is empty, which would leave the server open; set it, or remove it")
        if key:
            layer["api_key"] = RawValue(label=variable, value=key, secret=True)  # one key, even with commas
    return layer


def _chosen(models: Sequence[str], entries: Sequence[ModelEntry]) -> Sequence[ModelEntry]:
    """The entries for ``models`` with their options in the file; without ``models`` all entries of the file."""
    if not models:
        return entries
    chosen: list[ModelEntry] = []
    for model in models:
        matches = [entry for entry in entries if model in (entry.name, entry.model)]
        chosen += matches or [ModelEntry(label=model, model=model)]
    return chosen


def _without_ignored(options: Mapping[str, Any], ignored: dict[str, Any]) -> dict[str, Any]:
    """The options, without vLLM's arguments that have no effect, which are added to ``ignored``."""
    ignored_args = {name: value for name, value in options.items() if name in arguments.SERVER_IGNORED_ARGS - NAMES}
    ignored.update(ignored_args)
    return {name: value for name, value in options.items() if name not in ignored_args}


def _own_layer(entry: ModelEntry, ignored: dict[str, Any]) -> Layer:
    """The values of a model's own options."""
    layer = _layer(_without_ignored(entry.options, ignored), lambda name: f"{entry.label}: {name}")
    for name, raw in layer.items():
        if name not in MODEL_SETTINGS:
            raise InvalidRequestError(f"{raw.label} is for the whole server; write it at the top of the file")
    if entry.name is not None:
        more = layer["served_model_name"].read(tuple[str, ...]) if "served_model_name" in layer else ()
        names = (entry.name, *(name for name in more if name != entry.name))
        layer["served_model_name"] = RawValue(label=entry.label, value=names)
    return layer


def _per_model(layer: Layer, count: int) -> list[Layer]:
    """The layer of each model: ``served_model_name`` holds all names of one model, or one name per model."""
    raw = layer.get("served_model_name")
    if raw is None or count == 1:
        return [layer] * count
    names = raw.read(tuple[str, ...])
    if len(names) != count:
        raise InvalidRequestError(
            f"{raw.label}={', '.join(names)}: {len(names)} names for {count} models; give as many, in their order, "
            "or list the models with their names in the file of --config"
        )
    return [layer | {"served_model_name": RawValue(label=raw.label, value=(name,))} for name in names]


def _build(
    config: type[Config], settings: Mapping[str, tuple[str, Any]], layers: Sequence[Layer], **more: Any
) -> Config:
    """A configuration: each setting from the first layer that has it, or its default."""
    values = dict(more)
    for name, (field, kind) in settings.items():
        raw = next((layer[name] for layer in layers if name in layer), None)
        if raw is not None:
            values[field] = raw.read(kind)
    return config(**values)
