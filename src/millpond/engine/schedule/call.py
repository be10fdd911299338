"""Call: one caller's request from admission to result."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import InvalidStateError
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.engine.input.plan import Plan
from millpond.engine.schedule.timing import CallFuture, CallTimer
from millpond.engine.schedule.truncation import TruncatedTexts, TruncationLog, truncated_noun
from millpond.engine.tokenize.tokenized import TokenAlignment, Tokenized
from millpond.errors import MillpondError
from millpond.support.text_names import text_names
from millpond.values.inputs import Item

logger = logging.getLogger(__name__)

# Called with the slots and the matrices of a batch, by the thread that ran it.
OnMatrices = Callable[[Sequence[int], Sequence[npt.NDArray[np.float32]]], None]


@dataclass(kw_only=True, slots=True, eq=False)
class CallOptions:
    """How a call is queued, besides its plan."""

    inline: bool = False  # tokenize in the calling thread, which runs batches then
    progress: Callable[[int], object] | None = None  # called with the number of items newly done, from any thread
    on_matrices: OnMatrices | None = None  # gets each batch's matrices, which a call `per_token` then does not keep
    first_index: int = 0  # of the first item in the caller's list, for errors
    indices: Sequence[int] | None = None  # of all items there, if they are not neighbours
    # How many texts the queue must have room for; None: as many as there are items. The first call of a request asks
    # for all of its texts, the others for 0.
    admit: int | None = None
    timer: CallTimer | None = None  # of a request that is made of several calls; None: a new one


class CallResult:
    """What is known of a call's distinct items so far, by slot."""

    __slots__ = ("alignments", "cached", "matrices", "rows", "tokens", "truncated")

    def __init__(self, count: int, width: int, *, per_token: bool) -> None:
        self.rows: npt.NDArray[np.float32] = np.zeros((0 if per_token else count, width), dtype=np.float32)
        self.matrices: list[npt.NDArray[np.float32] | None] = [None] * (count if per_token else 0)  # [rows, width]
        self.alignments: list[TokenAlignment | None] = [None] * (count if per_token else 0)
        self.tokens: npt.NDArray[np.int32] = np.zeros(count, dtype=np.int32)
        self.truncated: npt.NDArray[np.bool_] = np.zeros(count, dtype=np.bool_)
        self.cached: npt.NDArray[np.bool_] = np.zeros(count, dtype=np.bool_)


