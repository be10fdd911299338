"""Scheduler: who is in the next batch.

Every active call has a line of its own. A batch visits the lines, the one served longest ago first, and takes from each
an equal share of the token budget; what is left over goes to the oldest again. So a single text that arrives behind a
million others is in the next batch, and nobody waits for ever.

A batch takes as long as all that is in it, so light calls do not share one with heavy ones: every second batch is
theirs alone, while both kinds wait. What is left to wait for is the batch that runs when a light call comes, so batches
of heavy ones are smaller for a while where light ones come at all.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from millpond.engine.schedule.call import Call
from millpond.engine.schedule.request import Request
from millpond.inputs import size_of

# After this many lines whose first request does not fit into what is left, the batch is full.
_MAX_MISFITS = 32

# A lane that takes its part of what waits takes at least so many tokens: smaller products waste the processor.
_MIN_BATCH_TOKENS = 256

# What is left by less than this part of a batch is taken along.
_LEFTOVER_SHARE = 8

# What a lane's pace so far counts for, against that of its last batch.
_EMA_WEIGHT = 0.8

# A call that never has more than this share of the budget in line is light.
_LIGHT = 8

# For so many batches after light calls met heavy ones, batches of the latter are at most this share of the budget: on a
# CPU with 4,096 tokens, bulk loses a tenth, and short texts beside it wait less than a third.
_GUARDED = 32
_BULK_SHARE = 4

# Of a token, about, where a text is not tokenized yet.
_CHARACTERS = 4

# So many batches in a row have to run before a budget that did not fit the memory grows again.
_RECOVERY_BATCHES = 64


class Scheduler:
    """The queue between tokenization and the forward; all methods are thread-safe."""

    def __init__(self, budget: int, *, prepare: Callable[[list[Call]], None] | None = None) -> None:
        """An empty queue.

        Args:
            budget: Most tokens of a batch; a single longer request runs alone.
            prepare: Tokenizes calls that were deferred, and puts them in line; whatever is wrong with one is its own.
        """
        self._budget = self._most = budget
        self._calm = 0  # batches that ran since the budget last changed
        self._lines: dict[Call, deque[Request]] = {}  # in the order of service, least recent first
        self._deferred: list[Call] = []  # not tokenized yet
        self._prepare = prepare
        self._ready = threading.Condition()
        self._idle = 0  # threads that wait for work
        self._tokens = 0  # of the requests in the lines
        self._light_turn = True  # the next batch is for the light calls, if there are others too
        self._guarded = 0  # batches that are still to be small
        self._running: dict[int, tuple[int, float]] = {}  # by thread: the tokens of its batch, and when it began
        self._pace = 0.0  # tokens per second of a lane
        self._closing = False

    @property
    def empty(self) -> bool:
        """Whether nothing waits."""
        return not self._lines and not self._deferred

    @property
    def tokens(self) -> int:
        """How many wait; of deferred calls, about."""
        return self._tokens + sum(size_of(item) // _CHARACTERS for call in list(self._deferred) for item in call.items)

    @property
    def busy(self) -> int:
        """How many other threads run a batch."""
        return len(self._running) - (threading.get_ident() in self._running)

    def put(self, call: Call, requests: Sequence[Request], *, quiet: bool = False) -> None:
        """Append requests to a call's line; ``quiet``: the caller will :meth:`pick` them itself, or :meth:`wake`."""
        with self._ready:
            self._lines.setdefault(call, deque()).extend(requests)
            self._tokens += sum(request.length for request in requests)
            if not quiet and self._idle:
                self._ready.notify_all()

    def defer(self, call: Call) -> None:
        """Take a call that is not tokenized yet: a worker does that, for all that came while it ran a batch.

        A hundred callers that each tokenize a text of their own would take turns at the interpreter with the forward,
        which needs it between any two of its operators.
        """
        with self._ready:
            self._deferred.append(call)
            if self._idle:
                self._ready.notify()

    def put_back(self, requests: Sequence[Request]) -> None:
        """Return picked requests that could not be run, to be the next ones."""
        with self._ready:
            for request in reversed(requests):
                self._lines.setdefault(request.call, deque()).appendleft(request)
                self._tokens += request.length
            self._ready.notify_all()
        for call in {request.call for request in requests}:
            call.timer.returned()

    def wake(self) -> None:
        """Have the workers look for what was put quietly."""
        if not self._idle:  # whoever is about to wait looks first
            return
        with self._ready:
            if not self.empty:
                self._ready.notify_all()

    def wait(self) -> bool:
        """Wait until something is there to be picked; ``False`` once the scheduler is closed and empty."""
        with self._ready:
            self._idle += 1
            try:
                self._ready.wait_for(lambda: self._closing or not self.empty)
            finally:
                self._idle -= 1
            return not self.empty

    def pick(self, lanes: int = 1, *, prepare: bool = True) -> list[Request]:
        """The next batch, empty if nothing waits.

        Args:
            lanes: How many could run a batch now: of little work, each takes its part.
            prepare: See to deferred calls first. Not for a thread that may be interrupted: others wait for them.
        """
        if prepare and self._deferred and self._prepare is not None:
            with self._ready:
                deferred, self._deferred = self._deferred, []
            self._prepare(deferred)
        with self._ready:
            self._running.pop(threading.get_ident(), None)
            batch, served = self._pick(lanes)
            if batch:
                tokens = sum(request.length for request in batch)
                self._running[threading.get_ident()] = (tokens, time.perf_counter())
            if self._lines and self._idle:
                self._ready.notify()
        # Outside the lock: a call that runs low tokenizes its next texts.
        for call, left in served:
            call.timer.picked()
            try:
                call.refill(left)
            except Exception as error:  # this call's trouble, not the worker's, whose thread it is
                call.fail(error)
        return batch

    def done(self) -> None:
        """The calling thread's batch is over."""
        with self._ready:  # others go through what runs
            tokens, began = self._running.pop(threading.get_ident(), (0, 0.0))
            if tokens >= _MIN_BATCH_TOKENS:
                pace = tokens / max(time.perf_counter() - began, 1e-9)
                self._pace = pace if self._pace == 0 else _EMA_WEIGHT * self._pace + (1 - _EMA_WEIGHT) * pace

    def close(self) -> None:
        """Let :meth:`wait` return ``False`` when the lines are empty."""
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
            if self._calm >= _RECOVERY_BATCHES:
                self._budget = min(self._most, self._budget + max(1, self._budget // 4))
                self._calm = 0

    def _pick(self, lanes: int) -> tuple[list[Request], list[tuple[Call, int]]]:
        for call in [call for call in self._lines if call.done]:
            # Cancelled or failed: nobody waits for the rest.
            self._tokens -= sum(request.length for request in self._lines.pop(call))
        batch: list[Request] = []
        served: dict[Call, int] = {}  # with what is left in line
        lines, tokens, most = self._turn()
        room = budget = min(most, max(_MIN_BATCH_TOKENS, self._part(tokens, lanes, most)))
        share = max(1, budget // max(1, len(lines)))
        for quota in (share, budget):
            misfits = 0
            for call in lines:
                line = self._lines.get(call)
                if not line:
                    continue
                if room <= 0 or misfits > _MAX_MISFITS:
                    break
                taken = self._take(line, quota, room, batch, most=most - budget + room)
                if taken == 0:
                    misfits += 1
                    continue
                room -= taken
                self._tokens -= taken
                del self._lines[call]
                if line:
                    self._lines[call] = line  # to the back
                served[call] = len(line)
        return batch, list(served.items())

    def _part(self, tokens: int, lanes: int, most: int) -> int:
        """A lane's next batch, such that all of them come to their end together, in equal batches of at most ``most``.

        Args:
            tokens: What waits.
            lanes: That could begin now.
            most: Tokens of a batch.
        """
        now = time.perf_counter()
        running = [max(0.0, count - self._pace * (now - began)) for count, began in self._running.values()]
        # What every lane has to do until the end; one that has more than that before it is none of those that share.
        while True:
            each = (tokens + sum(running)) / (lanes + len(running))
            busy = [left for left in running if left < each]
            if len(busy) == len(running):
                break
            running = busy
        part = math.ceil(each / max(1, math.ceil(each / most)))
        return tokens if tokens - part < part // _LEFTOVER_SHARE else part

    def _turn(self) -> tuple[list[Call], int, int]:
        """The lines that the next batch visits, the tokens in them, and the most that the batch may take."""
        weights = {call: 0 if call.heavy else _weight(line, self._most // _LIGHT) for call, line in self._lines.items()}
        for call, weight in weights.items():
            call.heavy = call.heavy or weight > self._most // _LIGHT
        light = [call for call in weights if not call.heavy]
        if not light or len(light) == len(weights):
            self._light_turn = True
            self._guarded = max(0, self._guarded - 1)
        else:
            self._guarded = _GUARDED
            self._light_turn = not self._light_turn
            if not self._light_turn:  # it was theirs until now
                return light, sum(weights[call] for call in light), self._budget
        guarded = self._guarded > 0 and len(light) < len(weights)
        return list(weights), self._tokens, max(1, self._budget // _BULK_SHARE) if guarded else self._budget

    @staticmethod
    def _take(line: deque[Request], quota: int, room: int, batch: list[Request], *, most: int) -> int:
        """Move requests from a line into the batch, to about ``quota`` tokens; returns the tokens moved.

        A request that is half inside ``room`` comes along if that is not more than ``most``: what lanes leave over
        would be a batch of its own.
        """
        taken = 0
        while line and taken < quota:
            length = line[0].length
            if batch and (length > most - taken or length > 2 * (room - taken)):
                break
            batch.append(line.popleft())
            taken += length
        return taken


def _weight(line: deque[Request], most: int) -> int:
    """Tokens in a line, counted until they are more than ``most``."""
    tokens = 0
    for request in line:
        tokens += request.length
        if tokens > most:
            break
    return tokens
