"""WorkerPool: the workers of a run, each an actor of Ray; one that dies is replaced, and its calls are made again."""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from millpond.errors import EngineClosedError, MillpondError
from millpond.ingest.ray.cluster import resources
from millpond.ingest.ray.worker import CacheLosses, Reply, Worker, WorkerSettings

logger = logging.getLogger(__name__)

CALLS_PER_WORKER = 2  # one is embedded while another is written or on its way
# A text that kills every worker that embeds it is given up after so many of them.
_MAX_ATTEMPTS = 2
_CLOSE_SECONDS = 20.0
_SLOW_START_SECONDS = 60.0
_NO_LOSSES = CacheLosses(0, None)


class WorkerDeathsError(MillpondError):
    """Every worker that got a call died."""


@dataclass(eq=False)
class _Call:
    method: str
    arguments: tuple[Any, ...]
    future: Future[Any] = field(default_factory=Future)
    attempts: int = 0


@dataclass(eq=False)
class _Slot:
    """The place of a worker: its actor, which may have been replaced."""

    actor: Any
    ready: bool = False
    calls: int = 0
    losses: CacheLosses = _NO_LOSSES


class WorkerPool:
    """Sends each call to the worker that has the fewest, at most two each; the others wait here.

    The workers start with the first call, so that a run with nothing to embed starts none.

    A worker that dies, with its machine or by itself, is replaced, and its calls are made again, by any worker: they
    may be repeated safely, since a write replaces rows with the same id.

    Args:
        settings: What every worker gets.
        workers: How many.
        num_cpus: CPU cores of each.
        num_gpus: GPUs of each; 0.25 puts four workers on a GPU.
    """

    def __init__(self, settings: WorkerSettings, *, workers: int, num_cpus: float, num_gpus: float) -> None:
        self.workers = workers
        self._settings = settings
        # One call beside those that embed and write, so that stop() is answered at once.
        self._actor_class = ray.remote(Worker).options(
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            max_concurrency=CALLS_PER_WORKER + 1,
            max_restarts=0,
            max_task_retries=0,
        )
        self._slots: list[_Slot] = []
        self._waiting: deque[_Call] = deque()
        self._deaths_in_start = 0  # since a worker last became ready
        self._former_losses = 0  # of workers that died
        self._error: BaseException | None = None
        # All state belongs to one thread, which does what these say. Ray's own threads only put them here.
        self._events: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._warned = False
        self._thread: threading.Thread | None = None

    @property
    def losses(self) -> CacheLosses:
        """What the workers' caches could not store."""
        slots = list(self._slots)
        errors = [slot.losses.error for slot in slots if slot.losses.error is not None]
        count = self._former_losses + sum(slot.losses.unwritten for slot in slots)
        return CacheLosses(count, errors[0] if errors else None)

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """Call a method of any worker; the future can be cancelled until a worker gets the call.

        It fails with the worker's error, also with one of loading the model.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="millpond-workers", daemon=True)
            self._thread.start()
            self._events.put(self._start_all)
        call = _Call(method, arguments)
        self._events.put(lambda: self._dispatch(call))
        return call.future

    def stop(self) -> None:
        """Let no worker wait for a database that does not answer."""
        self._events.put(lambda: [slot.actor.stop.remote() for slot in self._slots if slot.ready])

    def close(self) -> None:
        """End the workers; calls that wait are cancelled."""
        if self._thread is None:
            return
        self._events.put(None)
        self._thread.join()
        self._thread = None
        closing = [slot.actor.close.remote() for slot in self._slots if slot.ready]
        if closing:
            with suppress(RayError):
                ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_SECONDS)
        for slot in self._slots:
            ray.kill(slot.actor)

    # --------------------------------------------------------------------------------------------------- in the thread

    def _work(self) -> None:
        while (event := self._next_event()) is not None:
            try:
                event()
            except BaseException as error:  # Ray itself has failed: nobody may wait for ever
                self._fail(error)
        self._error = EngineClosedError("the workers were closed")
        for call in self._waiting:
            call.future.cancel()

    def _next_event(self) -> Callable[[], object] | None:
        """Wait for the next event; tell once if no worker has started for long."""
        if not self._warned and not any(slot.ready for slot in self._slots):
            try:
                return self._events.get(timeout=_SLOW_START_SECONDS)
            except queue.Empty:
                self._warned = True
                logger.warning(
                    "no worker has started in %.0f s; the cluster has %s, of which other jobs may hold a part",
                    _SLOW_START_SECONDS,
                    {name: count for name, count in resources().items() if name in ("CPU", "GPU")},
                )
        return self._events.get()

    def _start_all(self) -> None:
        self._slots = [_Slot(self._actor_class.remote(self._settings)) for _ in range(self.workers)]
        for slot in self._slots:
            self._load(slot)

    def _load(self, slot: _Slot) -> None:
        actor = slot.actor
        self._when_done(actor.load.remote(), lambda result: self._loaded(slot, actor, result))

    def _when_done(self, ref: Any, then: Callable[[Future[Any]], object]) -> None:
        ref.future().add_done_callback(lambda result: self._events.put(lambda: then(result)))

    def _loaded(self, slot: _Slot, actor: Any, result: Future[Any]) -> None:
        error = result.exception()
        if error is None:
            slot.ready = True
            self._deaths_in_start = 0
            self._send_waiting()
        elif isinstance(error, RayActorError):
            self._deaths_in_start += 1
            if self._deaths_in_start < _MAX_ATTEMPTS * self.workers:
                self._replace(slot, actor)
            else:
                self._fail(
                    EngineClosedError(
                        f"{self._deaths_in_start} workers died while they loaded {self._settings.engine.model!r} "
                        f"({_reason(error)}); their machines may lack the memory: ask for fewer workers on each, by a "
                        "larger num_cpus or num_gpus"
                    )
                )
        else:
            self._fail(_cause(error))

    def _dispatch(self, call: _Call) -> None:
        if self._error is not None:
            if call.attempts or call.future.set_running_or_notify_cancel():
                call.future.set_exception(self._error)
            return
        free = [slot for slot in self._slots if slot.ready and slot.calls < CALLS_PER_WORKER]
        if not free:
            self._waiting.append(call)
            return
        # Calls that are made again run already.
        if not call.attempts and not call.future.set_running_or_notify_cancel():
            return
        slot = min(free, key=lambda each: each.calls)
        slot.calls += 1
        actor = slot.actor
        self._when_done(
            getattr(actor, call.method).remote(*call.arguments),
            lambda result: self._finished(call, slot, actor, result),
        )

    def _finished(self, call: _Call, slot: _Slot, actor: Any, result: Future[Any]) -> None:
        if slot.actor is actor:
            slot.calls -= 1
        error = result.exception()
        if error is None:
            reply: Reply = result.result()
            if slot.actor is actor:
                slot.losses = reply.losses
            call.future.set_result(reply.value)
        elif isinstance(error, RayActorError):
            if slot.actor is actor:
                logger.warning("a worker died (%s); another one takes its place and its work", _reason(error))
                self._replace(slot, actor)
            call.attempts += 1
            if call.attempts < _MAX_ATTEMPTS:
                self._dispatch(call)
            else:
                call.future.set_exception(
                    WorkerDeathsError(f"{_MAX_ATTEMPTS} workers died while they embedded it ({_reason(error)})")
                )
        else:
            call.future.set_exception(_cause(error))
        self._send_waiting()

    def _send_waiting(self) -> None:
        for _ in range(len(self._waiting)):
            if not any(slot.ready and slot.calls < CALLS_PER_WORKER for slot in self._slots) and self._error is None:
                return
            self._dispatch(self._waiting.popleft())

    def _replace(self, slot: _Slot, actor: Any) -> None:
        ray.kill(actor)  # one that only seems dead holds its resources
        self._former_losses += slot.losses.unwritten
        slot.actor = self._actor_class.remote(self._settings)
        slot.ready, slot.calls, slot.losses = False, 0, CacheLosses(0, slot.losses.error)
        self._load(slot)

    def _fail(self, error: BaseException) -> None:
        """Nothing can be embedded any more."""
        if self._error is None:
            self._error = error
        self._send_waiting()


def _cause(error: BaseException) -> BaseException:
    """The exception that a worker raised, without Ray's wall of text around it."""
    cause = getattr(error, "cause", None) if isinstance(error, RayTaskError) else None
    return cause if isinstance(cause, BaseException) else error


def _reason(error: BaseException) -> str:
    """The telling part of Ray's message about a death."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = next((line for line in lines if "exit detail" in line.lower() or "killed" in line.lower()), None)
    if lines and "creation task" in lines[0]:
        told = lines[-1]  # of a traceback: the error itself
    return (told or (lines[0] if lines else type(error).__name__)).partition(" Some common causes")[0][:200]
