"""OverlappingWorker: the loop of a device that computes while its host packs the next batch."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

from millpond.engine.execute.cuda.pipeline import Pending
from millpond.engine.execute.worker import Result, Worker, fail
from millpond.engine.schedule.counters import Counters
from millpond.engine.schedule.request import Request
from millpond.engine.schedule.scheduler import Scheduler

logger = logging.getLogger(__name__)

# Batches on their way at most: one that runs, and one that begins the moment it ends.
_DEPTH = 2
# Tokens that must wait for a second batch to be sent behind the first. Fewer are better off in one batch with those
# that come while the first one runs: the device has no gap that a small batch would fill.
_AHEAD = 2048


class Starts(Protocol):
    """What such a worker drives: a runner whose device has streams."""

    def start(self, requests: Sequence[Request]) -> Pending:
        """Send a batch off."""
        ...

    def run(self, requests: Sequence[Request]) -> list[Result]:
        """Each request with its result."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class _Sent:
    requests: list[Request]
    pending: Pending
    begun: float  # as the meter has it


class OverlappingWorker(Worker):
    """One device's loop: schedule, send, and resolve what was sent before; in order, one thread.

    A batch that fails, when it is sent or when its results are asked for, is run again by itself, when nothing else is
    on its way that takes memory; from there on as any worker does, in halves.
    """

    def __init__(
        self, scheduler: Scheduler, runner: Starts, *, name: str, devices: int = 1, counters: Counters | None = None
    ) -> None:
        """``devices``: how many work off the scheduler; of what waits each takes its part."""
        super().__init__(scheduler, runner, name=name, counters=counters)
        self._starter = runner
        self._devices = devices
        self._ended = 0.0  # when the last batch did, as far as the host knows

    def _loop(self) -> None:
        sent: deque[_Sent] = deque()
        while sent or self._scheduler.wait():
            if not sent or (len(sent) < _DEPTH and self._scheduler.tokens >= _AHEAD):
                self._send(sent)
            else:
                self._finish(sent)

    def _send(self, sent: deque[_Sent]) -> None:
        requests = self._scheduler.pick(max(1, self._devices - self._scheduler.busy))
        if not requests:
            return
        begun = self._counters.begin()
        try:
            sent.append(_Sent(requests=requests, pending=self._starter.start(requests), begun=begun))
            return
        except Exception as error:
            self._counters.end(begun)
            logger.warning("a batch could not be sent off (%s); it runs by itself", type(error).__name__)
        # Outside the except block: the traceback would hold the failed forward's tensors alive.
        self._alone(requests, sent)

    def _finish(self, sent: deque[_Sent]) -> None:
        """Take the results of the oldest batch."""
        oldest = sent.popleft()
        try:
            results = oldest.pending.result()
            if not sent:
                self._scheduler.done()
        except Exception as error:
            self._counters.end(oldest.begun)
            logger.warning("a batch failed on its way (%s); it runs by itself", type(error).__name__)
        else:
            self._scheduler.recover()
            self._counters.end(oldest.begun)
            self._deliver(oldest.requests, results, max(oldest.begun, self._ended))
            return
        requests = oldest.requests
        del oldest  # with what it holds on the device
        self._alone(requests, sent)

    def _alone(self, requests: list[Request], sent: deque[_Sent]) -> None:
        """Run a batch that failed, behind all that are on their way."""
        while sent:
            self._finish(sent)
        begun = self._counters.begin()
        try:
            results = self._run(requests)
        except Exception as error:
            return fail(requests, error)
        finally:
            self._counters.end(begun)
        self._deliver(requests, results, begun)

    def _deliver(self, requests: Sequence[Request], results: Sequence[Result], begun: float) -> None:
        try:
            self._note(begun, results)
            self._ended = perf_counter()
            self._resolve(results)
        except Exception as error:  # the loop serves everyone: only this batch's callers hear of it
            fail(requests, error)
