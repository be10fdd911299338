"""LangChainSource: what every adapter of LangChain adds to the fields that it shares with those of other frameworks."""

from __future__ import annotations

from typing import Any

from langchain_core.load.serializable import Serializable, SerializedConstructor, SerializedNotImplemented
from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from millpond.compat.adapter import EngineSource, PathStr


class LangChainSource(EngineSource, Serializable):
    """The model of an adapter, and how LangChain writes it.

    Attributes:
        model: Hub id or local folder; also accepted as ``model_name``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, protected_namespaces=())

    model: PathStr | None = Field(default=None, validation_alias=AliasChoices("model", "model_name"), min_length=1)

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

    def __repr_args__(self) -> Any:
        return BaseModel.__repr_args__(self)  # LangChain's leaves out defaults

    def __hash__(self) -> int:
        # Some of the fields only, since dicts have no hash. Equal objects have equal hashes, which is enough.
        return hash((type(self), self.model, id(self.engine), self.device, self.dtype))
