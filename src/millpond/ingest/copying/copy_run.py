"""CopyRun: one copy, from the scan of the source to the look into the target."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any

from millpond.errors import InvalidRequestError, SinkError, SinkUnavailableError
from millpond.ingest.copying.options import CopyOptions
from millpond.ingest.copying.report import CopyReport
from millpond.ingest.copying.row_maker import LeftOut, RowMaker
from millpond.ingest.copying.row_sample import RowSample
from millpond.ingest.copying.source_ids import SourceIds
from millpond.ingest.pipeline.dead_letter_file import DeadLetterFile
from millpond.ingest.pipeline.delivery import RetryingWriter, RetryPolicy
from millpond.ingest.pipeline.last_run import LastRun
from millpond.ingest.pipeline.verify import is_stored
from millpond.ingest.record import Record
from millpond.ingest.sinks.batch import WriteBatch
from millpond.ingest.sinks.collection import CollectionSink
from millpond.ingest.sinks.manifest import CollectionManifest
from millpond.ingest.sinks.protocol import StoredRow
from millpond.ingest.sinks.run_note import RunNote
from millpond.ingest.sources.json_file import dump_record
from millpond.ingest.telemetry.report import Verification
from millpond.support.progress import draw_bar

logger = logging.getLogger(__name__)

# Rows in memory at a time, with their texts; a copy can only be stopped between two pages.
_PAGE_ROWS = 1024
_NAMED_IDS = 10
_WARNINGS = 1000


class CopyRun:
    """One copy; it can be made once."""

    def __init__(
        self,
        source: CollectionSink[Any],
        target: CollectionSink[Any],
        manifest: CollectionManifest,
        options: CopyOptions,
        dead_letters: DeadLetterFile | None,
    ) -> None:
        self._source, self._target, self._manifest = source, target, manifest
        self._options, self._letters = options, dead_letters
        self._stop = threading.Event() if options.stop is None else options.stop
        self._requests = RetryingWriter(options.retry or RetryPolicy(), self._stop, self._retrying)
        self._last_run = LastRun(target, None, note=RunNote.now("copy", source.target))
        rate = options.rows_per_second
        self._page_rows = _PAGE_ROWS if rate is None else max(1, min(_PAGE_ROWS, int(rate)))
        self._sample = RowSample()
        self._total = 0  # rows of the source
        self._counts = dict.fromkeys(("read", "written", "unchanged", "failed", "deleted", "retried"), 0)
        self._failed_ids: list[str] = []
        self._start = time.perf_counter()

    def copy(self) -> CopyReport:
        """Copy every row; returns the counts."""
        pages = self._prepare()
        first = next(pages)
        self._last_run.compare()
        before = self._requests.send(self._target.count)
        maker = RowMaker(self._source, self._target, sparse=self._target.hybrid)
        bar = draw_bar(show=self._options.show_progress, total=self._total, unit=" rows")
        try:
            with bar:
                page: dict[str, StoredRow] | None = first
                while page is not None:
                    self._copy_page(maker, page, before)
                    bar.update(len(page))
                    page = None if self._stop.is_set() else next(pages, None)
                if not self._stop.is_set() and self._options.sync:
                    self._delete_others(maker, before)
        except SinkUnavailableError as error:
            if not self._stop.is_set():
                raise
            logger.warning("stopped before everything was copied, since %s", error)
        self._last_run.end(synced=False)
        return self._report(None if self._stop.is_set() else self._verify())

    def _prepare(self) -> Iterator[dict[str, StoredRow]]:
        """Check the target, or create it; returns the pages of the source, at least one."""
        target, manifest = self._target, self._manifest
        widths = manifest.of_copy(dimensions=target.dimensions, fields=None, sparse=False).dimensions
        try:
            target.open()
        except InvalidRequestError:  # there is none
            pages = self._pages(widths)
            first = next(pages, {})
            self._check_readable(first, widths)
            target.prepare_copy(manifest)
            return chain([first], pages)
        target.prepare_copy(manifest)
        pages = self._pages(target.open().dimensions)
        return chain([next(pages, {})], pages)

    def _pages(self, widths: Sequence[int]) -> Iterator[dict[str, StoredRow]]:
        """The rows of the source, a page at a time; rows that are deleted meanwhile are left out."""
        ids = SourceIds()
        self._total = self._requests.send(partial(ids.fill, self._source, self._stop))
        for part in ids.pages(self._page_rows):
            yield self._requests.send(partial(self._source.read_rows, part, widths=widths))

    def _check_readable(self, rows: dict[str, StoredRow], wanted: Sequence[int]) -> None:
        """Raise for vectors or texts that the source's database does not hand out, before there is a target."""
        if not rows:
            return
        if all(row.text is None for row in rows.values()):
            raise SinkError(f"this sink of {self._source.database} reads no texts back, so its rows cannot be copied")
        has = {width for row in rows.values() for width in row.vectors}
        if lacking := sorted(set(wanted) - has):
            others = ",".join(str(width) for width in wanted if width in has)
            way_out = f"copy the others by dimensions={others}" if others else "embed its texts by millpond ingest"
            raise InvalidRequestError(
                f"the vectors of the widths {lacking} of collection {self._source.collection!r} cannot be read back "
                f"(datatype='bit' stores only signs); {way_out}"
            )

    def _copy_page(self, maker: RowMaker, rows: dict[str, StoredRow], before: int) -> None:
        batch, left = maker.make(rows)
        for each in left:
            self._fail(each)
        if batch is not None:
            new = self._changed(batch) if before else batch
            if new is not None:
                self._last_run.begin(before)
                refused = dict(self._requests.write(self._target.write, new))
                for row, reason in refused.items():
                    self._fail(LeftOut(row_id=new.ids[row], record=new.records[row], reason=reason))
                self._counts["written"] += len(new) - len(refused)
                kept = [row for row in range(len(new)) if row not in refused]
                self._sample.offer(new if not refused else _rows_of(new, kept))
        self._counts["read"] += len(rows)
        if (rate := self._options.rows_per_second) is not None:
            self._stop.wait(max(0.0, self._start + self._counts["read"] / rate - time.perf_counter()))

    def _changed(self, batch: WriteBatch) -> WriteBatch | None:
        """The rows that the target does not hold yet as they are; ``None`` if it holds all."""
        widths = list(batch.vectors)
        stored = self._requests.send(lambda: self._target.read_rows(batch.ids, widths=widths))
        readable = {width for row in stored.values() for width in row.vectors}
        changed = [n for n, row_id in enumerate(batch.ids) if not is_stored(stored.get(row_id), batch, n, readable)]
        self._counts["unchanged"] += len(batch) - len(changed)
        return _rows_of(batch, changed) if changed else None

    def _delete_others(self, maker: RowMaker, before: int) -> None:
        """Delete the target's rows that the source does not have, if they are few enough."""
        doomed = self._requests.send(partial(self._others, maker))
        if not doomed:
            return
        would = f"the copy would delete {len(doomed)} of the {before} rows that the target held before"
        if not self._counts["written"] + self._counts["unchanged"]:
            raise SinkError(f"{would}, though the source has no row that was copied; nothing was deleted")
        share = self._options.sync_max
        if len(doomed) > share * before and share < 1:
            raise SinkError(
                f"{would}, and sync_max={share:g} allows {int(share * before)}; nothing was deleted, and everything "
                "else is copied. If they are to go, copy again with a larger sync_max, up to 1"
            )
        self._last_run.begin(before)
        for start in range(0, len(doomed), _PAGE_ROWS):
            part = doomed[start : start + _PAGE_ROWS]
            self._requests.send(partial(self._target.delete_rows, part))
            self._counts["deleted"] += len(part)

    def _others(self, maker: RowMaker) -> list[str]:
        """The ids of the target's rows that the source does not have now, but for those that a framework wrote."""
        others: list[str] = []
        rows = self._target.scan()
        while page := list(islice(rows, _PAGE_ROWS)):
            own = [row_id for row_id, record_id in page if row_id != record_id and row_id not in maker.moved]
            known = self._source.fetch(own)
            others += [row_id for row_id in own if row_id not in known]
        return others

    def _verify(self) -> Verification:
        """Count the target's rows, and compare a sample with what was written."""
        sampled, different = self._requests.send(lambda: self._sample.compare(self._target))
        expected = self._counts["written"] + self._counts["unchanged"]
        rows = self._requests.send(self._target.count)
        return Verification(
            rows=rows,
            expected=expected,
            missing=max(0, expected - rows),
            compared=sampled,
            sampled=sampled,
            different=different,
        )

    def _fail(self, left: LeftOut) -> None:
        level = logging.WARNING if self._counts["failed"] < _WARNINGS else logging.DEBUG
        where = f"row {left.row_id!r}" if left.record is None else f"record {left.record.id!r}"
        logger.log(level, "left out %s: %s", where, left.reason)
        self._counts["failed"] += 1
        record = left.record or Record(left.row_id, "")
        if len(self._failed_ids) < _NAMED_IDS:
            self._failed_ids.append(record.id)
        if self._letters is not None:
            self._letters.add(dump_record(record, where=where, reason=left.reason))

    def _retrying(self, error: BaseException, seconds: float) -> None:
        self._counts["retried"] += 1
        logger.warning("%s; trying again in %.1f s", error, seconds)

    def _report(self, verification: Verification | None) -> CopyReport:
        # What was read and not dealt with is read again by the next copy.
        dealt = sum(self._counts[name] for name in ("written", "unchanged", "failed"))
        return CopyReport(
            **{**self._counts, "read": dealt},
            failed_ids=tuple(self._failed_ids),
            stopped=self._stop.is_set(),
            verification=verification,
            seconds=time.perf_counter() - self._start,
        )


def _rows_of(batch: WriteBatch, rows: Sequence[int]) -> WriteBatch:
    """Some rows of a batch, as one."""
    if len(rows) == len(batch):
        return batch
    return WriteBatch(
        records=[batch.records[row] for row in rows],
        ids=[batch.ids[row] for row in rows],
        vectors={width: vectors[list(rows)] for width, vectors in batch.vectors.items()},
        sparse=None if batch.sparse is None else [batch.sparse[row] for row in rows],
    )
