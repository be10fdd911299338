"""Turns: one timed ranking at a time has pairs in an engine's queue, so that a part takes as long as it is expected to.

If all had theirs there at once, each batch would have pairs of every caller and none would be over in time.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future

Turn = Future[None]


class Turns:
    """Hands out the turns in the order in which they were asked for; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = False
        self._waiting: deque[Turn] = deque()

    @property
    def waiting(self) -> int:
        """About how many wait."""
        return len(self._waiting)

    def ask(self) -> Turn:
        """A future that is done once it is the caller's turn; the caller then has to :meth:`leave`, or cancels it."""
        turn: Turn = Future()
        with self._lock:
            if self._taken:
                self._waiting.append(turn)
                return turn
            self._taken = True
        turn.set_result(None)
        return turn

    def leave(self, turn: Turn) -> None:
        """End a turn, or the wait for it."""
        if turn.cancel():  # it had not come; next() passes it over
            return
        while (following := self._next()) is not None:
            if following.set_running_or_notify_cancel():
                return following.set_result(None)

    def _next(self) -> Turn | None:
        with self._lock:
            self._taken = bool(self._waiting)
            return self._waiting.popleft() if self._waiting else None