class Call:
    """The distinct items of one call, each in a slot, and their results as they arrive.

    The future can be cancelled until it has its result; the scheduler drops the queued items of a call that is done.
    """

    def __init__(
        self,
        items: Sequence[Item],  # duplicates included
        plan: Plan,
        *,
        native_width: int,  # columns of a row before the Matryoshka cut
        assemble: Callable[[Call], Any],  # makes the output of the finished call
        refill: Callable[[Call, int], None] | None = None,  # told how many requests are queued whenever some are taken
        # Writes rows to the cache, and finishes the call once all are committed; None: the call is not cached.
        commit: Callable[[Call, Sequence[int]], None] | None = None,
        labels: tuple[str, ...] = (),  # of the columns of its logits
        options: CallOptions | None = None,
        truncation_log: TruncationLog | None = None,
        why_not_finite: Callable[[], str] = lambda: "the model overflows, or its weights are so",
    ) -> None:
        self._options = options or CallOptions()
        self.timer = self._options.timer or CallTimer()
        distinct = dict.fromkeys(items)
        self.size = len(items)
        self.items = list(distinct)  # by slot
        self.kinds = frozenset(map(type, self.items))
        self._slot_of: npt.NDArray[np.int64] | None = None  # [size] each item's slot, if there are duplicates
        if len(distinct) < len(items):
            slots = {item: slot for slot, item in enumerate(distinct)}
            self._slot_of = np.fromiter((slots[item] for item in items), dtype=np.int64, count=len(items))
        self.plan = plan
        self.labels = labels
        self.future: CallFuture[Any] = CallFuture()
        self.native_width = native_width
        self.per_token = plan.output.per_token or plan.output.kind == "sparse"  # an item's result is a matrix
        self.result = CallResult(len(self.items), native_width, per_token=self.per_token)
        self.hits = self.misses = 0  # items looked up in the cache
        self.is_bulk = False  # much of the call was queued at once; set by the scheduler
        self.continues = False  # more of the call is going to be queued; set by the intake
        self._missing = len(self.items)
        self._uncommitted = 0  # rows that were delivered, and are not in the cache yet
        self._assemble, self._refill, self._commit = assemble, refill, commit
        self._lock = threading.Lock()
        self.truncated = 0  # items that were cut, duplicates included, once it is finished
        self._truncated_noun, self._names = truncated_noun.get(), text_names.get()
        self._truncation_log = truncation_log or TruncationLog()
        self._why_not_finite = why_not_finite

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
        index = slot if self._slot_of is None else int(np.argmax(self._slot_of == slot))
        return self._options.first_index + index if self._options.indices is None else self._options.indices[index]

    def refill(self, queued: int) -> None:
        """Called when ``queued`` of the call's requests are still waiting."""
        if self._refill is not None:
            self._refill(self, queued)

    def note(self, slots: Sequence[int], items: Sequence[Tokenized]) -> None:
        """Store the results of tokenization for ``slots``."""
        for slot, item in zip(slots, items, strict=True):
            self.result.tokens[slot] = len(item.ids)
            if item.truncated:
                self.result.truncated[slot] = True
            if self.per_token:
                self.result.alignments[slot] = item.alignment

    def deliver_cached(self, count: int) -> None:
        """Count rows that were found in the cache, and are in the result."""
        with self._lock:
            self._missing -= count
            last = self._missing == 0
        if self._options.progress is not None:
            self._options.progress(count)
        if last:
            self.finish()

    def deliver(self, slots: Sequence[int], results: Sequence[npt.NDArray[np.float32]]) -> None:
        """Take a batch's results for ``slots``; the last ones finish the call."""
        self.timer.returned()
        broken = self._store_matrices(slots, results) if self.per_token else self._store_rows(slots, results)
        if broken is not None:
            return self.fail(
                MillpondError(
                    f"the text at index {self.index_of(broken)} gave a vector that is not finite: "
                    f"{self._why_not_finite()}"
                )
            )
        over = self.done  # cancelled: no caller waits, but a computed row is still worth a commit
        with self._lock:  # several threads deliver, never the same slot
            self._missing -= len(slots)
            self._uncommitted += len(slots)
            last = self._missing == 0
        if self._commit is not None:
            self._commit(self, slots)
        if self._options.progress is not None and not over:
            self._options.progress(len(slots))
        if last and self._commit is None:
            self.finish()

    def _store_matrices(self, slots: Sequence[int], results: Sequence[npt.NDArray[np.float32]]) -> int | None:
        """Keep matrices, or hand them on; returns the slot of one that is not finite."""
        broken = next((slot for slot, m in zip(slots, results, strict=True) if not np.isfinite(m).all()), None)
        on_matrices = self._options.on_matrices
        if on_matrices is None:
            for slot, result in zip(slots, results, strict=True):
                self.result.matrices[slot] = result
        elif broken is None and not self.done:
            on_matrices(slots, results)
        return broken

    def _store_rows(self, slots: Sequence[int], results: Sequence[npt.NDArray[np.float32]]) -> int | None:
        """Keep rows; returns the slot of one that is not finite."""
        rows = results[0][None] if len(results) == 1 else np.concatenate(results).reshape(len(results), -1)
        if len(slots) == 1:  # several at once take longer than one, but not longer than two
            self.result.rows[slots[0]] = rows[0]
        else:
            self.result.rows[slots] = rows
        if np.isfinite(rows).all():  # all rows at once; one by one only if something is wrong
            return None
        return slots[int(np.argmin(np.isfinite(rows).all(axis=1)))]

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
        if self._options.progress is not None and self._slot_of is not None:
            self._options.progress(self.size - len(self.items))  # the bar counts duplicates too, deliveries do not
        if np.count_nonzero(self.result.truncated):
            self._report_truncated(self.per_item(self.result.truncated))
        self.future.timings = self.timer.read()
        try:
            self.future.set_result(output)
        except InvalidStateError:
            logger.debug("a call was cancelled while its result was put together")

    def _report_truncated(self, truncated: npt.NDArray[np.bool_]) -> None:
        self.truncated = int(np.count_nonzero(truncated))
        noun, names = self._truncated_noun, self._names
        if noun is not None:
            if names is not None and (noun != "texts" or len(names) != self.size):
                names = None  # those of other texts
            if names is None and self._options.indices is not None:
                names = [f"index {index}" for index in self._options.indices]
            first = self._options.first_index
            texts = TruncatedTexts(self.plan.limit, first_index=first, noun=noun, names=names)
            texts.note(truncated)
            texts.log(self._truncation_log)

    def slots(self) -> Sequence[int]:
        """Each item's slot, in the caller's order."""
        return range(self.size) if self._slot_of is None else self._slot_of.tolist()

    @property
    def hands_matrices_on(self) -> bool:
        """Whether the matrices are handed on as they come, so that the call has none."""
        return self._options.on_matrices is not None

    def matrices_per_item(self) -> list[npt.NDArray[np.float32]]:
        """Each item's matrix, in the caller's order."""
        matrices = [self.result.matrices[slot] for slot in self.slots()]
        return [matrix for matrix in matrices if matrix is not None]

    def per_item(self, per_slot: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """``[slots, ...]`` as ``[size, ...]``, in the caller's order."""
        return per_slot if self._slot_of is None else per_slot[self._slot_of]
