"""PageTimer: what was read of a slow source is written when it is some seconds old."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Self

WRITE_AFTER_SECONDS = 5.0
"""A record does not wait longer for others to be written with, if the source is waited for."""

_LOOK_SECONDS = 0.2


class PageTimer:
    """A thread that writes what waits, while the thread of the run waits for the source.

    Both have :attr:`turn` for all that they do, and the run's thread gives it away only while it waits.
    """

    def __init__(self, write: Callable[[], None]) -> None:
        self.turn = threading.RLock()
        self._write = write
        self._since: float | None = None  # when the oldest record that waits was read; `None`: none waits
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="millpond-page-timer", daemon=True)

    def __enter__(self) -> Self:
        self.turn.acquire()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        with suppress(RuntimeError):  # of Ctrl-C while the source was waited for
            self.turn.release()
        self._thread.join()

    def note(self) -> None:
        """A record was read. Raises what the last write in the other thread raised."""
        if self._since is None:
            self.check()
            self._since = time.monotonic()

    def check(self) -> None:
        """Raise what a write in the other thread raised."""
        if self._error is not None:
            raise self._error

    def restart(self, *, waiting: bool) -> None:
        """What waits was read just now, or nothing waits."""
        self._since = time.monotonic() if waiting else None

    def _work(self) -> None:
        while self._error is None and not self._ended.wait(_LOOK_SECONDS):
            since = self._since
            if since is None or time.monotonic() - since < WRITE_AFTER_SECONDS or not self.turn.acquire(blocking=False):
                continue
            try:
                self._write()
            except BaseException as error:  # raised again in the run's thread
                self._error = error
            finally:
                self.restart(waiting=False)
                self.turn.release()
