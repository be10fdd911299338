"""RunLedger: what becomes of the records of a run: counts, times, dead letters, and the rows to delete."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from millpond.ingest.pipeline.comparison import ExpectedContent
from millpond.ingest.pipeline.dead_letter_file import DeadLetterFile
from millpond.ingest.pipeline.deletions import Deletions
from millpond.ingest.pipeline.verify import RecordSample
from millpond.ingest.record import Rejected
from millpond.ingest.sources.json_file import dump_record, dump_rejected
from millpond.ingest.telemetry.report import RunCounts
from millpond.ingest.telemetry.trace import RunTrace

if TYPE_CHECKING:
    from millpond.ingest.pipeline.embedder import PlannedRecord


logger = logging.getLogger(__name__)


class RunLedger:
    """Keeps account of a run. Any thread may use it."""

    def __init__(
        self,
        trace: RunTrace,
        dead_letters: DeadLetterFile | None = None,
        *,
        deletions: Deletions | None = None,
        verify: bool = False,
        chunked: bool = False,
    ) -> None:
        self.counts = RunCounts()
        self.trace = trace
        self.deletions = Deletions() if deletions is None else deletions
        self.sample = RecordSample() if verify else None
        self.expected = ExpectedContent(chunked=chunked) if verify else None
        self._dead_letters = dead_letters

    def reject(self, rejected: Rejected) -> None:
        """Leave out a line that holds no record."""
        self.counts.failed(rejected.where, rejected.reason)
        self.trace.note_failure(rejected.where, rejected.reason)
        if rejected.record_id is None:
            self.deletions.see_nameless()
        elif rejected.parts:
            self.deletions.see_file(rejected.record_id)
        else:
            self.deletions.see([rejected.record_id])
        if self._dead_letters is not None:
            self._dead_letters.add(dump_rejected(rejected))

    def fail(self, planned: PlannedRecord, reason: str) -> None:
        """Leave out a record that cannot be embedded or stored."""
        where = f"record {planned.record.id!r}"
        self.counts.failed(where, reason)
        self.trace.note_failure(where, reason)
        if self.sample is not None:
            self.sample.drop(planned.key)
        if self._dead_letters is not None:
            self._dead_letters.add(dump_record(planned.record, where=where, reason=reason))

    def retrying(self, error: BaseException, seconds: float) -> None:
        """A request is sent again after some seconds."""
        self.counts.add(retried=1)
        self.trace.note_retry(str(error))
        logger.warning("%s; trying again in %.1f s", error, seconds)
