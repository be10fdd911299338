"""LastRun: the id of the run that changed a collection last, which the collection and the journal both keep."""

from __future__ import annotations

import logging
import uuid

from millpond.errors import SinkError
from millpond.ingest.pipeline.journal import CollectionEntries
from millpond.ingest.sinks.protocol import NotesRun, Reads, Sink

logger = logging.getLogger(__name__)


class LastRun:
    """Compares the two ids before a run, and changes both when the run begins to write, and when it has written.

    The ids differ if the collection was restored from a copy, or if a run with another journal wrote to it. Then no
    entry is trusted until its rows are compared with the record. A run that is killed leaves the same id in both.
    """

    def __init__(self, sink: Sink, entries: CollectionEntries | None) -> None:
        self._sink = sink if isinstance(sink, NotesRun) and isinstance(sink, Reads) else None
        self._entries = entries
        self._begun = False

    def compare(self) -> None:
        """Trust the entries no longer if the collection was left by another run than they were."""
        if self._sink is None or self._entries is None:
            return
        stored = self._sink.last_run()
        if stored and stored == self._entries.run:
            return
        if self._entries.any():
            if not stored:  # before this version there were no ids, or the copy is older
                if not self._note(uuid.uuid4().hex):
                    return
                stored = self._sink.last_run()
            logger.warning(
                "the collection was not left by the last run of this journal: it was restored from a copy, or changed "
                "by a run with another journal, or by an earlier version of millpond; the rows of each record are "
                "compared"
            )
        self._entries.distrust(stored)

    def begin(self) -> None:
        """Before the first change of the collection."""
        if not self._begun:
            self._begun = True
            self._renew()

    def end(self) -> None:
        """After the last change: a copy that was made during the run has the id of its beginning."""
        if self._begun:
            self._begun = False
            self._renew()

    def _renew(self) -> None:
        run = uuid.uuid4().hex
        # First in the collection: of a run that is killed between the two, the ids differ.
        noted = run if self._note(run) else ""
        if self._entries is not None and self._entries.run != noted:
            self._entries.note_run(noted)

    def _note(self, run: str) -> bool:
        """Store an id in the collection, which the run can do without; returns whether it is stored."""
        if self._sink is None:
            return False
        try:
            self._sink.note_run(run)
        except SinkError as error:
            logger.info("the collection keeps no id of its last run: %s", error)
            return False
        return True
