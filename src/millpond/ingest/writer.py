"""BatchWriter: the thread that writes to the sink."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from millpond.ingest.batch import WriteBatch
from millpond.ingest.counts import RunCounts
from millpond.ingest.sink import Deletes, Sink

_QUEUED_BATCHES = 2
# Rows of one write. A run can only be stopped between writes, and one may take seconds.
_WRITE_RECORDS = 512


class BatchWriter:
    """A thread that writes batches from a bounded queue. After a failure it drains the queue, so that no put blocks."""

    def __init__(self, sink: Sink, counts: RunCounts) -> None:
        self._sink = sink
        self._counts = counts
        self._queue: queue.Queue[WriteBatch | _Deletion | None] = queue.Queue(_QUEUED_BATCHES)
        self._failure: BaseException | None = None
        self._dropping = False
        # A daemon, so that a database that never answers cannot keep the program from ending.
        self._thread = threading.Thread(target=self._work, name="millpond-writer", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise the error that stopped the writing, if there is one."""
        if self._failure is not None:
            raise self._failure

    def put(self, batch: WriteBatch) -> None:
        """Queue a batch; blocks while the queue is full."""
        self.check()
        self._queue.put(batch)

    def delete(self, record_ids: Sequence[str]) -> None:
        """Queue the deletion of records whose text is blank now, if the sink can delete; blocks as :meth:`put`."""
        if isinstance(self._sink, Deletes):
            self.check()
            self._queue.put(_Deletion(record_ids, self._sink.delete))

    def finish(self) -> None:
        """Wait until everything queued is written."""
        self._queue.put(None)
        self._thread.join()
        self.check()

    def abandon(self) -> None:
        """Drop the queued batches and wait for the current write."""
        self._dropping = True
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (batch := self._queue.get()) is not None:
            if self._dropping or self._failure is not None:
                continue
            try:
                if isinstance(batch, _Deletion):
                    batch.delete(batch.record_ids)
                    continue
                for part in _parts(batch):
                    if self._dropping:
                        break
                    self._sink.write(part)
                    self._counts.add(written=len(part))
            except BaseException as error:  # raised again in the caller's thread
                self._failure = error


class _Deletion(NamedTuple):
    """Records to delete, in their place among the writes."""

    record_ids: Sequence[str]
    delete: Callable[[Sequence[str]], object]


def _parts(batch: WriteBatch) -> Iterator[WriteBatch]:
    for start in range(0, len(batch), _WRITE_RECORDS):
        yield batch.part(slice(start, start + _WRITE_RECORDS))
