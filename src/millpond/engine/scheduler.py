"""Scheduler: who is in the next batch.

Every active call has a line of its own. A batch visits the lines, the one served longest ago first, and takes from each
an equal share of the token budget; what is left over goes to the oldest again. So a single text that arrives behind a
million others is in the next batch, and nobody waits for ever.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from millpond.engine.call import Call
from millpond.engine.request import Request

# After this many lines whose first request does not fit into what is left, the batch is full.
_PATIENCE = 32

# So many batches in a row have to run before a budget that did not fit the memory grows again.
_CALM = 64


class Scheduler:
    """The queue between tokenization and the forward; all methods are thread-safe."""

    def __init__(self, budget: int) -> None:
        """``budget``: most tokens of a batch; a single longer request runs alone."""
        self._budget = self._most = budget
        self._calm = 0  # batches that ran since the budget last changed
        self._lines: dict[Call, deque[Request]] = {}  # in the order of service, least recent first
        self._ready = threading.Condition()
        self._closing = False

    def put(self, call: Call, requests: Sequence[Request]) -> None:
        """Append requests to a call's line."""
        with self._ready:
            self._lines.setdefault(call, deque()).extend(requests)
            self._ready.notify()

    def schedule(self) -> list[Request] | None:
        """The next batch, waiting for one; ``None`` once the scheduler is closed and empty."""
        while True:
            with self._ready:
                self._ready.wait_for(lambda: self._lines or self._closing)
                if not self._lines:
                    return None
                batch, served = self._pick()
            # Outside the lock: a call that runs low tokenizes its next texts.
            for call, left in served:
                try:
                    call.refill(left)
                except Exception as error:  # this call's trouble, not the worker's, whose thread it is
                    call.fail(error)
            if batch:
                return batch

    def close(self) -> None:
        """Let :meth:`schedule` return ``None`` when the lines are empty."""
        with self._ready:
            self._closing = True
            self._ready.notify_all()

    def shrink(self, budget: int) -> None:
        """Keep later batches to ``budget`` tokens: what was tried did not fit the memory."""
        with self._ready:
            self._budget = max(1, min(self._budget, budget))
            self._calm = 0

    def recover(self) -> None:
        """A batch ran: after many of them, try more tokens again, in case the memory was somebody else's."""
        if self._budget == self._most:
            return
        with self._ready:
            self._calm += 1
            if self._calm >= _CALM:
                self._budget = min(self._most, self._budget + max(1, self._budget // 4))
                self._calm = 0

    def _pick(self) -> tuple[list[Request], list[tuple[Call, int]]]:
        for call in [call for call in self._lines if call.done]:
            del self._lines[call]  # cancelled or failed: nobody waits for the rest
        batch: list[Request] = []
        served: dict[Call, int] = {}  # with what is left in line
        room = self._budget
        share = max(1, self._budget // max(1, len(self._lines)))
        for quota in (share, self._budget):
            misfits = 0
            for call, line in list(self._lines.items()):
                if room <= 0 or misfits > _PATIENCE:
                    break
                taken = self._take(line, quota, room, batch)
                if taken == 0:
                    misfits += 1
                    continue
                room -= taken
                del self._lines[call]
                if line:
                    self._lines[call] = line  # to the back
                served[call] = len(line)
        return batch, list(served.items())

    @staticmethod
    def _take(line: deque[Request], quota: int, room: int, batch: list[Request]) -> int:
        """Move requests from a line into the batch, to about ``quota`` tokens; returns the tokens moved."""
        taken = 0
        while line and taken < quota:
            length = line[0].length
            if length > room - taken and batch:
                break
            batch.append(line.popleft())
            taken += length
        return taken
