"""Worker: a process with an engine, which embeds batches, and writes them if the database is a server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from millpond.config import EngineConfig
from millpond.engine.engine import Engine
from millpond.engine.schedule.truncation import TruncatedTexts
from millpond.errors import FingerprintMismatchError
from millpond.ingest.pipeline.delivery import Delivery, RetryPolicy
from millpond.ingest.pipeline.embedder import EmbeddedRecords, PlannedRecord, RecordEmbedder
from millpond.ingest.pipeline.journal import Mark
from millpond.ingest.pipeline.planner import RecordBatch
from millpond.ingest.pipeline.writer import BatchWriter, BlankRecords
from millpond.ingest.sinks.batch import FloatArray
from millpond.ingest.sinks.protocol import Sink
from millpond.ingest.telemetry.counts import RunCounts
from millpond.ingest.telemetry.trace import RunTrace
from millpond.params import PoolingParams
from millpond.tasks import Task

# Full-width vectors of a batch that go back to the driver, for the sample of its trace.
_SAMPLED_VECTORS = 16


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """What a worker needs to know; it loads the checkpoint where it runs, and receives only its name.

    Attributes:
        engine: The engine of the vectors.
        sparse: The engine of the sparse vectors, if it is another one.
        cache: Path of the vector cache, on the worker's machine.
        fingerprint: That of the driver's model.
        widths: The widths to store, ascending.
        open_sink: Opens the sink; ``None`` if the driver writes.
        hybrid: Whether sparse vectors are stored.
        chunked: Whether records are cut into chunks.
        policy: When to ask the database again.
    """

    engine: EngineConfig
    sparse: EngineConfig | None
    cache: str | None
    fingerprint: str
    widths: tuple[int, ...]
    open_sink: Callable[[], Sink] | None
    hybrid: bool
    chunked: bool
    policy: RetryPolicy


class CacheLosses(NamedTuple):
    """What a worker's cache could not store.

    Attributes:
        unwritten: Vectors.
        error: Why.
    """

    unwritten: int
    error: str | None


class Reply(NamedTuple):
    """The result of a call to a worker.

    Attributes:
        value: The result.
        losses: Of the worker's cache since it started.
    """

    value: Any
    losses: CacheLosses


@dataclass(frozen=True, kw_only=True, eq=False)
class WrittenBatch:
    """What came of a batch that a worker embedded and wrote.

    Attributes:
        marks: Records that the database has acknowledged.
        counts: By their names in :class:`~millpond.ingest.IngestReport`, and ``finished``.
        failures: Keys of the records that are left out, and why.
        truncated_ids: Ids of the records of which a text was cut.
        retries: Why requests were sent again, and the seconds waited.
        stages: Name, seconds and rows of each timed call.
        vectors: ``[m, d]``, some of the vectors, of full width.
    """

    marks: Sequence[Mark]
    counts: dict[str, int]
    failures: Sequence[tuple[str, str]]
    truncated_ids: Sequence[str]
    retries: Sequence[tuple[str, float]]
    stages: Sequence[tuple[str, float, int]]
    vectors: FloatArray | None


class Worker:
    """An engine in a process of its own. Calls may overlap: one is embedded while another is written.

    Args:
        settings: The engine, the cache and the sink.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._stop = threading.Event()
        self._writing = threading.Lock()
        self._sink: Sink | None = None
        self._engine: Engine
        self._sparse: Engine

    def load(self) -> Reply:
        """Load the model.

        Raises:
            ModelLoadError: The checkpoint cannot be found or built on this machine.
            FingerprintMismatchError: This machine has another version of it than the driver's.
            CacheError: The cache cannot be opened.
        """
        settings = self._settings
        self._engine = load_engine(settings.engine, settings.cache, settings.fingerprint)
        self._sparse = self._engine if settings.sparse is None else load_engine(settings.sparse, None, None)
        return self._reply(None)

    def embed(self, sparse: bool, task: Task, texts: Sequence[str], params: PoolingParams) -> Reply:
        """The output of one engine call."""
        engine = self._sparse if sparse else self._engine
        with TruncatedTexts.quiet():  # the driver reports the texts of all calls
            return self._reply(engine.submit(task, texts, params).result())

    def write(self, batch: RecordBatch) -> Reply:
        """Embed a batch, write it, and return once the database has acknowledged it."""
        log = _BatchLog()
        counts = RunCounts(log.note_counts)
        embedder = RecordEmbedder(
            self._engine,
            self._settings.widths,
            sparse_engine=self._sparse if self._settings.hybrid else None,
            trace=log,
        )
        results = list(embedder.complete(embedder.submit(batch.records))) if batch.records else []
        truncated: list[str] = []
        with self._writing:
            writer = BatchWriter(
                self._prepared(),
                counts,
                delivery=Delivery(self._settings.policy, self._stop, log.note_wait),
                marks=log,  # type: ignore[arg-type]  # the journal is the driver's
                fail=log.fail,
                trace=log,
            )
            try:
                if batch.blanks:
                    writer.put(BlankRecords(records=batch.blanks))
                for result in results:
                    if not isinstance(result, EmbeddedRecords):
                        log.fail(result.record, result.reason)
                        continue
                    truncated += result.truncated_ids
                    hits = sum(result.cached)
                    counts.add(cached=hits, embedded=len(result.records) - hits)
                    writer.put(result)
                writer.finish()
            except BaseException:
                writer.abandon()
                raise
        return self._reply(
            WrittenBatch(
                marks=log.marks,
                counts=log.counts,
                failures=log.failed,
                truncated_ids=truncated,
                retries=log.retried,
                stages=log.timed,
                vectors=log.some_vectors,
            )
        )

    def stop(self) -> None:
        """Wait no longer for a database that does not answer."""
        self._stop.set()

    def close(self) -> None:
        """Close the sink, the engine and its cache."""
        self._stop.set()
        with self._writing:
            if self._sink is not None:
                self._sink.close()
        self._engine.close()
        if self._sparse is not self._engine:
            self._sparse.close()

    def _prepared(self) -> Sink:
        """The sink; the driver has created the collection before the first batch."""
        if self._sink is None:
            assert self._settings.open_sink is not None
            sink = self._settings.open_sink()
            options: dict[str, Any] = {"chunked": True} if self._settings.chunked else {}
            if self._settings.hybrid:
                options["sparse"] = self._sparse.spec
            try:
                sink.prepare(self._engine.spec, **options)
            except BaseException:
                sink.close()
                raise
            self._sink = sink
        return self._sink

    def _reply(self, value: Any) -> Reply:
        cache = self._engine.cache
        error = getattr(cache, "write_error", None)
        losses = CacheLosses(getattr(cache, "unwritten", 0), None if error is None else str(error))
        return Reply(value, losses)


