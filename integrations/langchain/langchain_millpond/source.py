"""EngineSource: the pydantic fields of an adapter that name a model to load, or hold a loaded engine."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from langchain_core.load.serializable import Serializable, SerializedConstructor, SerializedNotImplemented
from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from millpond.compat.sentence_transformers_options import hide_secrets, translate_loading_options
from millpond.engine.shared import get_engine, get_engine_async

if TYPE_CHECKING:
    from millpond import Engine
else:
    # Importing the class would import torch; `_check_engine` checks the value instead.
    Engine = Any


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


PathStr = Annotated[str, BeforeValidator(_path)]


class EngineSource(Serializable):
    """The fields that every adapter has.

    The options of the classes that it replaces (``model_kwargs``, ``cache_folder``, ``backend``, ...) are translated
    into these fields, or refused with the line to write instead.

    Attributes:
        model: Hub id or local folder; also accepted as ``model_name``.
        engine: A loaded engine, or an ``AsyncEngine`` over it, instead of ``model`` and every option that is read
            at loading. Never serialized.
        revision: Branch, tag or commit of a hub id.
        device: ``auto`` or ``None`` (cuda, then mps, then cpu), a torch device, or a list of devices of one kind, which
            is kept as their names joined by commas.
        dtype: ``auto``, ``float32``, ``float16`` or ``bfloat16``.
        max_length: Most tokens per text; the checkpoint's limit by default.
        hf_overrides: Merged into config.json, for example ``{"is_matryoshka": True}``.
        quantization: As in ``millpond.Engine``.
        max_batch_tokens: Most tokens per forward.
        compile: As in ``millpond.Engine``.
        trust_remote_code: A permission that is accepted and never needed: no code of a checkpoint is run.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, protected_namespaces=())

    loading: ClassVar[tuple[str, ...]] = (
        "revision",
        "device",
        "dtype",
        "max_length",
        "hf_overrides",
        "quantization",
        "max_batch_tokens",
        "compile",
        "trust_remote_code",
    )  # the fields that are read when a model is loaded

    model: PathStr | None = Field(default=None, validation_alias=AliasChoices("model", "model_name"), min_length=1)
    engine: Annotated[Engine | None, BeforeValidator(_check_engine)] = Field(default=None, exclude=True, repr=False)
    revision: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    max_length: int | None = Field(default=None, gt=0, strict=True)
    hf_overrides: dict[str, Any] | None = None
    quantization: str | None = None
    max_batch_tokens: int | None = Field(default=None, gt=0, strict=True)
    compile: bool = False
    trust_remote_code: bool = False

    # pydantic calls the validator that is defined last first, and prints the input of one that fails.
    @model_validator(mode="before")
    @classmethod
    def _translate_options(cls, options: Any) -> Any:
        return cls._translated(options) if isinstance(options, dict) else options

    @model_validator(mode="before")
    @classmethod
    def _hide_secrets(cls, options: Any) -> Any:
        return hide_secrets(options) if isinstance(options, dict) else options

    @classmethod
    def _translated(cls, options: dict[str, Any]) -> dict[str, Any]:
        """The options with those of the class that this one replaces translated."""
        return translate_loading_options(options, own=cls._own_options())

    @classmethod
    def _own_options(cls) -> frozenset[str]:
        return frozenset((*cls.model_fields, "model_name"))

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.model is None) == (self.engine is None):
            raise ValueError("pass either model= (a hub id or a folder) or engine= (a loaded millpond.Engine)")
        if self.engine is not None:
            fields = type(self).model_fields
            unread = [name for name in self.loading if getattr(self, name) != fields[name].default]
            if unread:
                raise ValueError(
                    f"{unread[0]}= is read when a model is loaded, and engine= is loaded; give it to Engine"
                )
        return self

    @property
    def model_name(self) -> str:
        """The hub id or folder; with ``engine=``, that of the engine."""
        return self.engine.spec.name if self.engine is not None else self.model or ""

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """Whether LangChain's ``dumps`` and ``loads`` keep it; an object with ``engine=`` they do not."""
        return True

    def to_json(self) -> SerializedConstructor | SerializedNotImplemented:
        """As LangChain's ``dumps`` writes it; with ``engine=``, that it cannot be loaded again."""
        return super().to_json() if self.engine is None else self.to_json_not_implemented()

    def _engine(self) -> Engine:
        return self.engine if self.engine is not None else get_engine(**self._configuration())

    async def _aengine(self) -> Engine:
        return self.engine if self.engine is not None else await get_engine_async(**self._configuration())

    def _configuration(self) -> dict[str, Any]:
        return {"model": self.model} | {name: getattr(self, name) for name in self.loading}

    def __repr_args__(self) -> Any:
        return BaseModel.__repr_args__(self)  # LangChain's leaves out defaults

    def __hash__(self) -> int:
        # Some of the fields only, since dicts have no hash. Equal objects have equal hashes, which is enough.
        return hash((type(self), self.model, id(self.engine), self.device, self.dtype))

    def __getstate__(self) -> dict[Any, Any]:
        if self.engine is not None:
            raise TypeError(
                f"{type(self).__name__}(engine=...) cannot be pickled: an engine holds a loaded model; build it from "
                "model= instead, and each process loads its own"
            )
        return super().__getstate__()

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        memo = {} if memo is None else memo
        memo[id(self.engine)] = self.engine  # deep copies share the engine
        return super().__deepcopy__(memo)
