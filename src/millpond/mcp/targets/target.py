"""Target: what an agent searches, whatever keeps it."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from millpond.errors import InvalidRequestError
from millpond.search.stages import StagePlan

if TYPE_CHECKING:
    from millpond.engine.engine import Engine
    from millpond.late_interaction import TokenMatch


@dataclass(frozen=True, kw_only=True)
class Found:
    """A text of a target."""

    id: str
    text: str
    metadata: Mapping[str, Any]
    score: float = 0.0


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """How targets are opened."""

    plan: StagePlan
    settings: Mapping[str, Any] = field(default_factory=dict)  # arguments of the engines
    writable: bool = False
    wait: float = 45.0  # seconds that a search waits for an update of a folder


class Target(ABC):
    """What an agent searches. Methods may be called from several threads, after :meth:`load`."""

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    @abstractmethod
    def description(self) -> str:
        """What it is, for the agent."""

    @abstractmethod
    def load(self) -> None:
        """Load its models. Called once, before the first search, in a thread of its own."""

    @abstractmethod
    def search(self, query: str, k: int, filter: Mapping[str, Any] | None) -> list[Found]:
        """The best texts, best first."""

    @abstractmethod
    def get(self, id: str) -> Found | None:
        """A text by its id."""

    @abstractmethod
    def engine(self) -> Engine:
        """The engine of its texts."""

    def explain(self, query: str, found: Found) -> list[TokenMatch]:
        """Where each token of a query finds its best match in a text."""
        engine = self.engine()
        if "token_embed" not in engine.tasks:
            raise InvalidRequestError(f"{engine.spec.name} has no token vectors, so its matches cannot be explained")
        from millpond.late_interaction import MemoryIndex

        with MemoryIndex(engine, codec="float32") as index:
            index.add(["text"], [found.text])
            return index.explain(query, "text")

    def add(self, ids: Sequence[str], texts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> int:
        """Store texts; returns how many are stored."""
        raise InvalidRequestError(self.read_only)

    def delete(self, ids: Sequence[str]) -> None:
        """Delete texts by their ids."""
        raise InvalidRequestError(self.read_only)

    @property
    def read_only(self) -> str:
        """Why it cannot be changed here."""
        return f"{self.name!r} cannot be changed by this tool"

    def facts(self) -> dict[str, Any]:
        """What a search tells of it beside its hits."""
        return {}

    def close(self) -> None:
        """Close files and connections."""
        return


def engine_of(name: str, settings: Mapping[str, Any]) -> Engine:
    """The engine of a model and its settings; targets share it."""
    from millpond.engine.shared import get_engine

    return get_engine(os.fspath(name), **settings)
