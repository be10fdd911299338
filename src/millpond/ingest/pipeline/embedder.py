"""RecordEmbedder: records as rows to write, with those left out that cannot be embedded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

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
from millpond.ingest.record import Record, point_id
from millpond.ingest.sinks.batch import WriteBatch, storable
from millpond.ingest.telemetry.trace import RunTrace
from millpond.outputs import EmbeddingOutput, SparseEmbeddingOutput
from millpond.params import PoolingParams
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
    """A record on its way through a run.

    Attributes:
        record: The record.
        chunks: What is embedded and stored of it, at least one: the record itself, or pieces of its text.
        digest: Its :func:`~millpond.ingest.pipeline.journal.digest`, if the run has a journal.
        stored_chunks: How many rows it had before; ``None`` if that is not known.
        again: Whether an earlier record with this id may have been marked since the source was read so far.
    """

    record: Record
    chunks: Sequence[Record]
    digest: bytes = b""
    stored_chunks: int | None = None
    again: bool = False

    @property
    def key(self) -> str:
        """What tells the record from others: its id, and its number if it is itself a chunk of a longer text."""
        return record_key(self.record)


@dataclass(frozen=True, kw_only=True, eq=False)
class EmbeddedRecords:
    """Consecutive records, embedded.

    Attributes:
        records: ``n`` records.
        batch: Their rows: of each record one for every chunk, in order.
        ends: ``[n]``, the number of rows up to the end of each record.
        cached: ``[n]``, whether all vectors of the record came from the engine's cache.
        truncated_ids: Ids of the records of which a text was cut to the engine's ``max_length``.
    """

    records: Sequence[PlannedRecord]
    batch: WriteBatch
    ends: Sequence[int]
    cached: Sequence[bool]
    truncated_ids: Sequence[str]


@dataclass(frozen=True, kw_only=True, eq=False)
class UnembeddedRecord:
    """A record that has no vector.

    Attributes:
        record: The record.
        reason: Why.
    """

    record: PlannedRecord
    reason: str


@dataclass(frozen=True, kw_only=True, eq=False)
class EmbeddingCall:
    """A call that the engine works on, for some records.

    Attributes:
        records: The records.
        dense: The call for the vectors.
        sparse: The call for the sparse vectors, of a hybrid sink.
    """

    records: Sequence[PlannedRecord]
    dense: Future[EmbeddingOutput]
    sparse: Future[SparseEmbeddingOutput] | None

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
    """Embeds records at full width, with the role ``document``, and cuts the vectors to the widths of a sink.

    Args:
        engine: The engine of the vectors.
        widths: The widths to store, ascending.
        sparse_engine: The engine of the sparse vectors, for a hybrid sink.
        trace: Where times and lengths go.
        check: Called while the engine is too busy for another call; raises to give up.
    """

    def __init__(
        self,
        engine: Engine,
        widths: Sequence[int],
        *,
        sparse_engine: Engine | None = None,
        trace: RunTrace | None = None,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        self._engine = engine
        self._widths = widths
        self._sparse_engine = sparse_engine
        self._trace = RunTrace(vectors=0) if trace is None else trace
        self._check = check
        self._failing_records = 0  # since the engine last embedded a record

    def submit(self, records: Sequence[PlannedRecord]) -> EmbeddingCall:
        """Begin to embed records; waits while the engine's queue is full."""
        texts = [chunk.text for record in records for chunk in record.chunks]
        # Full width, not normalized: every other width is cut from it.
        dense = PoolingParams(role="document", dimensions=self._engine.spec.dimensions, normalize=False)
        while True:
            try:
                with TruncatedTexts.quiet():  # the run reports the texts of all its calls
                    call: Future[EmbeddingOutput] = self._engine.submit("embed", texts, dense)
                break
            except EngineOverloadedError as error:  # other callers fill the queue; retry when they are served
                self._check()
                time.sleep(error.retry_after)
        return EmbeddingCall(records=records, dense=call, sparse=self._submit_sparse(texts, call))

    def complete(self, call: EmbeddingCall) -> Iterator[EmbeddedRecords | UnembeddedRecord]:
        """Wait for a call, and go through its records; those of a failed one are embedded again by halves.

        Raises:
            MillpondError: The engine fails whatever the texts are, or for many records in a row.
        """
        try:
            output = call.dense.result()
            sparse = None if call.sparse is None else call.sparse.result()
        except _FATAL:
            raise
        except (MillpondError, RuntimeError) as error:  # caused by one text, or by the forward of its batch
            call.cancel()
            yield from self._isolate(call.records, error)
            return
        except BaseException:
            call.cancel()  # interrupted: nothing waits for the call any more
            raise
        if not output.cached.all():
            self._failing_records = 0
        with self._trace.stage("cut", len(call.records)):
            results = self._cut(call.records, output, sparse)
        yield from results

    def _submit_sparse(
        self, texts: Sequence[str], dense: Future[EmbeddingOutput]
    ) -> Future[SparseEmbeddingOutput] | None:
        if self._sparse_engine is None:
            return None
        while True:
            try:
                with TruncatedTexts.quiet():
                    call: Future[SparseEmbeddingOutput] = self._sparse_engine.submit(
                        "sparse_embed", texts, PoolingParams(role="document")
                    )
                return call
            except EngineOverloadedError as error:
                try:
                    self._check()
                except BaseException:
                    dense.cancel()
                    raise
                time.sleep(error.retry_after)
            except BaseException:
                dense.cancel()
                raise

    def _cut(
        self, records: Sequence[PlannedRecord], output: EmbeddingOutput, sparse: SparseEmbeddingOutput | None
    ) -> list[EmbeddedRecords | UnembeddedRecord]:
        rows = output.embeddings  # [chunks, d]
        chunks = [chunk for record in records for chunk in record.chunks]
        self._trace.note_texts([len(chunk.text) for chunk in chunks])
        vectors = {width: matryoshka.cut(rows, width, normalize=True) for width in self._widths}
        valid = np.logical_and.reduce([storable(cut) for cut in vectors.values()])  # [chunks]
        self._trace.note_vectors(rows if valid.all() else rows[valid])
        ends = list(accumulate(len(record.chunks) for record in records))
        spans = list(pairwise([0, *ends]))
        bad = [not valid[start:end].all() for start, end in spans] if not valid.all() else [False] * len(records)
        failures: list[EmbeddedRecords | UnembeddedRecord] = [
            UnembeddedRecord(record=record, reason="its vector is not finite, or all zero")
            for record, failed in zip(records, bad, strict=True)
            if failed
        ]
        cached, truncated = output.cached, output.truncated
        weights = None if sparse is None else sparse.embeddings
        if failures:
            keep = np.repeat(np.logical_not(bad), [end - start for start, end in spans])  # [chunks]
            records = [record for record, failed in zip(records, bad, strict=True) if not failed]
            chunks = [chunk for chunk, kept in zip(chunks, keep, strict=True) if kept]
            vectors = {width: cut[keep] for width, cut in vectors.items()}
            cached, truncated = cached[keep], truncated[keep]
            weights = None if weights is None else [row for row, kept in zip(weights, keep, strict=True) if kept]
            ends = list(accumulate(len(record.chunks) for record in records))
            spans = list(pairwise([0, *ends]))
        if not records:
            return failures
        whole = len(chunks) == len(records)  # one chunk each, as for nearly every run
        hits = cached.tolist() if whole else [bool(cached[start:end].all()) for start, end in spans]
        cut_ids = [chunks[index].id for index in np.flatnonzero(truncated)]
        embedded = EmbeddedRecords(
            records=records,
            batch=WriteBatch(
                records=chunks,
                ids=[point_id(chunk.id, chunk.chunk) for chunk in chunks],
                vectors=vectors,
                sparse=weights,
            ),
            ends=ends,
            cached=hits,
            truncated_ids=cut_ids if whole else list(dict.fromkeys(cut_ids)),
        )
        return [*failures, embedded]

    def _isolate(
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
