"""Throughput: rates over the last seconds."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque

# Whole seconds that a rate covers.
WINDOW = 10


class Throughput:
    """Named amounts, summed per second; any thread may add."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._seconds: deque[tuple[int, Counter[str]]] = deque()  # oldest first
        self._lock = threading.Lock()

    @property
    def uptime(self) -> float:
        """Seconds since this object was created."""
        return time.monotonic() - self._start

    def add(self, **amounts: int) -> None:
        """Count amounts for the current second."""
        now = int(time.monotonic())
        with self._lock:
            if not self._seconds or self._seconds[-1][0] < now:
                self._seconds.append((now, Counter()))
                self._forget(now)
            counts = self._seconds[-1][1]
            for name, amount in amounts.items():
                counts[name] += amount

    def rate(self, name: str) -> float:
        """Average of ``name`` per second."""
        now = time.monotonic()
        with self._lock:
            self._forget(int(now))
            amount = sum(counts[name] for _, counts in self._seconds)
        # The oldest second counts in full, the current one up to now.
        return amount / max(1.0, min(now - self._start, WINDOW + now % 1))

    def _forget(self, now: int) -> None:
        while self._seconds and self._seconds[0][0] < now - WINDOW:
            self._seconds.popleft()
