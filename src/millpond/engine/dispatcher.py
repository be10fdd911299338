"""Dispatcher: calls admitted, worked on, committed to the cache and released; the threads behind an engine."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch

from millpond.cache import VectorCache
from millpond.engine.execute.cores import process_cores, usable
from millpond.engine.execute.cuda.worker import OverlappingWorker
from millpond.engine.execute.lanes import CpuLanes, DeviceLane, Lanes
from millpond.engine.execute.threads import Threads
from millpond.engine.execute.worker import Worker
from millpond.engine.input.plan import Plan
from millpond.engine.loading import LoadedModel
from millpond.engine.schedule.call import Call
from millpond.engine.schedule.counters import Counters
from millpond.engine.schedule.intake import Intake
from millpond.engine.schedule.scheduler import Scheduler
from millpond.engine.schedule.timing import CallFuture, CallTimer
from millpond.errors import CacheError, EngineClosedError, EngineOverloadedError, MillpondError
from millpond.inputs import Item, TokenIds, key_of
from millpond.stats import EngineStats

logger = logging.getLogger(__name__)

# Seconds between two looks for work, in a callback whose call others are at.
_NESTED_WAIT = 0.002


class Dispatcher:
    """Everything between a checked request and its future."""

    def __init__(self, loaded: LoadedModel, *, budget: int, max_queue: int, cache: VectorCache | None) -> None:
        self._loaded = loaded
        self._max_queue = max_queue
        self._cache = cache
        self._scheduler = Scheduler(budget, prepare=lambda calls: self._intake.prepare(calls))
        self._name = f"millpond-{id(self):x}"
        self.threads = ThreadPoolExecutor(_intake_threads(loaded), thread_name_prefix=f"{self._name}-intake")
        self._committer = ThreadPoolExecutor(1, thread_name_prefix=f"{self._name}-commit")
        self._intake = Intake(
            scheduler=self._scheduler,
            encoder=loaded.encoder,
            threads=self.threads,
            cache=cache,
            namespace=self._namespace,
        )
        self._gate = threading.Condition()
        self._waiting: dict[Call, object] = {}  # calls under way, and whom they keep alive
        self._texts = 0  # of those calls
        self._closed = False
        self._pid = os.getpid()
        self._pace = _Pace()
        self.counters = Counters()
        self.workers = self._workers()
        for worker in self.workers:
            worker.start()

    def _workers(self) -> list[Worker]:
        """One for each lane of each device."""
        workers: list[Worker] = []
        for runner in self._loaded.runners:
            lanes: Lanes = DeviceLane()
            if runner.overlaps:
                name = f"{self._name}-{runner.device}-{len(workers)}"
                devices = len(self._loaded.runners)
                workers.append(
                    OverlappingWorker(self._scheduler, runner, name=name, devices=devices, counters=self.counters)
                )
                continue
            if runner.device.type == "cpu":
                lanes = CpuLanes(Threads(runner.backbone), process_cores())
            name = f"{self._name}-{runner.device}"
            workers += [
                Worker(self._scheduler, runner, name=f"{name}-{len(workers)}", lanes=lanes, counters=self.counters)
                for _ in range(lanes.count)
            ]
        return workers

    def assist(self, future: Future[Any]) -> None:
        """Work on a small call in the thread that waits for it, while a lane is free.

        Two threads less have to be woken. What the thread's own settings would change is left to the workers. In a
        future's callback, where the thread is one that others wait for, until the call is done.

        Raises:
            MillpondError: A callback in the thread that drives a device, which would wait for itself.
        """
        inside = self.inside
        if inside and not self.workers[0].shared and any(worker.current for worker in self.workers):
            future.cancel()
            raise MillpondError(
                "this call would wait for the thread that it is made in: a future's callback runs in the engine's own "
                "thread; use engine.submit there, or make the call in a thread of yours"
            )
        try:
            while not future.done():
                if not inside and (self._crowded or _has_modes()):
                    break
                if not self.workers[0].take_turn():
                    if not inside:
                        break
                    wait([future], timeout=_NESTED_WAIT)  # for other lanes, or for texts to be tokenized
        finally:
            self._scheduler.wake()

    def submit(
        self,
        items: Sequence[Item],
        plan: Plan,
        *,
        inline: bool,
        progress: Callable[[int], object] | None,
        owner: object = None,
        first: int = 0,
        admit: int | None = None,
        timer: CallTimer | None = None,
    ) -> CallFuture[Any]:
        """Queue a call.

        Args:
            items: The checked items.
            plan: What to do with them.
            inline: Tokenize in this thread, which is going to :meth:`assist`.
            progress: Told how many distinct items are done, from the threads that do them.
            first: Index of the first item in the caller's list, for errors.
            owner: Kept alive until the call is over: whoever stops this object when it is dropped.
            admit: How many items ask for room in the queue, where not these: all of a request that is made of several
                calls with its first one, 0 with the others.
            timer: Of such a request; a call by itself has one of its own.

        Raises:
            EngineOverloadedError: Too many texts are waiting.
            EngineClosedError: Closed, or in a forked process.
        """
        # Of texts, or of token ids, which have keys of their own; a mixture would need two namespaces.
        caches = self._cache is not None and plan.task == "embed" and len({type(item) for item in items}) <= 1
        call = Call(
            items,
            plan,
            native_width=self._loaded.width(plan.readout),
            labels=self._loaded.labels(plan.readout),
            commit=self._commit if caches else None,
            progress=progress,
            refill=self._intake.refill,
            first=first,
            timer=timer,
        )
        self._admit(call, owner, len(items) if admit is None else admit)
        try:
            # In a callback nothing is left to a worker, which may be the one that waits.
            self._intake.admit(call, inline=inline, caches=caches, crowded=self._crowded and not self.inside)
        except BaseException:  # the caller was interrupted: nobody waits, and close() must not either
            call.future.cancel()
            raise
        return call.future

    def close(self) -> None:
        """Finish what was admitted, then stop the threads; in a fork there is nothing to finish."""
        if os.getpid() != self._pid:
            self._closed = True
            return
        with self._gate:
            self._closed = True
            self._gate.wait_for(lambda: not self._waiting)
        self.stop()
        self.threads.shutdown()
        self._committer.shutdown()

    def stop(self) -> None:
        """Stop the threads without waiting for calls: when the program ends, or nobody holds the engine any more.

        May run in any thread, these included. A fork has none of them.
        """
        if os.getpid() != self._pid:
            return
        with self._gate:
            self._closed = True
            abandoned = list(self._waiting)
        for call in abandoned:
            call.future.cancel()
        self._scheduler.close()
        if not self.inside:  # a worker that waits for another one would hold the core that this one waits for
            for worker in self.workers:
                worker.join()
        self.threads.shutdown(wait=False)
        self._committer.shutdown(wait=False)

    @property
    def _crowded(self) -> bool:
        """Whether more calls are under way than there are lanes: callers leave the work to the workers then."""
        return len(self._waiting) > len(self.workers)

    @property
    def inside(self) -> bool:
        """Whether the calling thread is one of this object's, in a future's callback, say."""
        return threading.current_thread().name.startswith(self._name)

    @property
    def closed(self) -> bool:
        """Whether new calls are refused."""
        return self._closed

    def stats(self) -> EngineStats:
        """The counters."""
        with self._gate:
            return self.counters.read(waiting_texts=self._texts, running_calls=len(self._waiting))

    def _admit(self, call: Call, owner: object, asked: int) -> None:
        if os.getpid() != self._pid:
            raise EngineClosedError(
                "this engine was loaded in another process and does not survive a fork; load it after forking, "
                'or start workers with the "spawn" method'
            )
        with self._gate:
            self._check_room(asked)
            self._waiting[call] = owner
            self._texts += call.size
            self._pace.begin()
        # Futures keep their callbacks: who holds one is not to hold its call, and the rows in it, beside the result.
        held = [call]
        call.future.add_done_callback(lambda _: self._release(held.pop()))

    def check_room(self, texts: int) -> None:
        """What :meth:`submit` would raise of a call of so many texts, at once.

        Raises:
            EngineOverloadedError: Too many texts are waiting.
            EngineClosedError: Closed.
        """
        with self._gate:
            self._check_room(texts)

    def _check_room(self, asked: int) -> None:
        if self._closed:
            raise EngineClosedError("the engine was closed; make a new one")
        waiting = self._texts
        if waiting and asked and waiting + asked > self._max_queue:
            wait = self._pace.seconds(waiting)
            self.counters.reject()
            raise EngineOverloadedError(
                f"{waiting} texts are waiting and {asked} more would pass max_queue={self._max_queue}; "
                f"retry in about {wait:.1f} s, or raise max_queue",
                retry_after=wait,
            )

    def _release(self, call: Call) -> None:
        try:
            self._intake.drop(call)
            if call.future.cancelled():
                call.future.set_running_or_notify_cancel()  # wakes whoever waits for several futures
                call.flush()
        finally:
            owner = self._forget(call)
        del owner  # outside the gate: it may have been the last reference, and stop this object

    def _forget(self, call: Call) -> object:
        """Stop counting a call; returns whom it kept alive."""
        with self._gate:
            owner = self._waiting.pop(call, None)
            self._texts -= call.size
            self._pace.count(call.size, idle=not self._waiting)
            self.counters.release(call.future, texts=call.size, hits=call.hits, misses=call.misses)
            self._gate.notify_all()
        return owner

    def _namespace(self, call: Call) -> str:
        """Everything besides the text that decides a cached vector."""
        plan = call.plan
        parts: list[Any] = [self._loaded.spec.fingerprint, self._loaded.dtype, plan.prompt, plan.truncate, plan.limit]
        if plan.adapter >= 0:
            parts.append(self._loaded.spec.adapters[plan.adapter])
        if call.items and isinstance(call.items[0], TokenIds):
            parts.append(["token ids"])
        return json.dumps(parts)

    def _commit(self, call: Call, slots: list[int], last: bool) -> None:
        try:
            self._committer.submit(self._write, call, slots, last)
        except RuntimeError:  # the program ends; what was computed is still worth a commit
            self._write(call, slots, last)

    def _write(self, call: Call, slots: list[int], last: bool) -> None:
        """Commit a group of vectors; a call ends with its last group, so what was returned was committed."""
        assert self._cache is not None
        try:
            keys = self._cache.keys(self._namespace(call), [key_of(call.items[slot]) for slot in slots])
            self._cache.put(keys, call.rows[slots], tokens=call.tokens[slots], truncated=call.truncated[slots])
        except CacheError as error:
            # The vectors are right all the same; losing them because the disk is full would be worse.
            logger.error("%d vectors could not be cached: %s", len(slots), error)
        except Exception as error:  # the caller must hear of it; nobody else is near
            return call.fail(error)
        if last:
            call.finish()


class _Pace:
    """How fast texts get done while there are any, for the advice in an overload error."""

    def __init__(self) -> None:
        self._texts = 0
        self._busy = 0.0  # seconds of finished busy stretches
        self._since: float | None = None  # when the present stretch began

    def begin(self) -> None:
        """Work arrived."""
        if self._since is None:
            self._since = time.monotonic()

    def count(self, texts: int, *, idle: bool) -> None:
        """``texts`` are done; ``idle``: nothing is left."""
        self._texts += texts
        if idle and self._since is not None:
            self._busy += time.monotonic() - self._since
            self._since = None

    def seconds(self, texts: int) -> float:
        """Time that ``texts`` will take, between 0.1 and 60 seconds."""
        busy = self._busy + (0.0 if self._since is None else time.monotonic() - self._since)
        return min(60.0, max(0.1, texts * max(busy, 1e-3) / max(self._texts, 1)))


def _has_modes() -> bool:
    """Whether the calling thread is inside ``torch.autocast`` or ``with torch.device(...)``, which workers are not."""
    return torch.is_autocast_enabled("cpu") or torch._C._len_torch_function_stack() > 0


def _intake_threads(loaded: LoadedModel) -> int:
    """Threads that tokenize: half the cores, of which a CPU's own forwards leave few; a GPU takes what six make."""
    devices = sum(runner.overlaps for runner in loaded.runners)
    return max(1, min(6 * devices or 4, usable() // 2))
