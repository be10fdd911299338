"""FairSemaphore: a limited number of threads at a time, in the order in which they came.

With a plain semaphore, which thread gets on is left to chance: of 64 callers some wait for seconds.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager


class FairSemaphore:
    """Threads take slots one after the other; a forked child begins with all of them free."""

    def __init__(self) -> None:
        self._renew()
        _semaphores.add(self)

    def _renew(self) -> None:
        self._changed = threading.Condition()
        self._line: list[object] = []  # those at the front are inside

    @contextmanager
    def turn(self, slots: int) -> Iterator[int]:
        """Wait until fewer than ``slots`` threads are inside and those that came earlier had their turn.

        Yields:
            The caller's share of the slots: all of them if nobody else is here.
        """
        ticket = object()
        try:
            with self._changed:
                others = len(self._line)
                self._line.append(ticket)
                self._changed.wait_for(lambda: ticket in self._line[:slots])
            yield max(1, slots // (1 + others))
        finally:
            with self._changed:
                if ticket in self._line:  # else an interrupt came before it was in line
                    self._line.remove(ticket)
                    self._changed.notify_all()


_semaphores: weakref.WeakSet[FairSemaphore] = weakref.WeakSet()


def _renew_all() -> None:
    """In a forked child the threads that held a slot do not exist."""
    for semaphore in list(_semaphores):
        semaphore._renew()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_renew_all)
