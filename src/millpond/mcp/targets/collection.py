"""CollectionTarget: a collection of a database, searched in the stages of ``millpond search``."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from millpond.errors import FingerprintMismatchError, InvalidRequestError
from millpond.ingest.record import Record, point_id
from millpond.ingest.sinks.parents import joined
from millpond.ingest.sinks.protocol import StoredRow
from millpond.mcp.targets.target import Found, Target, TargetOptions, engine_of
from millpond.search.stages import SearchStages

if TYPE_CHECKING:
    from millpond.engine.engine import Engine
    from millpond.ingest.sinks.collection import CollectionSink


class CollectionTarget(Target):
    """The collection that a URL names."""

    def __init__(self, name: str, url: str, options: TargetOptions) -> None:
        super().__init__(name)
        self._url = url
        self._options = options
        self._stages: SearchStages | None = None
        self._busy = threading.Lock()  # a sink is one connection

    @property
    def description(self) -> str:
        """What it is, for the agent; a URL may hold a password."""
        return f"the records of the collection {self._url.rpartition('#')[2]!r} ({self._url.partition('+')[0]})"

    def load(self) -> None:
        """Open the collection and load the models of its stages."""
        from millpond.ingest.sinks.collection import CollectionSink
        from millpond.ingest.sinks.database import open_sink

        sink = open_sink(self._url, must_exist=True)
        if not isinstance(sink, CollectionSink):
            raise InvalidRequestError(f"{self._url.partition(':')[0]!r} only writes; it cannot be searched")
        if self._options.writable and sink.open().sparse is not None:  # so that what is added has sparse vectors, too
            sink.close()
            sink = cast("CollectionSink[Any]", open_sink(self._url, must_exist=True, hybrid=True))
        self._stages = SearchStages.open(
            sink,
            plan=self._options.plan,
            settings=self._options.settings,
            load=lambda model: engine_of(model.spec.name, model.settings),
        )

    def engine(self) -> Engine:
        """The engine of the vectors."""
        return self._opened.engine

    def search(self, query: str, k: int, filter: Mapping[str, Any] | None) -> list[Found]:
        """All stages."""
        stages = self._opened
        with self._busy:
            asked = replace(stages, plan=replace(stages.plan, k=k), filter=dict(filter) if filter else None)
            try:
                answer = asked.answer(Record("1", query))
            except FingerprintMismatchError:  # it was migrated to another model, which is opened now
                stages.sink.close()
                self.load()
                asked = replace(self._opened, plan=asked.plan, filter=asked.filter)
                answer = asked.answer(Record("1", query))
        return [
            Found(id=each.hit.id, text=each.hit.text, metadata=each.hit.metadata, score=each.score)
            for each in answer.hits
        ]

    def get(self, id: str) -> Found | None:
        """A record, put together from its chunks."""
        with self._busy:
            rows = self._rows(id)
        if not rows:
            return None
        text = rows[0].text or ""
        if len(rows) > 1:
            text = joined(((row.metadata or {}).get("chunk_start", 0), row.text or "") for row in rows).lstrip()
        chunk_keys = ("chunk", "chunk_start", "chunk_end") if len(rows) > 1 else ()
        first = rows[0].metadata or {}
        return Found(id=id, text=text, metadata={key: first[key] for key in first if key not in chunk_keys})

    def add(self, ids: Sequence[str], texts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> int:
        """Embed and write records, as ``ingest`` does; one that a database refuses is an error."""
        from millpond.ingest.chunking import Chunking
        from millpond.ingest.pipeline.ingest import ingest

        stages = self._opened
        if stages.sink.open().context is not None:  # of how many tokens they are, the collection does not say
            raise InvalidRequestError(
                f"collection {stages.sink.collection!r} holds late chunks; add documents by millpond ingest"
            )
        records = [Record(id, text, own) for id, text, own in zip(ids, texts, metadata, strict=True)]
        with self._busy:
            report = ingest(
                records,
                engine=stages.engine,
                sink=stages.sink,
                sparse_engine=stages.sparse_engine,
                chunking=Chunking() if stages.sink.open().chunked else None,
                show_progress=False,
            )
        if report.failed:
            raise InvalidRequestError(
                f"{report.failed} of {len(records)} records were refused; the server's log says why"
            )
        return len(records)

    def delete(self, ids: Sequence[str]) -> None:
        """Delete records with their chunks."""
        with self._busy:
            self._opened.sink.delete(list(ids))

    def facts(self) -> dict[str, Any]:
        """The number of rows."""
        with self._busy:
            return {"rows": self._opened.sink.count()}

    def close(self) -> None:
        """Close the connection."""
        if self._stages is not None:
            self._stages.sink.close()

    @property
    def _opened(self) -> SearchStages:
        assert self._stages is not None
        return self._stages

    def _rows(self, id: str) -> list[StoredRow]:
        sink: CollectionSink[Any] = self._opened.sink
        row_ids = [point_id(id), *reversed(sink.chunks_from({id: 1}))]
        found = sink.read_rows(row_ids)
        if not found and sink.open().fields != "plain":  # a row that a framework wrote, whose id is the database's
            row_ids, found = [id], sink.read_rows([id])
        return [found[row_id] for row_id in row_ids if row_id in found]
