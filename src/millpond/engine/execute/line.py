"""Line: single texts that wait for a core; who gets one takes others of the line along."""

from __future__ import annotations

import threading
from typing import Any

from millpond.engine.execute.cores import Cores, Turn

_SPARE = 1  # texts that are run at once beyond those that have a core


class Waiting(Turn):
    """A text and, once it was run, its output."""

    __slots__ = ("done", "marks", "output", "read", "tokens")

    def __init__(self, read: Any, tokens: int, marks: Any) -> None:
        super().__init__(_SPARE)
        self.read, self.tokens, self.marks = read, tokens, marks
        self.output: Any = None
        self.done = False  # by another thread, whether with an output or without

    def finish(self, output: Any) -> None:
        """Let its thread go on."""
        self.output, self.done = output, True
        self.over.release()


class Line:
    """The texts of one plan that wait; thread-safe."""

    def __init__(self, cores: Cores, *, most: int, most_tokens: int) -> None:
        """``most`` texts with up to ``most_tokens`` tokens are run together."""
        self._cores, self._most, self._most_tokens = cores, most, most_tokens
        self._lock = threading.Lock()
        self._line: list[Waiting] = []  # the oldest first

    def claim(self, own: Waiting, seconds: float) -> list[Waiting] | None:
        """Wait so long for a core; returns whose texts the calling thread runs along on it.

        ``None``: it has no core, and perhaps the output of another thread.
        """
        with self._lock:
            self._line.append(own)
        claimed = False
        try:
            claimed = self._cores.claim(seconds=seconds, turn=own)
        finally:
            with self._lock:
                taken = own not in self._line
                if not taken:
                    self._line.remove(own)
                along = self._along(own.tokens) if claimed else None
        if taken and not own.done:
            own.over.acquire()
        return along

    def _along(self, tokens: int) -> list[Waiting]:
        """Those that are run together with a text of so many tokens."""
        along: list[Waiting] = []
        for other in self._line:
            tokens += other.tokens
            if tokens > self._most_tokens or len(along) + 1 == self._most:
                break
            if self._cores.withdraw(other):  # else it has just got a core itself, or waits no longer
                along.append(other)
        for other in along:
            self._line.remove(other)
        return along
