"""Worker: a thread that turns the queue into results. Schedule, run, resolve."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from millpond.engine.call import Call
from millpond.engine.lane import DeviceLane, Lanes
from millpond.engine.request import Request
from millpond.engine.scheduler import Scheduler

logger = logging.getLogger(__name__)

Result = tuple[Request, npt.NDArray[np.float32]]


class Runs(Protocol):
    """What the worker drives: the runner, or a test's recording of one."""

    def run(self, requests: Sequence[Request]) -> list[Result]:
        """Each request with its result."""
        ...


class Worker:
    """One lane's loop; a caller with little to do may take a turn in its own thread."""

    def __init__(self, scheduler: Scheduler, runner: Runs, *, name: str, lanes: Lanes | None = None) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._lanes = lanes or DeviceLane()
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def join(self) -> None:
        """Wait until the scheduler is closed and its queue worked off."""
        if self._thread is not threading.current_thread():
            self._thread.join()

    def take_turn(self, *, claimed: bool = False) -> bool:
        """Run a batch in the calling thread, if a lane is free and something waits; whether there was one.

        ``claimed``: the thread is a worker's, in a future's callback, which has its lane already.
        """
        if claimed:
            return self._lanes.shared and self._turn(assisting=True)
        if not self._lanes.claim(wait=False):
            return False
        try:
            return self._turn(assisting=True)
        finally:
            self._lanes.release()

    def _loop(self) -> None:
        self._lanes.enter()
        # Waits without a claim, then claims: what comes in between is in the same batch.
        while self._scheduler.wait():
            self._lanes.claim(wait=True)
            try:
                self._turn()
            finally:
                self._lanes.release()

    def _turn(self, *, assisting: bool = False) -> bool:
        """One batch; a method of its own, so that nothing of it is held while the next one is waited for."""
        requests = self._scheduler.pick(1 + self._lanes.free(), prepare=not assisting)
        if not requests:  # another lane has them
            return False
        try:
            self._run_and_resolve(requests)
        finally:
            self._scheduler.done()
        return True

    def _run_and_resolve(self, requests: list[Request]) -> None:
        tokens = sum(request.length for request in requests)
        try:
            with self._lanes.running(tokens, alone=self._scheduler.empty):
                results = self._run(requests)
        except Exception as error:  # the loop serves everyone: only this batch's callers hear of it
            return fail(requests, error)
        except BaseException:  # the caller whose thread this is was interrupted; the others' texts wait for the rest
            self._scheduler.put_back(requests)
            raise
        try:
            self._resolve(results)
        except BaseException as error:
            fail(requests, error)
            if not isinstance(error, Exception):
                raise

    def _run(self, requests: Sequence[Request]) -> list[Result]:
        """Run a batch; what does not run is halved until the request at fault is alone."""
        requests = [request for request in requests if not request.call.done]
        if not requests:
            return []
        try:
            results = self._runner.run(requests)
            self._scheduler.recover()
            return results
        except Exception as error:
            memory = is_out_of_memory(error)
            if len(requests) == 1:
                logger.exception("a text of %d tokens could not be run", requests[0].length)
                requests[0].call.fail(error)
                return []
            tokens = sum(request.length for request in requests)
            logger.warning("a batch of %d tokens failed (%s); halving it", tokens, type(error).__name__)
        # Outside the except block: the traceback would hold the failed forward's tensors alive.
        if memory:
            self._scheduler.shrink(tokens // 2)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        # By length, so that the halves separate the long from the short.
        ordered = sorted(requests, key=lambda request: request.length)
        middle = len(ordered) // 2
        return self._run(ordered[:middle]) + self._run(ordered[middle:])

    @staticmethod
    def _resolve(results: Sequence[Result]) -> None:
        by_call: dict[Call, tuple[list[int], list[npt.NDArray[np.float32]]]] = defaultdict(lambda: ([], []))
        for request, result in results:
            slots, rows = by_call[request.call]
            slots.append(request.slot)
            rows.append(result)
        for call, (slots, rows) in by_call.items():
            try:
                call.deliver(slots, rows)
            except Exception as error:  # a progress callback, say: this caller's trouble, not the loop's
                call.fail(error)


def fail(requests: Sequence[Request], error: BaseException) -> None:
    """Tell the callers of a batch that it could not be resolved."""
    logger.error("a batch could not be resolved", exc_info=error)
    for request in requests:
        request.call.fail(error)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on any device."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(
        sign in str(error) for sign in ("out of memory", "not enough memory", "DefaultCPUAllocator: can't allocate")
    )
