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
from millpond.engine.schedule.timing import CallFuture, CallTimer
from millpond.engine.schedule.truncation import truncated_noun, warn_truncated
from millpond.engine.tokenize.tokenized import TokenAlignment, Tokenized
from millpond.errors import MillpondError
from millpond.inputs import Item

logger = logging.getLogger(__name__)

# Called with the slots and the matrices of a batch, by the thread that ran it.
TakeMatrices = Callable[[Sequence[int], Sequence[npt.NDArray[np.float32]]], None]


class Call:
    """The distinct items of one call, each in a slot, and their results as they arrive.

    The future can be cancelled until it has its result; the scheduler drops the queued items of a call that is done.

    Attributes:
        timer: Measures the call.
        size: Number of items, duplicates included.
        items: The distinct items, by slot.
        plan: How to compute them.
        labels: Names of the columns of its logits.
        future: The call's result.
        native_width: Columns of a row before the Matryoshka cut.
        per_token: Whether an item's result is a matrix.
        rows: float32 ``[slots, native_width]``; empty if ``per_token``.
        matrices: float32 ``[rows, native_width]`` by slot, if ``per_token``; ``None`` until delivered, or if taken.
        alignments: Alignment of each slot's tokens with its text, if ``per_token`` and the task needs one.
        tokens: int32 ``[slots]`` tokens of each item.
        truncated: bool ``[slots]`` items that were cut.
        cached: bool ``[slots]`` items whose row came from the cache.
        hits: Items found in the cache.
        misses: Items looked up in the cache and not found.
        heavy: Whether much of the call was queued at once; set by the scheduler.
        continues: Whether more of the call is going to be queued; set by the intake.
    """

    def __init__(
        self,
        items: Sequence[Item],
        plan: Plan,
        *,
        native_width: int,
        labels: tuple[str, ...],
        assemble: Callable[[Call], Any],
        commit: Callable[[Call, Sequence[int], bool], None] | None,
        progress: Callable[[int], object] | None,
        refill: Callable[[Call, int], None],
        first_index: int = 0,
        timer: CallTimer | None = None,
        take: TakeMatrices | None = None,
    ) -> None:
        """A call without results.

        Args:
            items: The items, which may have duplicates.
            plan: How to compute them.
            native_width: Columns of a row before the Matryoshka cut.
            labels: Names of the columns of its logits.
            assemble: Makes the output of the finished call.
            commit: Writes the rows of some slots to the cache, and finishes the call once all are :meth:`committed`;
                may wait for earlier rows. Its last argument says whether all rows were delivered. ``None`` if the call
                is not cached.
            progress: Called with the number of items newly done, from the threads that do them.
            refill: Called with the number of requests still queued, each time a batch takes some.
            first_index: Index of the first item in the caller's list, for errors.
            timer: The timer of a request that is made of several calls; ``None``: a new one.
            take: Receives each batch's matrices, which the call then does not keep; only if ``per_token``.
        """
        self.timer = timer or CallTimer()
        distinct = dict.fromkeys(items)
        self.size = len(items)
        self.items = list(distinct)
        self._slot_of: npt.NDArray[np.int64] | None = None  # [size] each item's slot, if there are duplicates
        if len(distinct) < len(items):
            slots = {item: slot for slot, item in enumerate(distinct)}
            self._slot_of = np.fromiter((slots[item] for item in items), dtype=np.int64, count=len(items))
        self._first_index = first_index
        self.plan = plan
        self.labels = labels
        self.future: CallFuture[Any] = CallFuture()
        count = len(self.items)
        self.native_width = native_width
        self.per_token = plan.readout.per_token or plan.readout.kind == "sparse"
        self.rows = np.zeros((0 if self.per_token else count, native_width), dtype=np.float32)
        self.matrices: list[npt.NDArray[np.float32] | None] = [None] * (count if self.per_token else 0)
        self.alignments: list[TokenAlignment | None] = [None] * (count if self.per_token else 0)
        self.tokens = np.zeros(count, dtype=np.int32)
        self.truncated = np.zeros(count, dtype=np.bool_)
        self.cached = np.zeros(count, dtype=np.bool_)
        self.hits = self.misses = 0
        self.heavy = False
        self.continues = False
        self._missing = count
        self._uncommitted = 0  # rows that were delivered, and are not in the cache yet
        self._assemble = assemble
        self._commit = commit
        self._progress = progress
        self._refill = refill
        self._take = take
        self._lock = threading.Lock()
        self._truncated_noun = truncated_noun.get()

    @property
    def done(self) -> bool:
        """Whether it is finished, failed or cancelled, so that no caller waits."""
        return self.future.done()

    @property
    def owns_rows(self) -> bool:
        """Whether the result may overwrite the rows; a commit to the cache may read computed ones in another thread."""
        return self._commit is None or self.hits == len(self.items)

    def index_of(self, slot: int) -> int:
        """Index of a distinct item in the caller's list; of duplicates, the first one's."""
        return self._first_index + (slot if self._slot_of is None else int(np.argmax(self._slot_of == slot)))

    def refill(self, queued: int) -> None:
        """Called when ``queued`` of the call's requests are still waiting."""
        self._refill(self, queued)

    def note(self, slots: Sequence[int], items: Sequence[Tokenized]) -> None:
        """Store the results of tokenization for ``slots``."""
        for slot, item in zip(slots, items, strict=True):
            self.tokens[slot] = len(item.ids)
            if item.truncated:
                self.truncated[slot] = True
            if self.per_token:
                self.alignments[slot] = item.alignment

    def deliver_cached(self, count: int) -> None:
        """Count rows that were found in the cache, and are in :attr:`rows`."""
        with self._lock:
            self._missing -= count
            last = self._missing == 0
        if self._progress is not None:
            self._progress(count)
        if last:
            self.finish()

    def deliver(self, slots: Sequence[int], results: Sequence[npt.NDArray[np.float32]]) -> None:
        """Take a batch's results for ``slots``; the last ones finish the call."""
        self.timer.returned()
        if self.per_token:
            finite = [bool(np.isfinite(result).all()) for result in results]
            if self._take is None:
                for slot, result in zip(slots, results, strict=True):
                    self.matrices[slot] = result
            elif all(finite) and not self.done:
                self._take(slots, results)
        else:
            rows = results[0][None] if len(results) == 1 else np.concatenate(results).reshape(len(results), -1)
            # All rows at once; one by one only if something is wrong.
            finite = [] if np.isfinite(rows).all() else [bool(np.isfinite(row).all()) for row in rows]
            if len(slots) == 1:  # several at once take longer than one, but not longer than two
                self.rows[slots[0]] = rows[0]
            else:
                self.rows[slots] = rows
        if not all(finite):
            return self.fail(_not_finite(self.index_of(slots[finite.index(False)])))
        over = self.done  # cancelled: no caller waits, but a computed row is still worth a commit
        with self._lock:  # several threads deliver, never the same slot
            self._missing -= len(slots)
            self._uncommitted += len(slots)
            last = self._missing == 0
        if self._commit is not None:
            self._commit(self, slots, last)
        if self._progress is not None and not over:
            self._progress(len(slots))
        if last and self._commit is None:
            self.finish()

    def committed(self, count: int) -> bool:
        """Count rows that were committed; returns whether they were the call's last: threads deliver in any order."""
        with self._lock:
            self._uncommitted -= count
            return self._missing == self._uncommitted == 0

    def fail(self, error: BaseException) -> None:
        """End the call with an error."""
        try:
            self.future.set_exception(error)
        except InvalidStateError:
            logger.debug("a call that is already over failed too: %s", error)

    def finish(self) -> None:
        """Assemble the output and set the future's result."""
        try:
            output = self._assemble(self)
        except Exception as error:  # no other code would report it to the caller
            return self.fail(error)
        if self._progress is not None and self._slot_of is not None:
            self._progress(self.size - len(self.items))  # the bar counts duplicates too, deliveries do not
        if self._truncated_noun is not None and np.count_nonzero(self.truncated):
            warn_truncated(
                self.per_item(self.truncated),
                self.plan.limit,
                first_index=self._first_index,
                noun=self._truncated_noun,
            )
        self.future.timings = self.timer.read()
        try:
            self.future.set_result(output)
        except InvalidStateError:
            logger.debug("a call was cancelled while its result was put together")

    def slots(self) -> Sequence[int]:
        """Each item's slot, in the caller's order."""
        return range(self.size) if self._slot_of is None else self._slot_of.tolist()

    @property
    def taken(self) -> bool:
        """Whether the matrices were handed on as they came, so that the call has none."""
        return self._take is not None

    def matrices_per_item(self) -> list[npt.NDArray[np.float32]]:
        """Each item's matrix, in the caller's order."""
        matrices = [self.matrices[slot] for slot in self.slots()]
        return [matrix for matrix in matrices if matrix is not None]

    def per_item(self, per_slot: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """``[slots, ...]`` as ``[size, ...]``, in the caller's order."""
        return per_slot if self._slot_of is None else per_slot[self._slot_of]


def _not_finite(index: int) -> MillpondError:
    return MillpondError(
        f"the text at index {index} gave a vector that is not finite; the model overflows in this precision: "
        'load it with dtype="bfloat16" or "float32"'
    )
