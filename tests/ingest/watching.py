"""A watcher in a thread of the test, over a database in memory."""

import threading
import time
from contextlib import contextmanager

from tests.ingest.crashes import CrashingSink, memory

from millpond.ingest import RetryPolicy
from millpond.ingest.pipeline.options import RunOptions
from millpond.ingest.watch import folder_source
from millpond.ingest.watch.open_source import open_source
from millpond.ingest.watch.source import Waker
from millpond.ingest.watch.state import WatchState
from millpond.ingest.watch.watcher import watch

RETRY = RetryPolicy(give_up_after=float("inf"), first_wait=0.01, longest_wait=0.02)


class Watching:
    """A watcher that runs, and what it has written."""

    def __init__(self, source, engine, client, **options):
        self.client, self.state, self.stop = client, WatchState(), Waker()
        self.sinks = []
        self.error = self.report = None
        opened = options.pop("open_sink", lambda: CrashingSink(client))
        given = {name: options.pop(name) for name in ("grace", "metrics") if name in options}
        keys = {name: options.pop(name) for name in ("poll", "updated", "notify") if name in options}
        columns = options.pop("columns", None)

        def open_sink():
            self.sinks.append(opened())
            return self.sinks[-1]

        def work():
            try:
                self.report = watch(
                    open_source(str(source), columns, **keys),
                    engine=engine,
                    open_sink=open_sink,
                    options=RunOptions(**{"retry": RETRY, "show_progress": False, **options}),
                    stop=self.stop,
                    state=self.state,
                    **given,
                )
            except BaseException as error:
                self.error = error

        self.thread = threading.Thread(target=work)
        self.thread.start()
        self.until(lambda: self.state.now()["passes"] or not self.thread.is_alive())

    def until(self, condition, seconds=20):
        """Wait until something is so."""
        end, pause = time.monotonic() + seconds, threading.Event()
        while not condition():
            assert time.monotonic() < end, (self.texts, self.state.now(), self.state.last_error)
            assert self.error is None, self.error
            pause.wait(0.01)

    def until_texts(self, texts, seconds=20):
        """Wait until the collection holds exactly these records and nothing waits."""
        self.until(lambda: self.texts == texts, seconds)

    def until_idle(self):
        """Wait until no change waits."""
        self.until(lambda: self.state.oldest() is None)

    @property
    def texts(self):
        """``{record id: text}``."""
        rows = self.client["docs"][1] if "docs" in self.client else {}
        return {record.id: record.text for record, _ in list(rows.values())}

    @property
    def written(self):
        """The ids of all records that were written, in order."""
        return [each for sink in self.sinks for each in getattr(sink, "written", ())]

    def end(self):
        """Stop the watcher."""
        if self.thread.is_alive():
            self.stop.set()
            self.stop.wake()
        self.thread.join(30)
        assert not self.thread.is_alive()


@contextmanager
def watching(source, engine, journal, client=None, **options):
    """A watcher for a block."""
    options = {"grace": 0.3, "sync_max": 1.0, **options}
    watcher = Watching(source, engine, memory() if client is None else client, journal=journal, **options)
    try:
        yield watcher
    finally:
        watcher.end()
    if watcher.error is not None:
        raise watcher.error


__all__ = ["Watching", "folder_source", "watching"]
