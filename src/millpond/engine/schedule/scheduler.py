"""Scheduler: which requests are in the next batch.

A batch visits the calls' queues, the one served longest ago first, and takes an equal share of the budget from each. As
a batch takes as long as everything in it, every second one is of small calls only while small and bulk calls wait, and
batches of bulk calls are smaller for a while after small ones were seen.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from millpond.engine.schedule.call import Call
from millpond.engine.schedule.request import Request
from millpond.values.inputs import size_of

# The batch is full after this many queues whose first request does not fit into the rest of the budget.
_MAX_MISFITS = 32

# Least budget of a batch when workers divide the waiting work: smaller matrix products waste the processor.
_MIN_BATCH_TOKENS = 256

# A rest of less than this fraction (one over this number) of a batch is added to the batch.
_LEFTOVER_SHARE = 8

# Weight of the earlier average in the exponential moving average of a worker's tokens per second.
_EMA_WEIGHT = 0.8

# A call is small while at most this fraction (one over this number) of the budget is queued for it.
_SMALL_SHARE = 8

# For this many batches after small calls met bulk ones, a batch of bulk ones has at most one over _BULK_SHARE of the
# budget: on a CPU with 4,096 tokens, bulk loses a tenth, and concurrent short texts wait less than a third as long.
_SMALL_BATCHES = 32
_BULK_SHARE = 4

# Characters per token, about, of texts that are not tokenized yet.
_CHARACTERS_PER_TOKEN = 4

# A budget that was reduced for lack of memory grows again after this many batches in a row that ran.
_RECOVERY_BATCHES = 64


class Scheduler:
    """The queues between tokenization and the forward; all methods are thread-safe."""

    def __init__(self, budget: int, *, prepare: Callable[[list[Call]], None] | None = None) -> None:
        self._budget = self._full_budget = budget  # _budget is less for a while after memory ran out
        self._ran = 0  # batches since the budget last changed
        self._queues: dict[Call, deque[Request]] = {}  # in the order of service, least recent first
        self._deferred: list[Call] = []  # not tokenized yet
        self._prepare = prepare
        self._lock = threading.RLock()
        self._ready = threading.Condition(self._lock)
        self._idle = 0  # threads waiting for work
        self._tokens = 0  # of the queued requests
        self._small_turn = True  # whether the next batch is of small calls only, if both kinds wait
        self._small_batches = 0  # batches of bulk calls that are still to be small
        self._running: dict[int, tuple[int, float]] = {}  # by thread: tokens of its batch, and its start
        self._rate = 0.0  # tokens per second of a worker, moving average
        self._closing = False
        self._refusal: Callable[[], Exception] | None = None  # makes the error of every call, once no device is left

    @property
    def empty(self) -> bool:
        """Whether no request waits."""
        return not self._queues and not self._deferred

    @property
    def tokens(self) -> int:
        """Number of waiting tokens; an estimate for deferred calls."""
        return self._tokens + sum(
            size_of(item) // _CHARACTERS_PER_TOKEN for call in list(self._deferred) for item in call.items
        )

    def queued(self, call: Call) -> int:
        """Number of a call's requests that wait."""
        return len(self._queues.get(call, ()))

    @property
    def busy(self) -> int:
        """Number of other threads that run a batch."""
        return len(self._running) - (threading.get_ident() in self._running)

    def put(self, call: Call, requests: Sequence[Request], *, quiet: bool = False) -> None:
        """Append requests to a call's queue; ``quiet``: the caller will :meth:`pick` them itself, or :meth:`wake`."""
        self.put_all([(call, requests)], quiet=quiet)

    def put_all(self, requests_of: Sequence[tuple[Call, Sequence[Request]]], *, quiet: bool = True) -> None:
        """Append requests to the queues of several calls."""
        with self._lock:
            refusal = self._refusal
            for call, requests in requests_of if refusal is None else ():
                self._queues.setdefault(call, deque()).extend(requests)
                self._tokens += _tokens(requests)
            if not quiet and self._idle:
                self._ready.notify_all()
        if refusal is not None:
            for call, _ in requests_of:
                call.fail(refusal())

    def defer(self, call: Call) -> None:
        """Take a call that is not tokenized yet; a worker tokenizes all calls that came while it ran a batch.

        If a hundred callers each tokenized their text, they would compete for the GIL with the forward, which needs it
        between any two operators.
        """
        with self._lock:
            refusal = self._refusal
            if refusal is None:
                self._deferred.append(call)
                if self._idle:
                    self._ready.notify()
        if refusal is not None:
            call.fail(refusal())

    def put_back(self, requests: Sequence[Request]) -> None:
        """Return picked requests that could not be run; they are the next ones."""
        with self._lock:
            refusal = self._refusal
            if refusal is None:
                for request in reversed(requests):
                    self._queues.setdefault(request.call, deque()).appendleft(request)
                    self._tokens += request.length
                self._ready.notify_all()
        for call in dict.fromkeys(request.call for request in requests):
            call.timer.returned()
            if refusal is not None:
                call.fail(refusal())

    def wake(self) -> None:
        """Wake the workers for requests that were put quietly."""
        if self._idle and not self.empty:  # a worker looks for requests before it waits
            with self._lock:
                self._ready.notify_all()

    def wait(self) -> bool:
        """Wait until a request can be picked; ``False`` once the scheduler is closed and empty."""
        with self._lock:
            self._idle += 1
            try:
                self._ready.wait_for(lambda: self._closing or not self.empty)
            finally:
                self._idle -= 1
            return not self.empty

    def pick(self, workers: int = 1, *, prepare: bool = True) -> list[Request]:
        """The next batch; empty if no request waits. Little work is divided between ``workers`` that could run it now.

        ``prepare``: tokenize deferred calls first; not in a thread that may be interrupted, since other callers wait.
        """
        if prepare and self._deferred and self._prepare is not None:
            with self._lock:
                deferred, self._deferred = self._deferred, []
            self._prepare(deferred)
        with self._lock:
            self._running.pop(threading.get_ident(), None)
            batch, served = self._pick(workers)
            if batch:
                self._running[threading.get_ident()] = (_tokens(batch), time.perf_counter())
            if self._queues and self._idle:
                self._ready.notify()
        # Outside the lock: a call with few queued requests tokenizes its next texts.
        for call, queued in served:
            call.timer.picked()
            try:
                call.refill(queued)
            except Exception as error:  # concerns this call, not the worker whose thread it is
                call.fail(error)
        return batch

    def done(self) -> None:
        """The calling thread's batch is over."""
        with self._lock:  # other threads iterate over _running
            tokens, began = self._running.pop(threading.get_ident(), (0, 0.0))
            if tokens >= _MIN_BATCH_TOKENS:
                rate = tokens / max(time.perf_counter() - began, 1e-9)
                self._rate = rate if self._rate == 0 else _EMA_WEIGHT * self._rate + (1 - _EMA_WEIGHT) * rate

    def close(self) -> None:
        """Let :meth:`wait` return ``False`` when the queues are empty."""
        with self._lock:
            self._closing = True
            self._ready.notify_all()

    def refuse(self, error: Callable[[], Exception]) -> None:
        """Fail every call that waits or comes later with an ``error()`` of its own: no device is left to run it."""
        with self._lock:
            self._refusal = error
            calls = [*self._queues, *self._deferred]
            self._queues.clear()
            self._deferred.clear()
            self._tokens = 0
            self._ready.notify_all()
        for call in calls:  # outside the lock: a future's callbacks run here
            call.fail(error())

    def shrink(self, budget: int) -> None:
        """Limit later batches to ``budget`` tokens: a batch did not fit the memory."""
        with self._lock:
            self._budget = max(1, min(self._budget, budget))
            self._ran = 0

    def recover(self) -> None:
        """A batch ran. After many of them the budget grows again: another program may have had the memory."""
        if self._budget == self._full_budget:
            return
        with self._lock:
            self._ran += 1
            if self._ran >= _RECOVERY_BATCHES:
                self._budget = min(self._full_budget, self._budget + max(1, self._budget // 4))
                self._ran = 0

    def _pick(self, workers: int) -> tuple[list[Request], list[tuple[Call, int]]]:
        """The next batch, and its calls with the number of requests still queued for each."""
        for call in [call for call in self._queues if call.done]:
            # Cancelled or failed: no caller waits for the rest.
            self._tokens -= _tokens(self._queues.pop(call))
        if self._tokens <= min(self._budget, _MIN_BATCH_TOKENS):  # no batch is smaller than all that waits
            batch = [request for queue in self._queues.values() for request in queue]
            served = dict.fromkeys(self._queues, 0)
            self._queues.clear()
            self._tokens = 0
            return batch, list(served.items())
        batch = []
        served = {}
        calls, tokens, most = self._turn()
        if tokens >= workers * most and any(call.continues for call in calls):
            room = budget = most  # there will be more: equal parts of what waits now would be too small
        else:
            room = budget = min(most, max(_MIN_BATCH_TOKENS, self._part(tokens, workers, most)))
        share = max(1, budget // max(1, len(calls)))
        for quota in (share, budget):
            misfits = 0
            for call in calls:
                queue = self._queues.get(call)
                if not queue:
                    continue
                if room <= 0 or misfits > _MAX_MISFITS:
                    break
                taken = self._take(queue, quota, room, batch, most=most - budget + room)
                if taken == 0:
                    misfits += 1
                    continue
                room -= taken
                self._tokens -= taken
                del self._queues[call]
                if queue:
                    self._queues[call] = queue  # to the back
                served[call] = len(queue)
        return batch, list(served.items())

    def _part(self, tokens: int, workers: int, most: int) -> int:
        """Tokens of a worker's next batch, so that all workers finish together, in batches of at most ``most``."""
        now = time.perf_counter()
        running = [max(0.0, count - self._rate * (now - began)) for count, began in self._running.values()]
        # Tokens that each worker has to run until the end; a worker with more than that still to run takes no share.
        while True:
            share = (tokens + sum(running)) / (workers + len(running))
            busy = [remaining for remaining in running if remaining < share]
            if len(busy) == len(running):
                break
            running = busy
        part = math.ceil(share / max(1, math.ceil(share / most)))
        return tokens if tokens - part < part // _LEFTOVER_SHARE else part

    def _turn(self) -> tuple[list[Call], int, int]:
        """The calls that the next batch visits, their queued tokens, and the most tokens that the batch may have."""
        limit = self._full_budget // _SMALL_SHARE
        weights = {call: 0 if call.is_bulk else _weight(queue, limit) for call, queue in self._queues.items()}
        for call, weight in weights.items():
            call.is_bulk = call.is_bulk or weight > limit
        small_calls = [call for call in weights if not call.is_bulk]
        if not small_calls or len(small_calls) == len(weights):
            self._small_turn = True
            self._small_batches = max(0, self._small_batches - 1)
        else:
            self._small_batches = _SMALL_BATCHES
            self._small_turn = not self._small_turn
            if not self._small_turn:  # it was, until the line above
                return small_calls, sum(weights[call] for call in small_calls), self._budget
        small = self._small_batches > 0 and len(small_calls) < len(weights)
        return list(weights), self._tokens, max(1, self._budget // _BULK_SHARE) if small else self._budget

    @staticmethod
    def _take(queue: deque[Request], quota: int, room: int, batch: list[Request], *, most: int) -> int:
        """Move requests from a queue into the batch, about ``quota`` tokens; returns the tokens moved.

        A request of which at least half fits into ``room`` comes along, unless that makes more than ``most`` tokens: if
        left over, it would make another batch.
        """
        taken = 0
        while queue and taken < quota:
            length = queue[0].length
            if batch and (length > most - taken or length > 2 * (room - taken)):
                break
            batch.append(queue.popleft())
            taken += length
        return taken


def _tokens(requests: Iterable[Request]) -> int:
    return sum([len(request.ids) for request in requests])


def _weight(queue: deque[Request], limit: int) -> int:
    """Tokens in a queue, counted until they are more than ``limit``."""
    tokens = 0
    for request in queue:
        tokens += request.length
        if tokens > limit:
            break
    return tokens
