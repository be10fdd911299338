"""EngineSource: the pydantic fields of an adapter that name a model to load, or hold a loaded engine."""

from __future__ import annotations

import logging
import multiprocessing
import os
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from millpond.compat.sentence_transformers_options import hide_secrets
from millpond.engine.shared import get_engine, get_engine_async

if TYPE_CHECKING:
    from millpond import Engine
else:
    # Importing the class would import torch; `_check_engine` checks the value instead.
    Engine = Any


_logger = logging.getLogger(__name__)


def _path(value: object) -> object:
    """A path object as a str; any other value as it is."""
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _check_engine(value: object) -> object:
    if value is None:
        return None
    from millpond import AsyncEngine, Engine

    if isinstance(value, AsyncEngine):
        return value.engine  # the adapter's asynchronous methods await it themselves
    if not isinstance(value, Engine):
        raise TypeError(f"engine must be a millpond.Engine, not a {type(value).__name__}")
    return value


@cache
def _tell_worker(process: int) -> None:
    """Log once in a worker process, such as those of a pipeline's ``num_workers``, what it costs."""
    if multiprocessing.parent_process() is not None:
        _logger.warning(
            "process %d is a worker process and loads a model of its own; one process with one engine uses the whole "
            "machine, so leave out num_workers",
            process,
        )


PathStr = Annotated[str, BeforeValidator(_path)]


class EngineSource(BaseModel):
    """The fields that every adapter has, except the model's name.

    Attributes:
        engine: A loaded engine, or an ``AsyncEngine`` over it, instead of a model name and every option that is read
            at loading. Never serialized.
        revision: Branch, tag or commit of a hub id.
        device: ``auto`` or ``None`` (cuda, then mps, then cpu), a torch device, or a list of them.
        dtype: ``auto``, ``float32``, ``float16`` or ``bfloat16``.
        max_length: Most tokens per text; the checkpoint's limit by default.
        hf_overrides: Merged into config.json, for example ``{"is_matryoshka": True}``.
        max_batch_tokens: Most tokens per forward.
        quantization: ``int8`` or ``fp8`` weights, as in ``millpond.Engine``.
        compile: Compile the model, as in ``millpond.Engine``.
        trust_remote_code: Accepted, and never needed.
    """

    named: ClassVar[str] = "model"  # the field that holds the hub id or folder
    loading: ClassVar[tuple[str, ...]] = (
        "revision",
        "device",
        "dtype",
        "max_length",
        "hf_overrides",
        "max_batch_tokens",
        "quantization",
        "compile",
        "trust_remote_code",
    )  # the fields that are read when a model is loaded

    engine: Annotated[Engine | None, BeforeValidator(_check_engine)] = Field(default=None, exclude=True, repr=False)
    revision: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    max_length: int | None = Field(default=None, gt=0, strict=True)
    hf_overrides: dict[str, Any] | None = None
    max_batch_tokens: int | None = Field(default=None, gt=0, strict=True)
    quantization: str | None = None
    compile: bool = False
    trust_remote_code: bool = False

    @classmethod
    def _translated(cls, options: dict[str, Any], own: set[str]) -> dict[str, Any]:
        """The options with those of the classes that the adapter replaces translated; ``own`` are the adapter's."""
        raise NotImplementedError

    # pydantic runs the validator that is defined last first, and prints what a failing one was given.
    @model_validator(mode="before")
    @classmethod
    def _translate(cls, options: object) -> object:
        if not isinstance(options, dict):
            return options
        options = {name: value for name, value in options.items() if name != "class_name"}  # model_dump() writes it
        return cls._translated(options, {"model", "model_name", *cls.model_fields})

    @model_validator(mode="before")
    @classmethod
    def _hide_secrets(cls, options: object) -> object:
        return hide_secrets(options) if isinstance(options, dict) else options

    @classmethod
    def _with_positional(cls, positional: tuple[Any, ...], options: dict[str, Any], *names: str) -> dict[str, Any]:
        """The options with the positional arguments under their names, of which the first is the model's.

        Raises:
            TypeError: More positional arguments than names, or one that was also passed by name.
        """
        if len(positional) > len(names):
            raise TypeError(
                f"{cls.__name__} takes {' and '.join(names)} without their names, and got {len(positional)} "
                f"positional arguments: {positional!r}; pass the others by name"
            )
        for name, value in zip(names, positional, strict=False):
            for spelling in ("model", "model_name") if name == cls.named else (name,):
                if spelling in options:
                    raise TypeError(
                        f"{cls.__name__} got {name} twice: {value!r} and {spelling}={options[spelling]!r}; pass one"
                    )
            options[name] = value
        return options

    def _check_loading(self) -> None:
        """Raise ValueError for an option that a loaded engine can no longer read."""
        fields = type(self).model_fields
        unread = [name for name in self.loading if getattr(self, name) != fields[name].default]
        if unread:
            raise ValueError(f"{unread[0]}= is read when a model is loaded, and engine= is loaded; give it to Engine")

    def _engine(self) -> Engine:
        return self.engine if self.engine is not None else get_engine(**self._configuration())

    async def _aengine(self) -> Engine:
        return self.engine if self.engine is not None else await get_engine_async(**self._configuration())

    def _configuration(self) -> dict[str, Any]:
        _tell_worker(os.getpid())
        return {"model": getattr(self, self.named)} | self._loading()

    def _loading(self) -> dict[str, Any]:
        """The options that are read when a model is loaded."""
        return {name: getattr(self, name) for name in self.loading}

    def __getstate__(self) -> dict[Any, Any]:
        # LlamaIndex's base class would only log that it drops the engine, and unpickle a different object.
        if self.engine is not None:
            raise TypeError(
                f"{type(self).__name__}(engine=...) cannot be pickled: an engine holds a loaded model; build it from "
                f"{self.named}= instead, and each process loads its own"
            )
        return super().__getstate__()

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        memo = {} if memo is None else memo
        memo[id(self.engine)] = self.engine  # deep copies share the engine
        return super().__deepcopy__(memo)
