"""FairSemaphore: a limited number of threads at a time, in the order in which they came.

With a plain semaphore, which thread gets on is left to chance: of 64 callers some wait for seconds.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager


class FairSemaphore:
    """Threads take slots one after the other; a forked child begins with all of them free."""

    def __init__(self) -> None:
        self._renew()
        _semaphores.add(self)

    def _renew(self) -> None:
        self._lock = threading.Lock()
        self._running: set[_Ticket] = set()
        self._waiting: deque[_Ticket] = deque()

    @contextmanager
    def turn(self, slots: int) -> Iterator[int]:
        """Wait until fewer than ``slots`` threads are inside and those that came earlier had their turn.

        Yields:
            The caller's share of the slots: all of them if nobody else is here.
        """
        ticket = _Ticket()
        try:  # before it is anywhere, so that no interrupt leaves it there
            with self._lock:
                others = len(self._running) + len(self._waiting)
                if len(self._running) < slots and not self._waiting:
                    self._running.add(ticket)
                    ticket.called.release()
                else:
                    self._waiting.append(ticket)
            ticket.called.acquire()
            yield max(1, slots // (1 + others))
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


class _Ticket:
    """A thread in the queue: ``called`` is released when its turn comes."""

    def __init__(self) -> None:
        self.called = threading.Lock()
        self.called.acquire()


_semaphores: weakref.WeakSet[FairSemaphore] = weakref.WeakSet()


def _renew_all() -> None:
    """In a forked child the threads that held a slot do not exist."""
    for semaphore in list(_semaphores):
        semaphore._renew()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_renew_all)
