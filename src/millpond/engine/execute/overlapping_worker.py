"""OverlappingWorker: the loop of a device that computes while the host packs the next batch."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

from millpond.engine.execute.results import RequestResult
from millpond.engine.execute.runner import PendingBatch
from millpond.engine.execute.worker import RunsBatches, Worker, fail
from millpond.engine.schedule.request import Request
from millpond.engine.schedule.scheduler import Scheduler

logger = logging.getLogger(__name__)

# Most launched batches: one that runs, and one that begins the moment it ends.
_DEPTH = 2
# A second batch is launched after the first if this many tokens wait. Fewer are better off in one batch with those
# that arrive while the first one runs: the device has no gap that a small batch could fill.
_AHEAD_TOKENS = 2048


class StartsBatches(RunsBatches, Protocol):
    """Launches batches: a runner whose device has streams."""

    def start(self, requests: Sequence[Request]) -> PendingBatch:
        """Launch a batch without waiting for it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _LaunchedBatch:
    requests: list[Request]
    pending: PendingBatch
    begun: float  # when the counters saw it begin


class OverlappingWorker(Worker):
    """The loop of one device: schedule, launch, and resolve what was launched before; in order, in one thread.

    A batch that fails, at its launch or later, is run again alone, when no other batch takes memory; if it fails again,
    in halves, as by any worker. If the device is lost, the batches that it had launched are still waited for: those
    whose results had arrived are delivered.
    """

    def __init__(self, scheduler: Scheduler, runner: StartsBatches, **options: Any) -> None:
        super().__init__(scheduler, runner, **options)
        self._starter = runner
        self._ended = 0.0  # when the host saw the last batch end

    def _loop(self) -> None:
        launched: deque[_LaunchedBatch] = deque()
        while self._lost is None and (launched or self._scheduler.wait()):
            try:
                if not launched or (len(launched) < _DEPTH and self._scheduler.tokens >= _AHEAD_TOKENS):
                    self._launch(launched)
                else:
                    self._finish(launched)
            except Exception:  # a bug; the worker must go on
                logger.exception("a batch was lost")
        while launched:
            self._finish(launched)
        self._scheduler.done()

    def _launch(self, launched: deque[_LaunchedBatch]) -> None:
        requests = self._scheduler.pick(max(1, self._lost_devices.left - self._scheduler.busy))
        if not requests:
            return
        begun = self._counters.begin()
        try:
            launched.append(_LaunchedBatch(requests=requests, pending=self._starter.start(requests), begun=begun))
            return
        except Exception as error:
            self._counters.end(begun)
            if self._loses(error):
                return self._fail_lost(requests)
            logger.warning("a batch could not be sent off (%s); it runs by itself", type(error).__name__)
        # Outside the except block: the traceback would hold the failed forward's tensors alive.
        self._alone(requests, launched)

    def _finish(self, launched: deque[_LaunchedBatch]) -> None:
        """Wait for the oldest batch and deliver its results."""
        oldest = launched.popleft()
        try:
            results = oldest.pending.result()
            if not launched:
                self._scheduler.done()
        except Exception as error:
            self._counters.end(oldest.begun)
            if self._loses(error):
                return self._fail_lost(oldest.requests)
            logger.warning("a batch failed on its way (%s); it runs by itself", type(error).__name__)
        else:
            self._scheduler.recover()
            self._counters.end(oldest.begun)
            self._deliver(oldest.requests, results, max(oldest.begun, self._ended))
            return
        requests = oldest.requests
        del oldest  # frees its memory on the device
        self._alone(requests, launched)

    def _alone(self, requests: list[Request], launched: deque[_LaunchedBatch]) -> None:
        """Run a batch that failed again, after all launched ones."""
        while launched:
            self._finish(launched)
        begun = self._counters.begin()
        try:
            results = self._run(requests)
        except Exception as error:
            return fail(requests, error)
        finally:
            self._counters.end(begun)
        self._deliver(requests, results, begun)

    def _deliver(self, requests: Sequence[Request], results: Sequence[RequestResult], begun: float) -> None:
        try:
            self._note(begun, results)
            self._ended = perf_counter()
            self._resolve(results)
        except Exception as error:  # the worker goes on; this batch's callers get the error
            fail(requests, error)
