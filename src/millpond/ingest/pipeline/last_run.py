"""LastRun: the id of the run that changed a collection last, which the collection and the journal both keep."""

from __future__ import annotations

import logging
import uuid

from millpond.errors import SinkError
from millpond.ingest.pipeline.journal import CollectionEntries
from millpond.ingest.sinks.collection import CollectionSink
from millpond.ingest.sinks.protocol import NotesRun, Reads, Sink
from millpond.ingest.sinks.run_note import RunNote

logger = logging.getLogger(__name__)

_HELD = " after "  # between the id and the rows


class LastRun:
    """Compares the two ids before a run, and changes both when the run begins to write, and when it has written.

    The ids differ if the collection was restored from a copy, or if a run with another journal wrote to it. Then no
    entry is trusted until its rows are compared with the record. A run that is killed leaves the same id in both. So
    do they differ if two runs wrote at the same time.

    After the id, the collection keeps how many rows it held before the first of the syncs that did not end well: what
    these have added does not allow the next one to delete more.

    Attributes:
        held: That number; ``None`` if the last sync ended well.
    """

    def __init__(
        self, sink: Sink, entries: CollectionEntries | None, *, sync: bool = False, note: RunNote | None = None
    ) -> None:
        self._sink = sink if isinstance(sink, NotesRun) and isinstance(sink, Reads) else None
        self._note_of_run = note  # which a collection keeps beside the id
        self._entries = entries
        self._sync = sync
        self._stored = ""  # in the collection, as far as this run knows
        self._others = False  # whether another run has written since
        self._begun = False
        self.held: int | None = None

    def compare(self) -> None:
        """Trust the entries no longer if the collection was left by another run than they were."""
        if self._sink is None:
            return
        stored = self._stored = self._sink.last_run()
        held = stored.partition(_HELD)[2]
        self.held = int(held) if held.isdecimal() else None
        if self._entries is None or (stored and stored == self._entries.run):
            return
        if self._entries.any():
            if not stored:  # before this version there were no ids, or the copy is older
                if not self._note(uuid.uuid4().hex):
                    return
                stored = self._stored
            logger.warning(
                "the collection was not left by the last run of this journal: it was restored from a copy, or changed "
                "by a run with another journal, or by an earlier version of millpond; the rows of each record are "
                "compared"
            )
        self._entries.distrust(stored)

    def begin(self, rows: int | None = None) -> None:
        """Before the first change of the collection, which has so many rows."""
        if not self._begun:
            self._begun = True
            if self._sync and self.held is None:
                self.held = rows or None
            self._renew()

    def end(self, *, synced: bool) -> None:
        """After the last change: a copy that was made during the run has the id of its beginning."""
        settled = synced and self.held is not None
        if settled:
            self.held = None
        if self._begun or settled:
            self._renew()
            self._begun = False

    def _renew(self) -> None:
        self._others |= self._sink is not None and self._sink.last_run() != self._stored
        run = uuid.uuid4().hex + ("" if self.held is None else f"{_HELD}{self.held}")
        # First in the collection: of a run that is killed between the two, the ids differ.
        noted = run if self._note(run) and not self._others else ""
        if self._entries is not None and self._entries.run != noted:
            self._entries.note_run(noted)

    def _note(self, run: str) -> bool:
        """Store an id in the collection, which the run can do without; returns whether it is stored."""
        if self._sink is None:
            return False
        try:
            if isinstance(self._sink, CollectionSink):
                self._sink.note_run(run, self._note_of_run if self._begun else None)
            else:
                self._sink.note_run(run)
        except SinkError as error:
            logger.info("the collection keeps no id of its last run: %s", error)
            return False
        self._stored = run
        return True
