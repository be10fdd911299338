"""Settings: what a server is started with, from flags, environment and a YAML file.

A flag wins over an environment variable, that over the file, that over the default. Within the file a model's own
options win over those at the top, which are for all models.
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
from millpond.server.settings.file import ModelEntry, SettingsFile
from millpond.server.settings.file import read as read_file
from millpond.server.settings.values import Values
from millpond.vllm_dialect import arguments

Config = TypeVar("Config", ModelConfig, ServerConfig)
Layer = dict[str, Values]  # what one source says, by setting

# Settings that are called otherwise than their field.
_CALLED = {"names": "served_model_name", "api_keys": "api_key", "cors_origins": "allowed_origins"}
# Other words for a setting: vLLM's, and its older ones.
SYNONYMS = {
    "override_pooler_config": "pooler_config",
    "max_num_batched_tokens": "max_batch_tokens",
    "enable_log_requests": "log_requests",
}
OPPOSITES = {"disable_log_requests": "log_requests"}


def _settings(config: type) -> dict[str, tuple[str, Any]]:
    """Each setting's field, and its type."""
    hints = get_type_hints(config)
    fields = (field.name for field in dataclasses.fields(config) if field.name != "model")
    return {_CALLED.get(name, name): (name, hints[name]) for name in fields}


MODEL_SETTINGS = _settings(ModelConfig)
SERVER_SETTINGS = _settings(ServerConfig)
NAMES = frozenset((*MODEL_SETTINGS, *SERVER_SETTINGS, *SYNONYMS, *OPPOSITES))


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to serve, and how.

    Attributes:
        models: At least one; no name twice.
        server: How the server behaves.
        ignored: Arguments of vLLM that were given and change nothing here.
    """

    models: tuple[ModelConfig, ...]
    server: ServerConfig
    ignored: tuple[str, ...] = ()


def read(
    models: Sequence[str],
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    *,
    ignored_args: Mapping[str, Any] | None = None,
) -> Settings:
    """What the command line, the environment and the file named by ``config`` say together.

    Args:
        models: Hub ids, folders, or names of the file's models. Without any, those of ``MILLPOND_MODEL`` or all of the
            file.
        flags: The command line's, by their names with ``_``; what was not given is left out.
        environ: The environment: ``MILLPOND_`` and a flag's name in capitals, and ``VLLM_API_KEY``.
        ignored_args: The command line's arguments that change nothing.

    Raises:
        InvalidRequestError: A setting that there is not, a value of another type, a name that is used twice, a file
            that cannot be read. No message holds a key of the API.
    """
    flags, ignored = dict(flags), dict(ignored_args or {})
    path = flags.pop("config", None) or environ.get(environment_name("config"))
    file = read_file(Path(path)) if path else SettingsFile()
    flagged = _layer(flags, lambda name: f"--{name.replace('_', '-')}")
    surroundings = _environment(environ)
    shared = _layer(_ours(file.top, ignored), lambda name: f"{file.label}: {name}")
    server = _build(ServerConfig, SERVER_SETTINGS, (flagged, surroundings, shared))

    entries = _chosen(models or _named_by(environ), file.models)
    if not entries:
        raise InvalidRequestError(
            "there is no model to serve; name one or more before the flags, or list them in the file of --config"
        )
    layers = [_for_each(layer, len(entries)) for layer in (flagged, surroundings, shared)]
    owned = [_own(entry, ignored) for entry in entries]
    configs = [
        _build(ModelConfig, MODEL_SETTINGS, (layers[0][i], layers[1][i], owned[i], layers[2][i]), model=entry.model)
        for i, entry in enumerate(entries)
    ]
    _refuse_doubles(configs)
    arguments.check_parallel(ignored)
    return Settings(models=tuple(configs), server=server, ignored=tuple(sorted(ignored)))


def environment_name(setting: str) -> str:
    """The environment variable of a setting."""
    return f"MILLPOND_{setting.upper()}"


def no_such_setting(label: str, name: str) -> InvalidRequestError:
    """The error for a setting that there is not, with the one that was probably meant."""
    near = difflib.get_close_matches(name, sorted(NAMES), n=1)
    hint = f"did you mean {near[0]}?" if near else "millpond serve --help lists what there is"
    return InvalidRequestError(f"{label} is no setting of the server; {hint}")


def _layer(values: Mapping[str, Any], label: Callable[[str], str], *, listed: bool = False) -> Layer:
    """The values of one source, under their settings' present names."""
    layer: Layer = {}
    for name, value in values.items():
        if name not in NAMES:
            raise no_such_setting(label(name), name)
        setting = OPPOSITES.get(name) or SYNONYMS.get(name, name)
        if setting in layer:
            raise InvalidRequestError(f"{label(name)} and {layer[setting].label} are one setting; give one of them")
        layer[setting] = Values(
            label=label(name), value=value, listed=listed, secret=setting == "api_key", opposite=name in OPPOSITES
        )
    return layer


