"""Dispatcher: calls admitted, worked on, committed to the cache and released; the threads of an engine."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

from millpond.backends.device_errors import LostDevice, LostDevices
from millpond.engine.execute.cores import process_cores
from millpond.engine.execute.direct import Direct, DirectText, most_at_once
from millpond.engine.execute.direct_item import DirectItem
from millpond.engine.execute.interrupts import defer_sigint
from millpond.engine.execute.overlapping_worker import OverlappingWorker
from millpond.engine.execute.worker import Worker
from millpond.engine.execute.worker_slots import CpuWorkerSlots, DeviceWorkerSlot, WorkerSlots
from millpond.engine.input.plan import Plan
from millpond.engine.output.assemble import assemble
from millpond.engine.schedule.admission import Admission
from millpond.engine.schedule.call import Call, CallOptions
from millpond.engine.schedule.committer import Committer
from millpond.engine.schedule.counters import Counters
from millpond.engine.schedule.intake import Intake
from millpond.engine.schedule.scheduler import Scheduler
from millpond.engine.schedule.timing import CallFuture
from millpond.engine.schedule.truncation import TruncationLog
from millpond.errors import EngineClosedError, MillpondError
from millpond.support.heap import HEAP
from millpond.support.processor import usable_cores
from millpond.values.inputs import Item, TokenIds
from millpond.values.stats import EngineStats

if TYPE_CHECKING:
    from millpond.backends.entity_head import EntityHead
    from millpond.cache.vector_cache import VectorCache
    from millpond.engine.loading import Replicas

logger = logging.getLogger(__name__)

# Seconds until a thread in a future's callback looks for work again, while other threads work on its call.
_CALLBACK_WAIT = 0.002


class Dispatcher:
    """Everything between a checked request and its future."""

    def __init__(self, replicas: Replicas, *, budget: int, max_queue: int, cache: VectorCache | None) -> None:
        self._replicas = replicas
        self._model = replicas.model
        self._scheduler = Scheduler(budget, prepare=lambda calls: self._intake.prepare(calls))
        self._name = f"millpond-{id(self):x}"
        feeders = _intake_threads(replicas)
        self.threads = ThreadPoolExecutor(feeders, thread_name_prefix=f"{self._name}-intake")
        self.large_thread = ThreadPoolExecutor(1, thread_name_prefix=f"{self._name}-large")
        # As many as may compute or wait for a core; each is started when it is needed.
        most = most_at_once(process_cores())
        self._direct_threads = ThreadPoolExecutor(most, thread_name_prefix=f"{self._name}-direct")
        self._committer: Committer | None = None
        if cache is not None:
            name = f"{self._name}-commit"
            self._committer = Committer(cache, namespace=self._namespace, budget=budget, name=name)
        self._pid = os.getpid()
        self.counters = Counters()
        self.truncation_log = TruncationLog()
        self._admission = Admission(max_queue, self.counters)
        self._lost_devices = LostDevices(len(replicas.runners))
        self.workers = self._workers()
        self._intake = Intake(
            scheduler=self._scheduler,
            encoder=self._model.encoder,
            threads=self.threads,
            feeders=feeders,
            large_thread=self.large_thread,
            cache=cache,
            namespace=self._namespace,
            batch_tokens=budget * len(self.workers),
        )
        for worker in self.workers:
            worker.start()

    def _workers(self) -> list[Worker]:
        """One for each slot of each device."""
        workers: list[Worker] = []
        for runner in self._replicas.runners:
            options: dict[str, Any] = {
                "name": f"{self._name}-{runner.model.device}-{len(workers)}",
                "counters": self.counters,
                "device": runner.model.device,
                "lost_devices": self._lost_devices,
            }
            if runner.model.overlaps:
                workers.append(OverlappingWorker(self._scheduler, runner, **options))
                continue
            slots: WorkerSlots = DeviceWorkerSlot()
            if runner.model.threads is not None:
                slots = CpuWorkerSlots(runner.model.threads, process_cores())
            workers += [Worker(self._scheduler, runner, slots=slots, **options) for _ in range(slots.count)]
        return workers

    def run_in_caller(self, future: Future[Any]) -> None:
        """Run batches in the calling thread, which waits for ``future``, while a slot is free.

        A small call then wakes two threads fewer. A thread whose state would change or block a batch leaves its call to
        the workers. In a future's callback other threads wait for this one: there it works until the call is done.
        """
        in_callback = self.in_callback
        if in_callback and not self.workers[0].shared and any(worker.current for worker in self.workers):
            future.cancel()
            raise MillpondError(
                "this call would wait for the thread that it is made in: a future's callback runs in the engine's own "
                "thread; use engine.submit there, or make the call in a thread of yours"
            )
        if future.done() or (not in_callback and self._leaves_work):
            return self._scheduler.wake()
        self._admission.enter_caller()
        try:
            while True:
                ran = self.workers[0].take_turn()
                if future.done() or (not in_callback and (not ran or self._leaves_work)):
                    break
                if not ran:
                    wait([future], timeout=_CALLBACK_WAIT)  # for other slots, or for texts to be tokenized
        finally:
            with defer_sigint():
                self._scheduler.wake()
                self._admission.leave_caller()

    def submit(
        self, items: Sequence[Item], plan: Plan, options: CallOptions, *, owner: object = None
    ) -> CallFuture[Any]:
        """Queue a call; ``owner``, whose end stops the dispatcher, is kept alive until the call is over."""
        self.check_process()
        self._check_devices()
        # The cache holds vectors of texts and of token ids, in different namespaces: a mixture is not cached.
        caches = self._committer is not None and plan.task == "embed" and len({type(item) for item in items}) <= 1
        self._replicas.prepare(plan.output)
        call = Call(
            items,
            plan,
            native_width=self._model.width(plan.output),
            assemble=assemble,
            refill=self._intake.refill,
            commit=self._committer.commit if caches and self._committer is not None else None,
            labels=self._model.labels(plan.output),
            options=options,
            truncation_log=self.truncation_log,
            why_not_finite=lambda: self._replicas.why_not_finite,
        )
        self._admission.admit(call, owner, len(items) if options.admit is None else options.admit)
        # A future keeps its callbacks for ever: the call, and its rows, must not stay alive with its result.
        held = [call]
        call.future.add_done_callback(lambda _: self._release(held.pop()))
        try:
            # In a callback, no work is left to a worker: it may be the thread that waits.
            crowded = self._crowded and not self.in_callback
            self._intake.admit(call, inline=options.inline, caches=caches, crowded=crowded, whole=self._tokenizes)
        except BaseException as error:
            if not (isinstance(error, RuntimeError) and call.done):  # the engine was closed: the future says so
                call.future.cancel()  # the caller was interrupted and no longer waits; close() must not wait either
                raise
        return call.future

    def direct(self, plan: Plan) -> Direct | None:
        """What runs single items by a plan while nothing else runs; ``None``: they are always calls."""
        model, encoder = self._replicas.runner.model, self._model.encoder
        single = len(self._replicas.runners) == 1 and self._committer is None and model.backend == "native"
        if not single or model.threads is None or plan.adapter >= 0 or plan.pairs is not None:
            return None
        parts: dict[str, Any] = {
            "threads": model.threads,
            "cores": process_cores(),
            "admission": self._admission,
            "counters": self.counters,
            "executor": self._direct_threads,
        }
        if plan.task == "embed":
            if plan.form != "text" or plan.output_dtype != "float32" or plan.codes or encoder.rows is not None:
                return None
            vector = model.text_vector(plan.output, width=plan.width, unit=plan.normalize, skip=plan.skip)
            if vector is not None:
                return DirectText(vector, plan, encoder.texts, **parts)
        kinds = {"embed": "pooled", "token_embed": "tokens", "score": "logits"}
        if kinds.get(plan.task) != plan.output.kind or plan.step_tag_id is not None:
            return None
        return DirectItem(model, plan, encoder, native_width=self._model.width(plan.output), **parts)

    def close(self, *, timeout: float | None = None, cancel: bool = False) -> None:
        """Finish what was admitted, then stop the threads; a forked process has nothing to finish."""
        was_open = not self.closed
        self._admission.close()
        if os.getpid() != self._pid:
            return
        if not self._admission.wait_until_idle(0.0 if cancel else timeout):
            self._drop()
        self.stop()
        # A caller may still run a batch of calls that were dropped: its rows belong into the cache.
        self._admission.wait_for_callers()
        self.threads.shutdown()
        self.large_thread.shutdown()
        self._direct_threads.shutdown()
        if self._committer is not None:
            self._committer.close()
        if was_open and self.counters.truncated:
            logger.info("the engine that was closed has cut %d texts", self.counters.truncated)

    def _drop(self) -> None:
        """Fail the calls that have no result; their callers get the error, and the cache the rows computed so far."""
        calls = [call for call in self._admission.calls() if not call.done]
        if calls:
            texts = sum(call.size for call in calls)
            logger.warning("closing the engine drops %d unfinished calls with %d texts", len(calls), texts)
        for call in calls:
            call.fail(EngineClosedError("the engine was closed before this call was finished; make a new one"))

    def stop(self) -> None:
        """Cancel the calls and stop the threads: the program ends, or the engine is garbage-collected.

        May run in any thread, the dispatcher's own included. A forked process has none of the threads.
        """
        if os.getpid() != self._pid:
            return
        self._admission.close()
        for call in self._admission.calls():
            call.future.cancel()
        self._scheduler.close()
        if not self.in_callback:  # a worker that joins another would wait for the core that it holds itself
            for worker in self.workers:
                worker.join()
        self.threads.shutdown(wait=False)
        self.large_thread.shutdown(wait=False)
        self._direct_threads.shutdown(wait=False)
        if self._committer is not None:
            self._committer.close(wait=False)

    @property
    def entity_head(self) -> EntityHead:
        """The head of a GLiNER."""
        assert self._replicas.entity_head is not None
        return self._replicas.entity_head

    @property
    def _crowded(self) -> bool:
        return self._admission.running_calls > len(self.workers)  # callers then leave the work to the workers

    @property
    def _leaves_work(self) -> bool:
        return self._crowded or self._replicas.runner.model.leaves_caller()

    @property
    def in_callback(self) -> bool:
        """Whether the calling thread is one of the dispatcher's: it runs a future's callback."""
        return threading.current_thread().name.startswith(self._name)

    @property
    def _tokenizes(self) -> bool:
        """Whether the calling thread is one of those that tokenize: it runs a future's callback."""
        return threading.current_thread().name.startswith((f"{self._name}-intake", f"{self._name}-large"))

    @property
    def closed(self) -> bool:
        """Whether new calls are refused."""
        return self._admission.closed

    def stats(self) -> EngineStats:
        """The counters."""
        self.check_process()
        return self._admission.stats()

    def check_room(self, texts: int) -> None:
        """Raise now what :meth:`submit` would raise for a call of this many texts."""
        self.check_process()
        self._check_devices()
        self._admission.check_room(texts)

    @property
    def lost_devices(self) -> tuple[LostDevice, ...]:
        """The devices that no batch can run on any more, in the order of their loss."""
        return self._lost_devices.lost

    def _check_devices(self) -> None:
        if not self._lost_devices.left and not self.closed:
            raise self._lost_devices.lost[-1].error()

    def check_process(self) -> None:
        """Check that this process has the threads; a forked one must not even touch their locks."""
        if os.getpid() != self._pid:
            raise EngineClosedError(
                "this engine was loaded in another process and does not survive a fork; load it after forking, "
                'or start workers with the "spawn" method'
            )

    def _release(self, call: Call) -> None:
        try:
            self._intake.drop(call)
            if isinstance(call.future.failure(), CancelledError):
                call.future.set_running_or_notify_cancel()  # wakes threads that wait for several futures
        finally:
            owner = self._admission.release(call)
        del owner  # here, where no lock is held
        HEAP.finished(call.size)

    def _namespace(self, call: Call) -> str:
        """Everything besides the text that decides a cached vector."""
        plan, spec = call.plan, self._model.spec
        parts: list[Any] = [spec.fingerprint, self._replicas.dtype, plan.prompt, plan.truncate, plan.limit]
        if plan.adapter >= 0:
            parts.append(spec.adapters[plan.adapter])
        if call.items and isinstance(call.items[0], TokenIds):
            parts.append(["token ids"])
        return json.dumps(parts)


def _intake_threads(replicas: Replicas) -> int:
    """Threads that tokenize: six for each GPU, four for a CPU, and at most half the cores.

    For a GPU at least two: while one waits for the tokenizer, the other makes requests of what it gave.
    """
    devices = sum(runner.model.overlaps for runner in replicas.runners)
    return max(2 if devices else 1, min(6 * devices or 4, usable_cores() // 2))
