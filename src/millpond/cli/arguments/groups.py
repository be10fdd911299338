"""Options that several commands have, as dataclasses: a command's parameter of such a type stands for its fields."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from millpond.cli.arguments import options
from millpond.cli.arguments.input_texts import read_texts
from millpond.cli.arguments.options import option
from millpond.cli.arguments.settings import engine_settings, read_setting, sink_settings
from millpond.errors import CacheError, InvalidRequestError
from millpond.ingest.record import Record, Rejected
from millpond.search.stored_model import placement
from millpond.values.config import EngineConfig

if TYPE_CHECKING:
    from millpond.cache.vector_cache import VectorCache
    from millpond.engine.engine import Engine
    from millpond.values.spec import ModelSpec


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Replace every parameter whose type is a dataclass by the fields of the dataclass, which typer then reads."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name in groups:
            types = get_type_hints(groups[parameter.name], include_extras=True)
            for each in fields(groups[parameter.name]):
                default = inspect.Parameter.empty if each.default is MISSING else each.default
                hint = Annotated[types[each.name], each.metadata["option"]] if each.metadata else types[each.name]
                parameters.append(parameter.replace(name=each.name, default=default, annotation=hint))
        else:
            parameters.append(parameter.replace(annotation=hints[parameter.name]))

    @wraps(command)
    def run(*args: Any, **given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{each.name: given.pop(each.name) for each in fields(group)})
        command(*args, **given)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The options of an engine."""

    engine: list[Any] | None = option(
        None,
        "Another option of Engine: dtype=float32, device=cuda:0, max_length=256, revision=NAME, ...",
        "NAME=VALUE",
        parser=read_setting,
    )

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of an Engine but its model and its cache."""
        return engine_settings(self.engine)

    @property
    def written(self) -> list[str]:
        """The options as they are written on a command line."""
        return [word for name, value in self.engine or () for word in ("--engine", f"{name}={value}")]

    @property
    def placement(self) -> dict[str, Any]:
        """The arguments that a second model shares."""
        return placement(self.settings)

    def describe(self, model: str) -> ModelSpec:
        """What the engine would be; its weights are not loaded."""
        from millpond.engine.loading import describe

        return describe(EngineConfig(model=model, **self.settings))

    def load(self, model: str, *, cache: VectorCache | None = None) -> Engine:
        """The engine."""
        from millpond.engine.engine import Engine

        return Engine(model, cache=cache, **self.settings)


def open_cache(stack: ExitStack, path: Path | None) -> VectorCache | None:
    """The cache that a command names, if it does; a file that is no cache is a mistake in the command."""
    if path is None:
        return None
    from millpond.cache.vector_cache import VectorCache

    try:
        return stack.enter_context(VectorCache(path))
    except CacheError as error:
        raise InvalidRequestError(str(error)) from error


@dataclass(frozen=True, kw_only=True)
class SinkOptions:
    """The options of a database's sink."""

    sink: list[Any] | None = option(
        None,
        "Another option of the database's sink: timeout=30, datatype=float16, index_quantization=scalar, ...",
        "NAME=VALUE",
        parser=read_setting,
    )

    @property
    def settings(self) -> dict[str, Any]:
        """The further arguments of the sink."""
        return sink_settings(self.sink)


@dataclass(frozen=True, kw_only=True)
class DeletionLimit:
    """How much a run may delete."""

    sync_max: float = option(
        0.5,
        "Largest share of the collection that the run may delete, with or without --sync (1: all of it).",
        "SHARE",
        min=0.0,
        max=1.0,
    )


@dataclass(frozen=True, kw_only=True)
class SyncOptions(DeletionLimit):
    """Whether rows that the source does not have are deleted at the end of a run."""

    sync: bool = option(False, "Then delete the rows of records that the source no longer has.", flags="--sync")


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """How a source of texts is read."""

    id_column: options.IdColumn = "id"
    text_column: options.TextColumns = "text"
    template: options.Template = None

    @property
    def columns(self) -> dict[str, Any]:
        """The arguments of :func:`millpond.ingest.read` that name the columns."""
        text = options.read_columns(self.text_column)
        return {"id_column": self.id_column, "text_column": text, "template": self.template}

    def read(self, source: str) -> Iterator[Record | Rejected]:
        """The texts of a source, as :func:`read_texts` takes it."""
        return read_texts(source, **self.columns)


@dataclass(frozen=True, kw_only=True)
class RecordOptions(TextOptions):
    """How a source of records is read."""

    types: options.Types = None

    def read(self, source: str, **further: Any) -> Iterator[Record | Rejected]:
        """The records of a source, as :func:`millpond.ingest.read` takes it."""
        from millpond.ingest.sources.read import read

        types = options.read_types(self.types)
        return read(source, **self.columns, types=types, **further)
