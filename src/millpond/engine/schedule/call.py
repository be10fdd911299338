"""Call: one caller's request from admission to result."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import InvalidStateError
from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.engine.input.plan import Plan
from millpond.engine.input.text_tokenizer import Places, Tokenized
from millpond.engine.output.assemble import assemble
from millpond.engine.schedule.timing import CallFuture, CallTimer
from millpond.errors import MillpondError
from millpond.inputs import Item

logger = logging.getLogger(__name__)

# Vectors are committed to the cache in groups of this many: what a crash can cost.
COMMIT_GROUP = 256


class Call:
    """The distinct items of one call, and their results as these come in.

    The future stays cancellable until its result is there; a done call's queued texts are dropped by the scheduler.
    """

    def __init__(
        self,
        items: Sequence[Item],
        plan: Plan,
        *,
        native_width: int,
        labels: tuple[str, ...],
        commit: Callable[[Call, list[int], bool], None] | None,
        progress: Callable[[int], object] | None,
        refill: Callable[[Call, int], None],
        first: int = 0,
        timer: CallTimer | None = None,
    ) -> None:
        self.timer = timer or CallTimer()
        distinct = dict.fromkeys(items)
        self.size = len(items)
        self.items = list(distinct)
        self._copies: npt.NDArray[np.int64] | None = None  # [n] each item's slot, where any is a duplicate
        if len(distinct) < len(items):
            slots = {item: slot for slot, item in enumerate(distinct)}
            self._copies = np.fromiter((slots[item] for item in items), dtype=np.int64, count=len(items))
        self._first = first  # index of the first item in the caller's list
        self.plan = plan
        self.labels = labels
        self.future: CallFuture[Any] = CallFuture()
        count = len(self.items)
        self.native_width = native_width
        self.per_token = plan.readout.per_token or plan.readout.kind == "sparse"
        self.rows = np.zeros((0 if self.per_token else count, native_width), dtype=np.float32)
        self.matrices: list[npt.NDArray[np.float32] | None] = [None] * (count if self.per_token else 0)
        self.places: list[Places | None] = [None] * (count if self.per_token else 0)
        self.tokens = np.zeros(count, dtype=np.int32)
        self.truncated = np.zeros(count, dtype=np.bool_)
        self.cached = np.zeros(count, dtype=np.bool_)
        self.hits = self.misses = 0  # of the cache
        self.heavy = False  # whether much of it has been in line at once, as the scheduler sees it
        self._missing = count
        self._uncommitted: list[int] = []
        self._commit = commit
        self._progress = progress
        self._refill = refill
        self._lock = threading.Lock()

    @property
    def done(self) -> bool:
        """Nobody waits any more: finished, failed or cancelled."""
        return self.future.done()

    @property
    def owns_rows(self) -> bool:
        """Nobody reads the rows but the result; what is committed to a cache is read in a thread of its own."""
        return self._commit is None

    def position(self, slot: int) -> int:
        """Index of a distinct text in the caller's list."""
        return self._first + (slot if self._copies is None else int(np.argmax(self._copies == slot)))

    def refill(self, left: int) -> None:
        """Called when ``left`` of the call's requests are still in line."""
        self._refill(self, left)

    def note(self, slots: Sequence[int], items: Sequence[Tokenized]) -> None:
        """Remember what tokenization found out about ``slots``."""
        self.tokens[slots] = [len(item.ids) for item in items]
        self.truncated[slots] = [item.truncated for item in items]
        if self.per_token:
            for slot, item in zip(slots, items, strict=True):
                self.places[slot] = item.places

    def deliver_cached(self, slots: npt.NDArray[np.int64], rows: npt.NDArray[np.float32]) -> None:
        """Take rows ``[len(slots), d]`` that the cache already held."""
        with self._lock:
            self.rows[slots] = rows
            self._missing -= len(slots)
            last = self._missing == 0
        if self._progress is not None:
            self._progress(len(slots))
        if last:
            self.finish()

    def deliver(self, slots: Sequence[int], results: Sequence[npt.NDArray[np.float32]]) -> None:
        """Take results of a batch for ``slots``; the last ones finish the call."""
        self.timer.returned()
        if self.per_token:
            finite = [bool(np.isfinite(result).all()) for result in results]
            for slot, result in zip(slots, results, strict=True):
                self.matrices[slot] = result
        else:
            rows = results[0][None] if len(results) == 1 else np.concatenate(results).reshape(len(results), -1)
            # All at once, and row by row only where something is wrong.
            finite = [] if np.isfinite(rows).all() else [bool(np.isfinite(row).all()) for row in rows]
            self.rows[slots] = rows
        if not all(finite):
            return self.fail(_not_finite(self.position(slots[finite.index(False)])))
        group: list[int] = []
        over = self.done  # cancelled: nobody waits, but what is computed is still worth keeping
        with self._lock:  # deliveries come from several threads; no two of them have a slot in common
            self._missing -= len(slots)
            last = self._missing == 0
            if self._commit is not None:
                self._uncommitted.extend(slots)
                if last or over or len(self._uncommitted) >= COMMIT_GROUP:
                    group, self._uncommitted = self._uncommitted, []
        if group and self._commit is not None:
            self._commit(self, group, last)
        if self._progress is not None and not over:
            self._progress(len(slots))
        if last and not group:
            self.finish()

    def fail(self, error: BaseException) -> None:
        """End the call with an error; what it computed so far is still committed."""
        try:
            self.future.set_exception(error)
        except InvalidStateError:
            logger.debug("a call that is already over failed too: %s", error)
        self.flush()

    def flush(self) -> None:
        """Commit what was computed for a call that ends early."""
        with self._lock:
            group, self._uncommitted = self._uncommitted, []
        if group and self._commit is not None:
            self._commit(self, group, False)

    def finish(self) -> None:
        """Assemble the output and hand it over."""
        try:
            output = assemble(self)
        except Exception as error:  # the caller must hear of it; nobody else is near
            return self.fail(error)
        if self._progress is not None and self._copies is not None:
            self._progress(self.size - len(self.items))  # the bar counts items, deliveries distinct ones
        if self.truncated.any():
            cut = int(self.per_item(self.truncated).sum())
            logger.warning("%d of %d texts were cut to %d tokens", cut, self.size, self.plan.limit)
        self.future.timings = self.timer.read()
        try:
            self.future.set_result(output)
        except InvalidStateError:
            logger.debug("a call was cancelled while its result was put together")

    def order(self) -> Sequence[int]:
        """Each item's slot, in the caller's order."""
        return range(self.size) if self._copies is None else self._copies.tolist()

    def in_order(self) -> list[npt.NDArray[np.float32]]:
        """Each item's matrix, in the caller's order."""
        matrices = [self.matrices[slot] for slot in self.order()]
        return [matrix for matrix in matrices if matrix is not None]

    def per_item(self, per_slot: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """``[slots, ...]`` as ``[n, ...]``, in the caller's order."""
        return per_slot if self._copies is None else per_slot[self._copies]


def _not_finite(position: int) -> MillpondError:
    return MillpondError(
        f"the text at index {position} gave a vector that is not finite; the model overflows in this precision: "
        'load it with dtype="bfloat16" or "float32"'
    )