def _environment(environ: Mapping[str, str]) -> Layer:
    """What the environment says. An empty variable says nothing, but an empty key would leave the server open."""
    variables = {name: environ.get(environment_name(name)) for name in sorted(NAMES)}
    layer = _layer({name: value for name, value in variables.items() if value}, environment_name, listed=True)
    for variable in (environment_name("api_key"), "VLLM_API_KEY"):
        if "api_key" in layer:
            break
        key = environ.get(variable)
        if key == "":
            raise InvalidRequestError(f"{variable} is empty, which would leave the server open; set it, or remove it")
        if key:
            layer["api_key"] = Values(label=variable, value=key, secret=True)  # one key, whatever it holds
    return layer


def _named_by(environ: Mapping[str, str]) -> Sequence[str]:
    variable = environment_name("model")
    given = Values(label=variable, value=environ.get(variable, ""), listed=True)
    named: tuple[str, ...] = given.read(tuple[str, ...])
    return named


def _chosen(models: Sequence[str], listed: Sequence[ModelEntry]) -> Sequence[ModelEntry]:
    """All that the file lists, or those of ``models``, with the options that the file has for them."""
    if not models:
        return listed
    chosen: list[ModelEntry] = []
    for model in models:
        found = [entry for entry in listed if model in (entry.name, entry.model)]
        chosen += found or [ModelEntry(label=model, model=model)]
    return chosen


def _ours(options: Mapping[str, Any], ignored: dict[str, Any]) -> dict[str, Any]:
    """Without the arguments of vLLM that change nothing, which go to ``ignored``."""
    ignored_args = {name: value for name, value in options.items() if name in arguments.SERVER_KNOBS - NAMES}
    ignored.update(ignored_args)
    return {name: value for name, value in options.items() if name not in ignored_args}


def _own(entry: ModelEntry, ignored: dict[str, Any]) -> Layer:
    """A model's own options."""
    layer = _layer(_ours(entry.options, ignored), lambda name: f"{entry.label}: {name}")
    for name, given in layer.items():
        if name not in MODEL_SETTINGS:
            raise InvalidRequestError(f"{given.label} is for the whole server; write it at the top of the file")
    if entry.name is not None:
        more = layer["served_model_name"].read(tuple[str, ...]) if "served_model_name" in layer else ()
        names = (entry.name, *(name for name in more if name != entry.name))
        layer["served_model_name"] = Values(label=entry.label, value=names)
    return layer


def _for_each(layer: Layer, count: int) -> list[Layer]:
    """The layer of each model: ``served_model_name`` holds all names of one model, or one for each of several."""
    given = layer.get("served_model_name")
    if given is None or count == 1:
        return [layer] * count
    names = given.read(tuple[str, ...])
    if len(names) != count:
        raise InvalidRequestError(
            f"{given.label}={', '.join(names)}: {len(names)} names for {count} models; give as many, in their order, "
            "or list the models with their names in the file of --config"
        )
    return [layer | {"served_model_name": Values(label=given.label, value=(name,))} for name in names]


def _build(
    config: type[Config], settings: Mapping[str, tuple[str, Any]], layers: Sequence[Layer], **more: Any
) -> Config:
    """A configuration: of each setting the first layer's value, or the default."""
    values = dict(more)
    for name, (field, kind) in settings.items():
        given = next((layer[name] for layer in layers if name in layer), None)
        if given is not None:
            values[field] = given.read(kind)
    return config(**values)


def _refuse_doubles(configs: Sequence[ModelConfig]) -> None:
    owners: dict[str, str] = {}
    for config in configs:
        for name in config.served_names:
            if name in owners:
                raise InvalidRequestError(
                    f"{owners[name]} and {config.model} are both called {name!r}; give each its served_model_name"
                )
            owners[name] = config.model
