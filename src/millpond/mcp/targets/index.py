"""IndexTarget: a late-interaction index in a folder."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millpond.ingest.sinks.search import Hit
from millpond.late_interaction.memory.index import MemoryIndex
from millpond.late_interaction.plaid.index import PlaidIndex
from millpond.late_interaction.plaid.storage.folder import IndexFolder
from millpond.late_interaction.plaid.storage.manifest import CURRENT
from millpond.mcp.targets.target import Found, Target, TargetOptions, engine_of
from millpond.search.stages import SELF, StagePlan, candidates_of, rank_again
from millpond.search.stored_model import describe_index, describe_named, placement

if TYPE_CHECKING:
    from millpond.engine.engine import Engine
    from millpond.late_interaction import LateInteractionIndex, TokenMatch


class IndexTarget(Target):
    """A :class:`PlaidIndex`, or a :class:`MemoryIndex` that was saved, which is read again when another is saved."""

    def __init__(self, name: str, path: Path, options: TargetOptions) -> None:
        super().__init__(name)
        self.path = path
        self._options = options
        self._engine: Engine | None = None
        self._reranker: Engine | None = None
        self._open: LateInteractionIndex | None = None
        self._seen: tuple[int, int] | None = None  # of a saved index
        self._changing = threading.Lock()

    @property
    def description(self) -> str:
        """What it is, for the agent."""
        return f"the documents of the index {self.path}"

    @staticmethod
    def is_at(path: Path) -> bool:
        """Whether a folder has an index."""
        return (path / CURRENT).is_file()

    def load(self) -> None:
        """Load the model of the index, and open it."""
        folder = IndexFolder(self.path)
        saved = folder.manifest(folder.current()).saved
        with MemoryIndex.open(self.path, None) if saved else PlaidIndex.open(self.path) as stored:
            identity = stored.model
        plan, settings = self._options.plan, self._options.settings
        found = describe_index(identity, plan.model, settings, path=self.path)
        self._engine = engine_of(found.spec.name, found.settings)
        if plan.rerank not in (None, SELF):
            second = describe_named(str(plan.rerank), placement(settings))
            self._reranker = engine_of(second.spec.name, second.settings)
        self._open = None if saved else PlaidIndex.open(self.path, self._engine)
        self._index()

    def engine(self) -> Engine:
        """The engine."""
        assert self._engine is not None
        return self._engine

    def search(self, query: str, k: int, filter: Mapping[str, Any] | None) -> list[Found]:
        """The documents whose token vectors match those of the query best."""
        plan = StagePlan(**{**vars(self._options.plan), "k": k})
        wanted = k if self._reranker is None else candidates_of(plan)
        found = self._index().search([query], k=wanted, filter=dict(filter or {}) or None)[0]
        hits = [Hit(id=each.id, score=each.score, text=each.text, metadata=each.metadata) for each in found]
        return [
            Found(id=each.hit.id, text=each.hit.text, metadata=each.hit.metadata, score=each.score)
            for each in rank_again(self._reranker, query, hits, plan)[:k]
        ]

    def get(self, id: str) -> Found | None:
        """A document."""
        stored = self._index().get(id)
        return None if stored is None else Found(id=stored.id, text=stored.text, metadata=stored.metadata)

    def explain(self, query: str, found: Found) -> list[TokenMatch]:
        """By the rows as the index cuts and pools them."""
        return self._index().explain(query, found.id)

    def add(self, ids: Sequence[str], texts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> int:
        """Store documents."""
        with self._changing:
            index = self._index()
            report = index.add(ids, texts, metadata)
            self._save(index)
        return report.added + report.replaced

    def delete(self, ids: Sequence[str]) -> None:
        """Delete documents."""
        with self._changing:
            index = self._index()
            index.delete(ids)
            self._save(index)

    def facts(self) -> dict[str, Any]:
        """The number of documents."""
        return {"documents": len(self._index())}

    def close(self) -> None:
        """Close the index."""
        if self._open is not None:
            self._open.close()

    def _index(self) -> LateInteractionIndex:
        """The index as it is now: one on disk sees changes by itself, a saved one is read again."""
        opened = self._open
        if isinstance(opened, PlaidIndex):
            return opened
        status = (self.path / CURRENT).stat()
        seen = (status.st_mtime_ns, status.st_ino)
        if opened is None or seen != self._seen:
            opened, self._seen = MemoryIndex.open(self.path, self._engine), seen
            self._open = opened
        return opened

    def _save(self, index: LateInteractionIndex) -> None:
        if isinstance(index, MemoryIndex):
            index.save(self.path)
            status = (self.path / CURRENT).stat()
            self._seen = (status.st_mtime_ns, status.st_ino)
