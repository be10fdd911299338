"""Worker: a thread that turns queued requests into results. Schedule, run, resolve."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from millpond.backends.device_errors import LostDevice, LostDevices, is_device_lost, is_out_of_memory
from millpond.engine.execute.interrupts import defer_sigint
from millpond.engine.execute.results import RequestResult
from millpond.engine.execute.worker_slots import DeviceWorkerSlot, WorkerSlots
from millpond.engine.schedule.call import Call
from millpond.engine.schedule.counters import Counters
from millpond.engine.schedule.request import Request
from millpond.engine.schedule.scheduler import Scheduler
from millpond.support.fork import computing

logger = logging.getLogger(__name__)


class RunsBatches(Protocol):
    """Runs a batch and waits for it: a runner, or a test's recording."""

    def run(self, requests: Sequence[Request]) -> list[RequestResult]:
        """Each request with its result."""

    def free_memory(self) -> None:
        """Give cached memory of the device back."""


class Worker:
    """The loop of one slot; a caller that waits for a small call may run a batch in its own thread.

    If the device is lost, the loop ends: the calls of its unfinished batches fail, since one of them may be the cause,
    and what waits is left to the other devices. When the last one is lost, every call fails.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: RunsBatches,
        *,
        name: str,
        slots: WorkerSlots | None = None,
        counters: Counters | None = None,
        device: str | None = None,
        lost_devices: LostDevices | None = None,
    ) -> None:
        """``device``: its name in errors; ``lost_devices``: the engine's."""
        self._scheduler = scheduler
        self._runner = runner
        self._slots = slots or DeviceWorkerSlot()
        self._counters = counters or Counters()
        self._device = device or name
        self._lost_devices = lost_devices or LostDevices()
        self._lost: LostDevice | None = None
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def join(self) -> None:
        """Wait until the scheduler is closed and its queues are empty."""
        if self._thread is not threading.current_thread():
            self._thread.join()

    @property
    def current(self) -> bool:
        """Whether the calling thread is this worker's: it runs a future's callback."""
        return self._thread is threading.current_thread()

    @property
    def shared(self) -> bool:
        """Whether any thread may run a batch."""
        return self._slots.shared

    def take_turn(self) -> bool:
        """Run a batch in the calling thread, if a slot is free and requests wait; returns whether it ran one."""
        with defer_sigint():
            return self._turn(in_caller=True)

    def _loop(self) -> None:
        self._slots.enter()
        while self._lost is None and self._scheduler.wait():
            try:
                self._turn()
            except Exception:  # a bug; the worker must go on
                logger.exception("a batch was lost")

    def _turn(self, *, in_caller: bool = False) -> bool:
        """One batch; in a method, so that none of its objects stay alive while the worker waits for the next one.

        The slot is claimed only to pick and run it: requests that arrive before the claim are in the same batch, and a
        future's callback may wait for another engine that needs this core.
        """
        if not self._slots.claim(wait=not in_caller):
            return False
        results: list[RequestResult] = []
        try:
            # The main thread's OpenMP threads are awake on the cores where another slot would run.
            awake = in_caller and threading.current_thread() is threading.main_thread()
            others = 0 if awake else self._slots.free()
            requests = self._scheduler.pick(1 + others, prepare=not in_caller)
            if requests:
                results = self._run_batch(requests)
        finally:
            self._scheduler.done()
            self._slots.release()
        self._resolve_batch(requests, results)
        return bool(requests)  # empty: another slot took them

    def _run_batch(self, requests: list[Request]) -> list[RequestResult]:
        """The results of a batch; a request without one has failed, and its call has the error."""
        tokens = sum(request.length for request in requests)
        begun = self._counters.begin()
        try:
            with self._slots.running(tokens, alone=self._scheduler.empty):
                results = self._run(requests)
            self._note(begun, results)
        except Exception as error:  # the worker goes on; this batch's callers get the error
            fail(requests, error)
            return []
        except BaseException:  # the caller in whose thread this runs was interrupted; the batch waits for a worker
            self._scheduler.put_back(requests)
            raise
        finally:
            self._counters.end(begun)
        return results

    def _resolve_batch(self, requests: Sequence[Request], results: Sequence[RequestResult]) -> None:
        try:
            self._resolve(results)
        except BaseException as error:
            fail(requests, error)
            if not isinstance(error, Exception):
                raise

    def _run(self, requests: Sequence[Request]) -> list[RequestResult]:
        """Run a batch; one that fails is halved until the request at fault is alone."""
        requests = [request for request in requests if not request.call.done]
        if not requests:
            return []
        if self._lost is not None:  # with an earlier part of the batch; no blame falls on this one
            self._scheduler.put_back(requests)
            return []
        try:
            with computing():
                results = self._runner.run(requests)
            self._scheduler.recover()
            return results
        except Exception as error:
            if self._loses(error):
                self._fail_lost(requests)
                return []
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
            self._free_memory()
        # By length, so that the halves separate the long from the short.
        ordered = sorted(requests, key=lambda request: request.length)
        middle = len(ordered) // 2
        return self._run(ordered[:middle]) + self._run(ordered[middle:])

    def _free_memory(self) -> None:
        """Give cached memory of the device back, which may be too scattered for a batch."""
        try:
            self._runner.free_memory()
        except Exception as error:  # the halves may fit even so
            if not self._loses(error):
                logger.warning("memory of %s could not be freed (%s)", self._device, error)

    def _loses(self, error: Exception) -> bool:
        """Whether the device is lost; ``error`` came from it, or it was lost before."""
        if self._lost is None and not self._slots.shared and is_device_lost(error):
            self._lost = LostDevice.of(self._device, error)
            self._lost_devices.add(self._lost)
            left = self._lost_devices.left
            logger.critical("the device %s is lost; %d are left", self._device, left, exc_info=error)
            if not left:
                self._scheduler.refuse(self._lost.error)
        return self._lost is not None

    def _fail_lost(self, requests: Sequence[Request]) -> None:
        """Fail the calls of a batch that the lost device had."""
        assert self._lost is not None
        for call in dict.fromkeys(request.call for request in requests):
            call.fail(self._lost.error())

    def _note(self, begun: float, results: Sequence[RequestResult]) -> None:
        """Count a batch before its callers get their results, so that they find it counted."""
        if results:
            self._counters.ran(begun, len(results), sum(len(request.ids) for request, _ in results))

    @staticmethod
    def _resolve(results: Sequence[RequestResult]) -> None:
        by_call: dict[Call, tuple[list[int], list[npt.NDArray[np.float32]]]] = defaultdict(lambda: ([], []))
        for request, result in results:
            slots, rows = by_call[request.call]
            slots.append(request.slot)
            rows.append(result)
        for call, (slots, rows) in by_call.items():
            try:
                call.deliver(slots, rows)
            except Exception as error:  # a progress callback's, for example: concerns this caller alone
                call.fail(error)


def fail(requests: Sequence[Request], error: BaseException) -> None:
    """Fail the calls of a batch that could not be resolved."""
    logger.error("a batch could not be resolved", exc_info=error)
    for request in requests:
        request.call.fail(error)
