"""A collection in memory and a journal that crash when a test says so, and what runs are made of."""

import contextlib
from functools import partial
from unittest import mock

from tests.ingest.memory_sink import MemoryClient, MemoryConnection, MemoryDriver

from millpond.errors import InvalidRequestError
from millpond.ingest import Chunker, Chunking, CollectionSink, Record, RetryPolicy, ingest
from millpond.ingest.pipeline import deletions, planner, writer
from millpond.ingest.pipeline.delivery import RetryingWriter
from millpond.ingest.pipeline.journal import CollectionEntries


class Crash(BaseException):
    """As if the process had been killed: nothing of millpond handles it."""


class Words:
    """Cuts a text into pieces of a few words."""

    def __init__(self, words=3):
        self.words = words
        self.settings = f"words {words}"

    def split(self, record):
        words = record.text.split()
        if len(words) <= self.words:
            return [record]
        pieces = [" ".join(words[start : start + self.words]) for start in range(0, len(words), self.words)]
        return [
            Record(record.id, piece, {**record.metadata, "chunk": number}, chunk=number)
            for number, piece in enumerate(pieces)
        ]


class Countdown:
    """Lets some calls pass, and then raises in one, before or after it has had its effect."""

    def __init__(self, calls=None, *, after=False, error=Crash):
        self.calls, self.after, self.error = calls, after, error

    def __call__(self, call, *arguments, **options):
        due = self.calls == 0
        if self.calls is not None:
            self.calls -= 1
        if due and not self.after:
            self._raise()
        result = call(*arguments, **options)
        if due:
            self._raise()
        return result

    def _raise(self):
        raise self.error() if isinstance(self.error, type) else self.error


class CrashingDriver(MemoryDriver):
    """Asks the sink, whose methods fail on demand."""

    def upsert(self, batch):
        self.sink._upsert(batch)

    def delete(self, which, manifest):
        self.sink._delete(which, manifest)

    def fetch(self, row_ids, widths, manifest):
        return self.sink._fetch(row_ids, widths, manifest)


class CrashingSink(CollectionSink):
    """A MemorySink whose requests fail on demand; ``client`` keeps the rows, as a database does, for the next one."""

    def __init__(self, client, *, dimensions=None):
        super().__init__(CrashingDriver(MemoryConnection(client, "docs")), dimensions=dimensions)
        self._driver.sink = self
        self.upserts = self.deletes = self.reads = Countdown()
        self.written = []  # record ids, of every row that arrived

    def _upsert(self, batch):
        self.upserts(partial(MemoryDriver.upsert, self._driver), batch)
        self.written += [record.id for record in batch.records]

    def _delete(self, which, manifest):
        self.deletes(partial(MemoryDriver.delete, self._driver), which, manifest)

    def _fetch(self, row_ids, widths, manifest):
        return self.reads(partial(MemoryDriver.fetch, self._driver), row_ids, widths, manifest)

    @property
    def _rows(self):
        return self._driver.rows

    @property
    def stored(self):
        """``{(record id, chunk): text}``."""
        return {(record.id, record.chunk): record.text for record, _ in self._rows.values()}


class Refusing(CrashingSink):
    def check(self, record):
        if "bad" in record.text:
            raise InvalidRequestError("refused")


def some(count, text="text"):
    return [Record(f"r{number}", f"{text} {number}", {"n": number}) for number in range(count)]


def run(records, engine, sink, *, chunker=None, **options):
    """One run, with nothing on the screen."""
    if chunker is None:
        return ingest(records, engine=engine, sink=sink, show_progress=False, **options)
    with mock.patch.object(Chunker, "for_engine", return_value=chunker):
        return ingest(records, engine=engine, sink=sink, show_progress=False, chunking=Chunking(), **options)


@contextlib.contextmanager
def small(batch=3, write=512, *, chars=planner.BATCH_CHARS, page=512):
    """Small batches, writes and pages, so that a few records fill the whole pipeline."""
    with (
        mock.patch.object(planner, "BATCH_RECORDS", batch),
        mock.patch.object(planner, "BATCH_CHARS", chars),
        mock.patch.object(writer, "_WRITE_RECORDS", write),
        mock.patch.object(deletions, "_PAGE", page),
        mock.patch.object(deletions, "_IDS_PER_SELECT", page),
        mock.patch.object(deletions, "_SCANNED_ROWS", page),
    ):
        yield


def delivery(clock, **policy):
    """What sends the requests of a run, and the errors and waits that it notes."""
    notes = []
    made = RetryingWriter(RetryPolicy(**policy), clock, lambda error, seconds: notes.append((error, seconds)))
    return made, notes


@contextlib.contextmanager
def crash_at(method, calls, *, after=False, error=Crash):
    """The journal fails in the call number ``calls`` of a method of the marks."""
    countdown = Countdown(calls, after=after, error=error)
    real = getattr(CollectionEntries, method)
    with mock.patch.object(CollectionEntries, method, lambda self, *given: countdown(real, self, *given)):
        yield countdown


def memory():
    """A database in memory that outlives its sinks."""
    return MemoryClient()


def expected(source, chunker=None, keep_blank=False):
    """What a collection holds after a run over a source: ``{(id, chunk): text}``."""
    last = {record.id: record for record in source}
    rows = {}
    for record in last.values():
        if not keep_blank and not record.text.strip():
            continue
        for piece in [record] if chunker is None else chunker.split(record):
            rows[piece.id, piece.chunk] = piece.text
    return rows
