"""Cores: the processor cores that this process may use, shared by all of its engines.

Ten engines that are busy at once compute on as many threads as there are cores, not on ten times as many.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from functools import cache

from millpond.support.processor import usable_cores


class Turn:
    """A thread's wait for a core: over with a core, or when the thread that has withdrawn it releases ``over``.

    With ``spare`` it is over, too, while no more threads than that many beyond the cores have one: they compute while
    others wait for Python's lock.
    """

    __slots__ = ("claimed", "over", "spare")

    def __init__(self, spare: int = 0) -> None:
        self.claimed, self.spare = False, spare
        self.over = threading.Lock()
        self.over.acquire()


class Cores:
    """A number of cores to claim and release; thread-safe. Who waits first is served first."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = count
        self._lock = threading.RLock()
        self._waiting: deque[Turn] = deque()

    @property
    def free(self) -> int:
        """Number of cores that are not claimed."""
        return max(0, self._free)

    def claim(self, *, wait: bool = True, seconds: float | None = None, turn: Turn | None = None) -> bool:
        """Claim a core, if one is free, or after a ``wait`` for one, of so many seconds at most.

        Returns whether it was claimed; not so if the ``turn`` was withdrawn.
        """
        with self._lock:
            if self._free > 0:
                self._free -= 1
                return True
            if not wait:
                return False
            turn = turn or Turn()
            self._waiting.append(turn)
            self._hand_over()
        try:
            turn.over.acquire(timeout=-1 if seconds is None else seconds)
        except BaseException:  # Ctrl-C
            self.withdraw(turn)
            if turn.claimed:
                self.release()
            raise
        self.withdraw(turn)
        return turn.claimed

    def withdraw(self, turn: Turn) -> bool:
        """End a wait; returns ``False`` if it is over already."""
        with self._lock:
            if turn.claimed or turn not in self._waiting:
                return False
            self._waiting.remove(turn)
            return True

    def widen(self, most: int) -> int:
        """Claim up to ``most`` more cores that are free now; returns their number."""
        if most <= 0:
            return 0
        with self._lock:
            more = max(0, min(most, self._free))
            self._free -= more
            return more

    def release(self, count: int = 1) -> None:
        """Give cores back: to those that wait, the oldest first, before anybody who comes later."""
        with self._lock:
            self._free += count
            self._hand_over()

    def _hand_over(self) -> None:
        while self._waiting and self._free + self._waiting[0].spare > 0:
            self._free -= 1
            turn = self._waiting.popleft()
            turn.claimed = True
            turn.over.release()


def process_cores() -> Cores:
    """The cores of this process; a forked child has its own count, without its parent's claims."""
    return _cores_of(os.getpid())


@cache
def _cores_of(pid: int) -> Cores:
    return Cores(usable_cores())
