"""Committer: computed rows committed to the cache as they come, before their calls get their results."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from millpond.cache.errors import kind_of
from millpond.engine.schedule.call import Call
from millpond.errors import CacheError
from millpond.values.inputs import key_of

if TYPE_CHECKING:
    from millpond.cache.vector_cache import VectorCache

logger = logging.getLogger(__name__)

# A batch of texts of this many tokens: so many rows may wait for their commit while the next batches are computed.
_TOKENS_PER_ROW = 64


class CacheErrors:
    """Errors after which an engine goes on, each kind logged once: a line for each batch would fill a full disk."""

    def __init__(self, consequence: str, level: int) -> None:
        self._consequence = consequence
        self._level = level
        self._kinds: set[str] = set()

    def report(self, error: CacheError) -> None:
        """Log the error."""
        level = logging.DEBUG if kind_of(error) in self._kinds else self._level
        self._kinds.add(kind_of(error))
        logger.log(level, "%s: %s (the engine goes on; this is logged once)", self._consequence, error)


Delivery = tuple[Call, Sequence[int]]


class Committer:
    """One transaction after the other, each with all rows that were delivered during the one before.

    A thread that delivers rows does not go on to its next batch while more than ``most_waiting`` rows are uncommitted.
    So a process that is killed has at most these, and one batch for each thread that computes, to compute again.
    """

    def __init__(self, cache: VectorCache, *, namespace: Callable[[Call], str], budget: int, name: str) -> None:
        self.most_waiting = max(1, budget // _TOKENS_PER_ROW)
        self._cache = cache
        self._namespace = namespace
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._waiting: list[Delivery] = []
        self._uncommitted = 0  # rows that wait, or are in the running transaction
        self._scheduled = False  # the thread will look at what waits
        self._finishing = 0  # threads that finish calls, whose callbacks may take any time
        self._changed = threading.Condition()
        self._transaction = threading.Lock()
        self._errors = CacheErrors("vectors cannot be cached, and are computed again next time", logging.ERROR)

    def commit(self, call: Call, slots: Sequence[int]) -> None:
        """Commit the rows of ``slots`` soon, and finish their call if all of its rows are committed then.

        Waits while too many rows are uncommitted.
        """
        with self._changed:
            self._waiting.append((call, slots))
            self._uncommitted += len(slots)
            # The thread may be in a callback that waits for these very rows.
            here = self._finishing > 0
            wake = not here and not self._scheduled
            self._scheduled = self._scheduled or wake
        if wake:
            try:
                self._thread.submit(self._run)
            except RuntimeError:  # closed, or the program ends: computed rows are still worth a commit
                here = True
        if here:
            self._drain()
        while True:  # wait for the thread to commit enough; this one has to help if that one is held up
            with self._changed:
                self._changed.wait_for(lambda: self._uncommitted <= self.most_waiting or self._finishing)
                if self._uncommitted <= self.most_waiting:
                    return
            self._drain()

    def close(self, *, wait: bool = True) -> None:
        """Stop the thread after the rows that wait; later rows are committed by the threads that deliver them."""
        self._thread.shutdown(wait=wait)

    def _run(self) -> None:
        while self._scheduled:
            self._drain()
            with self._changed:
                self._scheduled = bool(self._waiting)

    def _drain(self) -> None:
        """Commit what waits, then finish the calls whose last rows were among it."""
        finished = self._transact(then_finish=False)
        finished += self._transact(then_finish=True)  # what came meanwhile: from now on nobody else is told to take it
        try:
            for call in finished:
                if not call.done:  # cancelled, or failed
                    call.finish()
        finally:
            with self._changed:
                self._finishing -= 1

    def _transact(self, *, then_finish: bool) -> list[Call]:
        """Commit what waits; returns the calls that are complete."""
        with self._transaction:
            with self._changed:
                deliveries, self._waiting = self._waiting, []
                if then_finish:
                    self._finishing += 1
                    self._changed.notify_all()
            if not deliveries:
                return []
            try:
                self._write(deliveries)
            finally:
                with self._changed:
                    self._uncommitted -= sum(len(slots) for _, slots in deliveries)
                    self._changed.notify_all()
        return [call for call, slots in deliveries if call.committed(len(slots))]

    def _write(self, deliveries: Sequence[Delivery]) -> None:
        """Put the rows into the cache; an error that is not the cache's fails the call that it comes from."""
        try:
            keys: list[bytes] = []
            for call, slots in deliveries:
                keys += self._cache.keys(self._namespace(call), [key_of(call.items[slot]) for slot in slots])
            self._cache.put(
                keys,
                np.concatenate([call.result.rows[slots] for call, slots in deliveries]),
                tokens=np.concatenate([call.result.tokens[slots] for call, slots in deliveries]),
                truncated=np.concatenate([call.result.truncated[slots] for call, slots in deliveries]),
            )
        except CacheError as error:
            # The vectors are right; to lose them because the disk is full would be worse.
            self._errors.report(error)
        except Exception as error:  # no other code would report it to the caller
            if len(deliveries) == 1:
                return deliveries[0][0].fail(error)
            for delivery in deliveries:
                self._write([delivery])
