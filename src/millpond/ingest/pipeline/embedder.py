"""RecordEmbedder: records as rows to write, with those left out that cannot be embedded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from itertools import accumulate, compress, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from millpond.engine.schedule.truncation import TruncatedTexts
from millpond.errors import (
    CacheError,
    DeviceLostError,
    EngineClosedError,
    EngineOverloadedError,
    InvalidRequestError,
    MillpondError,
    ModelLoadError,
)
from millpond.ingest.chunking import Context, text_span
from millpond.ingest.record import Record, point_ids
from millpond.ingest.sinks.batch import FloatArray, WriteBatch, storable
from millpond.ingest.telemetry.trace import RunTrace
from millpond.tasks import Task
from millpond.values.inputs import Item, SpannedText
from millpond.values.outputs import EmbeddingOutput, SparseEmbeddingOutput, TokenEmbeddingOutput
from millpond.values.params import PoolingParams
from millpond.vectors import matryoshka

if TYPE_CHECKING:
    from millpond.engine.engine import Engine

# Engine errors that do not depend on the texts.
_FATAL = (CacheError, EngineClosedError, InvalidRequestError, ModelLoadError)
# If more records in a row than this cannot be embedded, the engine is broken and not the records.
_MAX_FAILING_RECORDS = 16


def record_key(record: Record) -> str:
    """A record's id; of a chunk of a longer text with its number, so that ``point_id`` of both is the same."""
    return record.id if record.chunk == 0 else f"{record.id}\0{record.chunk}"


class PlannedRecord(NamedTuple):
    """A record on its way through a run."""

    record: Record
    chunks: Sequence[Record]  # what is embedded and stored of it: itself, or pieces of its text
    digest: bytes = b""  # its `digest`, if the run has a journal
    stored_chunks: int | None = None  # how many rows it had before; `None` if that is not known
    id_in_flight: bool = False  # an earlier record with this id may have been written in this run

    @property
    def key(self) -> str:
        """What tells the record from others: its id, and its number if it is itself a chunk of a longer text."""
        record = self[0]
        return record.id if record.chunk == 0 else record_key(record)


@dataclass(frozen=True, kw_only=True, eq=False)
class EmbeddedRecords:
    """Consecutive records, embedded."""

    records: Sequence[PlannedRecord]
    batch: WriteBatch  # their rows: of each record one for every chunk, in order
    ends: Sequence[int]  # `[n]`, the number of rows up to the end of each record
    cached: Sequence[bool]  # `[n]`, whether all vectors of the record came from the engine's cache
    truncated_ids: Sequence[str]  # ids of the records of which a text was cut to the engine's `max_length`


class UnembeddedRecord(NamedTuple):
    """A record that has no vector."""

    record: PlannedRecord
    reason: str


@dataclass(frozen=True, kw_only=True, eq=False)
class EmbeddingCall:
    """A call that the engine works on, for some records."""

    records: Sequence[PlannedRecord]
    dense: Future[Any]  # an EmbeddingOutput, or what a worker of a cluster has written
    sparse: Future[SparseEmbeddingOutput] | None  # the call for the sparse vectors, of a hybrid sink

    def wait(self, seconds: float) -> bool:
        """Wait so long for the results; returns whether they are there."""
        calls: list[Future[Any]] = [self.dense] if self.sparse is None else [self.dense, self.sparse]
        return not wait(calls, seconds).not_done

    def cancel(self) -> None:
        """Nothing waits for the call any more; what was computed for it is in the engine's cache, if it has one."""
        self.dense.cancel()
        if self.sparse is not None:
            self.sparse.cancel()


