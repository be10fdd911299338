"""Turns: searches of several threads use the cores in the order in which they came.

Without turns every search starts as many threads as there are cores, and which of them gets on is left to chance: of 64
callers some wait for seconds.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager


class _Ticket:
    """One search: ``called`` is released when its turn comes."""

    def __init__(self) -> None:
        self.called = threading.Lock()
        self.called.acquire()


class Turns:
    """At most as many searches at once as there are threads to use, each with its share of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[_Ticket] = set()
        self._waiting: deque[_Ticket] = deque()

    @contextmanager
    def turn(self, threads: int) -> Iterator[int]:
        """Wait until fewer than ``threads`` searches run and those that came earlier had their turn.

        Yields:
            How many threads to use: all if nobody else is here, otherwise a share.
        """
        ticket = _Ticket()
        try:  # before it is anywhere, so that no interrupt leaves it there
            with self._lock:
                others = len(self._running) + len(self._waiting)
                if len(self._running) < threads and not self._waiting:
                    self._running.add(ticket)
                    ticket.called.release()
                else:
                    self._waiting.append(ticket)
            ticket.called.acquire()
            yield max(1, threads // (1 + others))
        finally:
            with self._lock:
                if ticket in self._running:
                    self._running.remove(ticket)
                    if self._waiting:
                        following = self._waiting.popleft()
                        self._running.add(following)
                        following.called.release()
                elif ticket in self._waiting:
                    self._waiting.remove(ticket)


TURNS = Turns()


def _after_fork() -> None:
    """In a forked child the threads of the parent's searches do not exist."""
    TURNS.__init__()  # type: ignore[misc]  # the same object, which modules have imported


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