def load_engine(config: EngineConfig, cache: str | None, fingerprint: str | None) -> Engine:
    """The engine of a configuration.

    Raises:
        FingerprintMismatchError: Its model is not the one with this fingerprint.
    """
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


@dataclass(eq=False)
class _BatchLog(RunTrace):
    """Keeps what happens to a batch, for the driver: in the place of a trace, and of the journal's marks."""

    marks: list[Mark] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)
    retried: list[tuple[str, float]] = field(default_factory=list)
    timed: list[tuple[str, float, int]] = field(default_factory=list)
    some_vectors: FloatArray | None = None
    counts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__(vectors=0)

    def note_counts(self, counts: Mapping[str, int]) -> None:
        self.counts.update(counts)

    def unsettle(self, keys: Iterable[str]) -> None:
        """The driver has done it, before it sent the batch."""

    def remove(self, keys: Iterable[str]) -> None:
        """The driver does it, when the batch is acknowledged."""

    def mark(self, marks: Iterable[Mark]) -> None:
        self.marks.extend(marks)

    def fail(self, planned: PlannedRecord, reason: str) -> None:
        self.failed.append((planned.key, reason))

    def note_wait(self, error: BaseException, seconds: float) -> None:
        self.retried.append((str(error), seconds))

    def note_stage(self, name: str, seconds: float, rows: int = 0) -> None:
        self.timed.append((name, seconds, rows))

    def note_vectors(self, rows: FloatArray) -> None:
        if len(rows):
            step = -(-len(rows) // _SAMPLED_VECTORS)
            self.some_vectors = rows[::step].copy()