class RecordEmbedder:
    """Embeds records at full width, with the role ``document``, and cuts the vectors to the widths of a sink."""

    def __init__(
        self,
        engine: Engine,
        widths: Sequence[int],
        *,
        sparse_engine: Engine | None = None,
        context: Context | None = None,
        trace: RunTrace | None = None,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        self._engine = engine
        self._widths = widths
        self._sparse_engine = sparse_engine
        self._context = context
        self._trace = RunTrace(vectors=0) if trace is None else trace
        self._check = check
        self._failing_records = 0  # since the engine last embedded a record

    def submit(self, records: Sequence[PlannedRecord]) -> EmbeddingCall:
        """Begin to embed records; waits while the engine's queue is full."""
        texts = [chunk.text for record in records for chunk in record.chunks]
        # Full width, not normalized: every other width is cut from it.
        params = PoolingParams(role="document", dimensions=self._engine.spec.dimensions, normalize=False)
        if self._context is None:
            dense = self._submit(self._engine, "embed", texts, params)
        else:  # each document once; what its chunks become depends on all of it, so that no cache has them
            params = replace(params, long_texts="windows")
            dense = self._submit(self._engine, "token_embed", [_spanned(record) for record in records], params)
        sparse = None
        if self._sparse_engine is not None:
            try:
                sparse = self._submit(self._sparse_engine, "sparse_embed", texts, PoolingParams(role="document"))
            except BaseException:
                dense.cancel()
                raise
        return EmbeddingCall(records=records, dense=dense, sparse=sparse)

    def complete(self, call: EmbeddingCall) -> Iterator[EmbeddedRecords | UnembeddedRecord]:
        """Wait for a call, and go through its records; those of a failed one are embedded again by halves."""
        try:
            output = _rows(call.dense.result())
            sparse = None if call.sparse is None else call.sparse.result()
        except _FATAL:
            raise
        except (MillpondError, RuntimeError) as error:  # caused by one text, or by the forward of its batch
            call.cancel()
            yield from self._bisect_failures(call.records, error)
            return
        except BaseException:
            call.cancel()  # interrupted: nothing waits for the call any more
            raise
        if not output.cached.all():
            self._failing_records = 0
        with self._trace.stage("cut", len(call.records)):
            results = self._cut(call.records, output, sparse)
        yield from results

    def _submit(self, engine: Engine, task: Task, texts: Sequence[Item], params: PoolingParams) -> Future[Any]:
        while True:
            try:
                with TruncatedTexts.quiet():  # the run reports the texts of all its calls
                    return engine.submit(task, texts, params)
            except EngineOverloadedError as error:  # other callers fill the queue; retry when they are served
                self._check()
                time.sleep(error.retry_after)

    def _cut(
        self, records: Sequence[PlannedRecord], output: EmbeddingOutput, sparse: SparseEmbeddingOutput | None
    ) -> list[EmbeddedRecords | UnembeddedRecord]:
        """The records with the vectors of every width, but for those of which one cannot be stored."""
        chunks = [chunk for record in records for chunk in record.chunks]
        vectors = {width: matryoshka.cut(output.embeddings, width, normalize=True) for width in self._widths}
        weights = None if sparse is None else sparse.embeddings
        cached, truncated = output.cached, output.truncated
        valid = np.logical_and.reduce([storable(rows) for rows in vectors.values()])  # [chunks]
        self._trace.note_texts([len(chunk.text) for chunk in chunks])
        self._trace.note_vectors(output.embeddings if valid.all() else output.embeddings[valid])
        failures: list[EmbeddedRecords | UnembeddedRecord] = []
        if not valid.all():
            owner = np.repeat(np.arange(len(records)), [len(record.chunks) for record in records])  # [chunks]
            bad = set(owner[~valid].tolist())
            reason = "its vector is not finite, or all zero"
            failures = [UnembeddedRecord(record=records[index], reason=reason) for index in sorted(bad)]
            records = [record for index, record in enumerate(records) if index not in bad]
            kept = ~np.isin(owner, list(bad))
            chunks = list(compress(chunks, kept))
            vectors = {width: rows[kept] for width, rows in vectors.items()}
            weights = None if weights is None else list(compress(weights, kept))
            cached, truncated = cached[kept], truncated[kept]
        return [*failures, _joined(records, chunks, vectors, weights, cached, truncated)] if records else failures

    def _bisect_failures(
        self, records: Sequence[PlannedRecord], error: Exception
    ) -> Iterable[EmbeddedRecords | UnembeddedRecord]:
        """Embed a failed call's records again by halves: leave out those that fail alone, and return the others."""
        if len(records) > 1:
            middle = len(records) // 2
            for half in (records[:middle], records[middle:]):
                yield from self.complete(self.submit(half))
            return
        if isinstance(error, DeviceLostError):  # not the record's fault: another device embeds it, or the run stops
            yield from self.complete(self.submit(records))
            return
        self._failing_records += 1
        if self._failing_records > _MAX_FAILING_RECORDS:
            raise error
        yield UnembeddedRecord(record=records[0], reason=str(error) or repr(error))


def _spanned(record: PlannedRecord) -> SpannedText:
    """A record's text, with the characters of each of its chunks."""
    return SpannedText(record.record.text, tuple(text_span(record.record, chunk) for chunk in record.chunks))


def _rows(output: EmbeddingOutput | TokenEmbeddingOutput) -> EmbeddingOutput:
    """The row of each chunk, of late ones as of others."""
    if isinstance(output, EmbeddingOutput):
        return output
    none = np.zeros(len(output.embeddings.flat), dtype=np.bool_)
    return EmbeddingOutput(embeddings=output.embeddings.flat, cached=none, truncated=none, usage=output.usage)


def _joined(
    records: Sequence[PlannedRecord],
    chunks: Sequence[Record],
    vectors: Mapping[int, FloatArray],
    weights: Sequence[Mapping[int, float]] | None,
    cached: npt.NDArray[np.bool_],
    truncated: npt.NDArray[np.bool_],
) -> EmbeddedRecords:
    """The rows of ``chunks``, which are those of ``records`` in order."""
    ends = list(accumulate(len(record.chunks) for record in records))
    whole = len(chunks) == len(records)  # one chunk each, as in nearly every run
    cut_ids = [chunks[index].id for index in np.flatnonzero(truncated).tolist()]
    return EmbeddedRecords(
        records=records,
        batch=WriteBatch(records=chunks, ids=point_ids(chunks), vectors=vectors, sparse=weights),
        ends=ends,
        cached=cached.tolist() if whole else [bool(cached[start:end].all()) for start, end in pairwise([0, *ends])],
        truncated_ids=cut_ids if whole else list(dict.fromkeys(cut_ids)),
    )
