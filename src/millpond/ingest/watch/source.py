"""WatchedSource: what a watcher asks of a folder, a file or a table that changes."""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from millpond.ingest.pipeline.journal import CollectionEntries
from millpond.ingest.pipeline.source_items import StopRequest
from millpond.ingest.record import Record, Rejected
from millpond.ingest.sources.read import RecordReader


@dataclass(frozen=True, kw_only=True)
class Changes:
    """What changed since the last changes that were accepted.

    Attributes:
        records: The records that are new or may have changed, read as they are asked for.
        gone: Called when they were read, with the ids that came; returns the ids that the source has no more.
        accept: Called when they are in the collection. Without it, the same changes come again.
    """

    records: Iterator[Record | Rejected]
    gone: Callable[[set[str]], Iterable[str]]
    accept: Callable[[], None]


class WatchedSource(Protocol):
    """A source that changes. Times are those of ``time.monotonic``."""

    def start(self, wake: Callable[[], None]) -> None:
        """Begin to notice changes; ``wake`` may be called from any thread when there are some."""

    def full(self) -> RecordReader:
        """All that the source has now."""

    def changes(self, entries: CollectionEntries) -> Changes | None:
        """What changed; ``None`` if nothing did, or nothing that can be read yet."""

    def due(self) -> float | None:
        """When to ask for changes without being woken; ``None``: never."""

    def oldest(self) -> float | None:
        """When the oldest change was noticed that is not accepted; ``None`` if there is none."""

    def is_there(self) -> bool:
        """Whether the source can be read at all: nothing is deleted while a disk or a server is away."""

    def stop(self) -> None:
        """End the noticing."""


class Waker(StopRequest):
    """Waits for a wake, for a time or for the end. A signal handler may set it, in the thread that waits."""

    def __init__(self) -> None:
        super().__init__()
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)

    def wake(self) -> None:
        """End the wait, or the next one."""
        with suppress(BlockingIOError, OSError):  # full: somebody has woken it already; or closed
            os.write(self._write, b"x")

    def interrupt(self) -> None:
        """Ask for the end, from a signal handler."""
        self.wake()
        super().interrupt()

    def wait_for(self, seconds: float | None) -> bool:
        """Wait so long, or for ever; returns whether something woke it."""
        woken = self.is_set() or bool(select.select([self._read], [], [], seconds)[0])
        with suppress(BlockingIOError):
            while os.read(self._read, 1 << 12):
                pass
        return woken

    def close(self) -> None:
        """Close the pipe."""
        os.close(self._read)
        os.close(self._write)
