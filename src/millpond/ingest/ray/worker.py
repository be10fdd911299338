"""Worker: a process with an engine, which embeds batches, and writes them if the database is a server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, cast
from uuid import uuid4

from millpond.engine.engine import Engine
from millpond.engine.schedule.truncation import TruncatedTexts
from millpond.errors import FingerprintMismatchError
from millpond.ingest.pipeline.delivery import RetryingWriter, RetryPolicy
from millpond.ingest.pipeline.embedder import EmbeddedRecords, PlannedRecord, RecordEmbedder
from millpond.ingest.pipeline.ingest import prepare_sink
from millpond.ingest.pipeline.journal import CollectionEntries, JournalEntry
from millpond.ingest.pipeline.ledger import RunLedger
from millpond.ingest.pipeline.writer import BatchWriter
from millpond.ingest.sinks.protocol import Sink
from millpond.ingest.telemetry.trace import RunTrace
from millpond.tasks import Task
from millpond.values.config import EngineConfig
from millpond.values.params import PoolingParams


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """What a worker needs to know; it loads the checkpoint where it runs, and receives only its name."""

    engine: EngineConfig
    sparse: EngineConfig | None  # the engine of the sparse vectors, if it is another one
    cache: str | None
    fingerprint: str  # that of the driver's model
    widths: tuple[int, ...]
    open_sink: Callable[[], Sink] | None  # opens the sink; `None` if the driver writes
    form: Mapping[str, Any]  # how records are cut, as `prepare` takes it
    policy: RetryPolicy


class Reply(NamedTuple):
    """The result of a call to a worker, and what the cache of this process could not store since it started."""

    value: Any
    worker: str
    unwritten: int
    write_error: str | None


@dataclass(kw_only=True, eq=False)
class WrittenBatch:
    """What came of a batch that a worker embedded and wrote."""

    entries: list[JournalEntry] = field(default_factory=list)  # records that the database has acknowledged
    counts: dict[str, int] = field(default_factory=dict)  # by their names in `IngestReport`, and `finished`
    failures: list[tuple[str, str]] = field(default_factory=list)  # keys of records that are left out, and why
    truncated_ids: list[str] = field(default_factory=list)  # of the records of which a text was cut
    retries: list[tuple[str, float]] = field(default_factory=list)  # why requests were sent again, and after how long
    stages: list[tuple[str, float, int]] = field(default_factory=list)  # name, seconds and rows of each timed call


class Worker:
    """An engine in a process of its own, loaded by the first call. One call may embed while another writes."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._name = uuid4().hex
        self._stop = threading.Event()
        self._loading, self._writing = threading.Lock(), threading.Lock()
        self._sink: Sink | None = None
        self._sparse: Engine | None = None  # of a hybrid sink
        self._engines: tuple[Engine, Engine | None] | None = None  # of the vectors and of the sparse vectors

    def load(self) -> Reply:
        """Load the model."""
        self._load()
        return self._reply(None)

    def embed(self, sparse: bool, task: Task, texts: Sequence[str], params: PoolingParams) -> Reply:
        """The output of one engine call."""
        dense, other = self._load()
        with TruncatedTexts.quiet():  # the driver reports the texts of all calls
            return self._reply(((other if sparse else None) or dense).submit(task, texts, params).result())

    def write(self, batch: Sequence[PlannedRecord]) -> Reply:
        """Embed a batch, write it, and return once the database has acknowledged it."""
        engine, _ = self._load()
        with self._writing:
            sink, sparse = self._opened()
        log = _BatchLog()
        context = self._settings.form.get("context")
        embedder = RecordEmbedder(engine, self._settings.widths, sparse_engine=sparse, context=context, trace=log.trace)
        results = list(embedder.complete(embedder.submit(batch)))
        with self._writing:
            requests = RetryingWriter(self._settings.policy, self._stop, log.retrying)
            # The journal is the driver's.
            writer = BatchWriter(sink, requests, log, cast("CollectionEntries", _BatchEntries(log.written.entries)))
            try:
                for result in results:
                    if not isinstance(result, EmbeddedRecords):
                        log.fail(result.record, result.reason)
                        continue
                    log.written.truncated_ids += result.truncated_ids
                    hits = sum(result.cached)
                    log.counts.add(cached=hits, embedded=len(result.records) - hits)
                    writer.put(result)
                writer.finish()
            except BaseException:
                writer.abandon()
                raise
        log.written.counts = log.counts.now()
        return self._reply(log.written)

    def stop(self) -> None:
        """Wait no longer for a database that does not answer."""
        self._stop.set()

    def close(self) -> None:
        """Close the sink, the engine and its cache."""
        self._stop.set()
        with self._writing:
            if self._sink is not None:
                self._sink.close()
        for engine in self._engines or ():
            if engine is not None:
                engine.close()

    def _load(self) -> tuple[Engine, Engine | None]:
        with self._loading:
            if self._engines is None:
                settings = self._settings
                engine = load_engine(settings.engine, settings.cache, settings.fingerprint)
                self._engines = engine, None if settings.sparse is None else load_engine(settings.sparse, None, None)
            return self._engines

    def _opened(self) -> tuple[Sink, Engine | None]:
        """The sink, whose collection the driver has created, and the engine of its sparse vectors."""
        if self._sink is None:
            assert self._settings.open_sink is not None
            sink = self._settings.open_sink()
            try:
                self._sparse = prepare_sink(sink, *self._load(), form=self._settings.form)
            except BaseException:
                sink.close()
                raise
            self._sink = sink
        return self._sink, self._sparse

    def _reply(self, value: Any) -> Reply:
        cache = self._load()[0].cache
        error = getattr(cache, "write_error", None)
        return Reply(value, self._name, getattr(cache, "unwritten", 0), None if error is None else str(error))


def load_engine(config: EngineConfig, cache: str | None, fingerprint: str | None) -> Engine:
    """The engine of a configuration; raises FingerprintMismatchError if its model has another fingerprint."""
    options = {each.name: getattr(config, each.name) for each in fields(config)}
    engine = Engine(options.pop("model"), cache=cache, **options)
    spec = engine.spec
    if fingerprint not in (None, spec.fingerprint):
        engine.close()
        raise FingerprintMismatchError(
            f"a worker's checkpoint of {spec.name} (fingerprint {spec.fingerprint[:12]}) is not the driver's "
            f"({str(fingerprint)[:12]}); name a commit by revision, or copy the same folder to every machine"
        )
    return engine


class _BatchTrace(RunTrace):
    """Keeps the times of a batch for the driver's trace."""

    def __init__(self, stages: list[tuple[str, float, int]]) -> None:
        super().__init__(vectors=0)
        self._noted = stages

    def note_stage(self, name: str, seconds: float, rows: int = 0) -> None:
        self._noted.append((name, seconds, rows))


class _BatchEntries:
    """Keeps what is to be entered in the driver's journal."""

    def __init__(self, added: list[JournalEntry]) -> None:
        self.add = added.extend

    def invalidate(self, keys: Iterable[str]) -> None:
        """The driver has done it, before it sent the batch."""


class _BatchLog(RunLedger):
    """Keeps what happens to a batch, for the driver's ledger."""

    def __init__(self) -> None:
        self.written = WrittenBatch()
        super().__init__(_BatchTrace(self.written.stages))

    def fail(self, planned: PlannedRecord, reason: str) -> None:
        self.written.failures.append((planned.key, reason))

    def retrying(self, error: BaseException, seconds: float) -> None:
        self.written.retries.append((str(error), seconds))
