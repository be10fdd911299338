"""Admission: the calls that an engine has taken on, and whether its queue has room for more."""

from __future__ import annotations

import threading
import time
from collections import Counter

from millpond.engine.schedule.call import Call
from millpond.engine.schedule.counters import Counters
from millpond.errors import EngineClosedError, EngineOverloadedError
from millpond.values.stats import EngineStats

# Callers that come in a row and meet fewer others than before, until the crowd is taken to be that small.
_CALM = 8


class Admission:
    """The running calls and the number of their texts; thread-safe."""

    def __init__(self, max_queue: int, counters: Counters) -> None:
        self._max_queue = max_queue
        self._counters = counters
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._owners: dict[Call, object] = {}  # of each running call the object that it keeps alive
        self._direct = 0  # running texts that are no call
        self._crowd, self._calm = 1, 0  # see `crowd`
        self._texts = 0  # of those calls, and these texts
        self._done = 0  # texts
        self._busy = 0.0  # seconds of the busy periods that are over
        self._since = 0.0  # when the current one began
        self._callers: Counter[int] = Counter()  # by thread: calls that it waits for, one inside the other
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether new calls are refused."""
        return self._closed

    @property
    def running_calls(self) -> int:
        """Number of running calls."""
        return len(self._owners) + self._direct

    def admit(self, call: Call, owner: object, texts: int) -> None:
        """Take a call on, if the queue has room for ``texts`` more texts; ``owner`` is kept alive until it is over."""
        with self._lock:
            self.check_room(texts)
            if not self.running_calls:
                self._since = time.monotonic()
            self._owners[call] = owner
            self._texts += call.size

    def release(self, call: Call) -> object:
        """Stop counting a call that is over; returns its owner.

        The caller drops the owner outside the lock: it may be the last reference to the Submission, whose end stops the
        threads.
        """
        with self._lock:
            owner = self._owners.pop(call, None)
            self._texts -= call.size
            self._done += call.size
            self._counters.release(
                call.future.failure(), texts=call.size, truncated=call.truncated, hits=call.hits, misses=call.misses
            )
            if not self.running_calls:
                self._busy += time.monotonic() - self._since
                self._changed.notify_all()
        return owner

    @property
    def crowd(self) -> int:
        """About how many callers there are: most that ran at once when one of the last few came."""
        return self._crowd

    def enter_direct(self, most: int) -> bool:
        """Take on a text that its caller runs by itself, if no call and less than ``most`` such texts are admitted.

        Returns whether it was taken on.
        """
        if self._owners:  # without the lock: hundreds of callers may come at once
            self._crowd, self._calm = max(self._crowd, self.running_calls + 1), 0
            return False
        with self._lock:
            self._meet()
            if self._owners or self._direct >= most or self._closed:
                return False
            if self._direct and self._texts >= self._max_queue:
                return False
            if not self._direct:
                self._since = time.monotonic()
            self._direct += 1
            self._texts += 1
            return True

    def leave_direct(self, *, done: bool) -> None:
        """That text is over; unless ``done`` it was not counted, since it becomes a call now."""
        with self._lock:
            self._direct -= 1
            self._texts -= 1
            if done:
                self._done += 1
                self._counters.release(None, texts=1, truncated=0, hits=0, misses=0)
            if not self.running_calls:
                self._busy += time.monotonic() - self._since
                if self._closed:  # somebody may wait for the end
                    self._changed.notify_all()

    def _meet(self) -> None:
        """A caller comes."""
        callers = self.running_calls + 1
        self._calm = 0 if callers >= self._crowd else self._calm + 1
        if callers > self._crowd or self._calm == _CALM:
            self._crowd, self._calm = callers, 0

    def stats(self) -> EngineStats:
        """The counters, with the numbers of waiting calls and texts."""
        with self._lock:
            return self._counters.read(waiting_texts=self._texts, running_calls=self.running_calls)

    def close(self) -> None:
        """Refuse calls from now on; takes no lock, since a forked process may have inherited it locked."""
        self._closed = True

    def wait_until_idle(self, timeout: float | None = None) -> bool:
        """Wait until no call is running, at most ``timeout`` seconds; returns whether none is."""
        limit = None if timeout is None else min(timeout, threading.TIMEOUT_MAX)
        with self._lock:
            return self._changed.wait_for(lambda: not self.running_calls, limit)

    def enter_caller(self) -> None:
        """The calling thread runs batches from now on, while it waits for a call of its own."""
        with self._lock:
            self._callers[threading.get_ident()] += 1

    def leave_caller(self) -> None:
        """The calling thread is done with what it began last."""
        with self._lock:
            self._callers -= Counter((threading.get_ident(),))
            self._changed.notify_all()

    def wait_for_callers(self) -> None:
        """Wait until no thread runs batches for a call of its own."""
        with self._lock:
            if threading.get_ident() not in self._callers:  # it is, if a future's callback closes the engine
                self._changed.wait_for(lambda: not self._callers and not self._direct)

    def calls(self) -> list[Call]:
        """The running calls."""
        with self._lock:
            return list(self._owners)

    def check_room(self, texts: int) -> None:
        """Check that the queue has room for this many more texts."""
        if self._closed:
            raise EngineClosedError("the engine was closed; make a new one")
        with self._lock:
            waiting = self._texts
            if not waiting or not texts or waiting + texts <= self._max_queue:
                return
            busy = self._busy + time.monotonic() - self._since
            seconds = min(60.0, max(0.1, waiting * max(busy, 1e-3) / max(self._done, 1)))
            self._counters.reject()
            raise EngineOverloadedError(
                f"{waiting} texts are waiting and {texts} more would pass max_queue={self._max_queue}; "
                f"retry in about {seconds:.1f} s, or raise max_queue",
                retry_after=seconds,
            )
