"""Direct: one text, or one pair, run in the calling thread, while the engine has nothing else to do.

There is no call, future or scheduler: the forward of a short text leaves nothing of Python in the caches of its
core, so that what runs around it takes three times as long as in a loop of its own. What is anything but plain goes the
ordinary way, which also says what is wrong: the result is ``None`` then, and nothing has happened.
"""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from millpond.backends.backend import Ints, TextVector, Threads
from millpond.engine.execute.cores import Cores
from millpond.engine.execute.interrupts import defer_sigint
from millpond.engine.execute.line import Line, Waiting
from millpond.engine.input.plan import Plan
from millpond.engine.schedule.admission import Admission
from millpond.engine.schedule.counters import Counters
from millpond.engine.schedule.timing import CallFuture
from millpond.engine.tokenize.text_tokenizer import TextTokenizer
from millpond.errors import MillpondError
from millpond.support.fork import computing
from millpond.values.outputs import EmbeddingOutput, Usage
from millpond.values.stats import Timings

logger = logging.getLogger(__name__)

# A longer text may be tokenized in parts, and takes so long that the ordinary way costs it nothing.
MOST_CHARACTERS = 4096
_CHARACTERS_PER_TOKEN = 4  # about
# Texts for each core that wait for it in their callers' threads: more are batched, which then takes less time.
_TURNS = 4
# Seconds that they wait at most: other engines of the process may have the cores for longer, and Ctrl-C waits, too.
_PATIENCE = 0.02
# Tokens of texts that are run together for several callers: more take as long for each token.
_TOGETHER = 64


def most_at_once(cores: Cores) -> int:
    """Texts that compute or wait for a core."""
    return _TURNS * cores.count


@dataclass(kw_only=True, slots=True, eq=False)
class _Marks:
    """When a text was admitted, tokenized, begun and done."""

    begun: float
    tokenized: float = 0.0
    picked: float = 0.0
    returned: float = 0.0

    def timings(self) -> Timings:
        return Timings(
            tokenization=self.tokenized - self.begun,
            queue=self.picked - self.tokenized,
            inference=self.returned - self.picked,
            total=perf_counter() - self.begun,
        )


class Direct(ABC):
    """Runs single items by one plan."""

    def __init__(
        self,
        *,
        threads: Threads,
        cores: Cores,
        admission: Admission,
        counters: Counters,
        executor: Executor,  # for callers that do not wait in their thread
    ) -> None:
        self._threads, self._cores = threads, cores
        self._admission, self._counters = admission, counters
        self._executor = executor
        self._line = Line(cores, most=1, most_tokens=0)
        self._pid = os.getpid()

    def __call__(self, item: Any) -> Any:
        """The output of a call for one item."""
        with defer_sigint():
            return self._run(item, _Marks(begun=perf_counter())) if self._enter() else None

    def here(self, item: Any) -> CallFuture[Any] | None:
        """As calling it, with the result in a future."""
        marks = _Marks(begun=perf_counter())
        output = self._run(item, marks) if self._enter() else None
        if output is None:
            return None
        future: CallFuture[Any] = CallFuture()
        future.timings = marks.timings()
        future.set_result(output)
        return future

    def submit(self, item: Any) -> Future[Any] | None:
        """As calling it, in another thread."""
        if not self._enter():
            return None
        try:
            future = self._executor.submit(self._run, item, _Marks(begun=perf_counter()))
        except RuntimeError:  # the engine was closed
            self._admission.leave_direct(done=False)
            return None
        future.add_done_callback(self._withdraw)
        return future

    def _enter(self) -> bool:
        return os.getpid() == self._pid and self._admission.enter_direct(most_at_once(self._cores))

    def _withdraw(self, future: Future[Any]) -> None:
        if future.cancelled():  # before it was begun
            self._admission.leave_direct(done=False)

    def _run(self, item: Any, marks: _Marks) -> Any:
        output = None
        try:
            output = self._compute(item, marks)
        except (UnicodeEncodeError, MillpondError):  # the ordinary way says where
            pass
        except Exception as error:  # if the ordinary way fails, too, its caller gets the error
            logger.warning("a text could not be run by itself (%s); it is queued", type(error).__name__, exc_info=True)
        finally:
            self._admission.leave_direct(done=output is not None)
        return output

    def _compute(self, item: Any, marks: _Marks) -> Any:
        # Two callers are better off with a core each than with two cores by turns.
        part = self._cores.count // self._admission.crowd
        tokens, read = self._read(item, part)
        marks.tokenized = perf_counter()
        if not tokens:
            return None
        along: list[Waiting] = []
        if not self._cores.claim(wait=False):
            own = Waiting(read, tokens, marks)
            claimed = self._line.claim(own, _PATIENCE)
            if claimed is None:
                return own.output
            along = claimed
            tokens += sum(other.tokens for other in along)
        outputs, threads = [], 1
        try:
            threads += self._cores.widen(min(self._threads.count(tokens), part) - 1)
            marks.picked = self._counters.begin()
            try:
                with computing():
                    outputs = self._outputs([read, *(other.read for other in along)], threads)
                marks.returned = perf_counter()
                if outputs:
                    self._counters.ran(marks.picked, len(outputs), tokens)
            finally:
                self._counters.end(marks.picked)
        finally:
            self._cores.release(threads)
            for index, other in enumerate(along, 1):
                other.marks.picked, other.marks.returned = marks.picked, marks.returned
                other.finish(outputs[index] if outputs else None)
        return outputs[0] if outputs else None

    @abstractmethod
    def _read(self, item: Any, part: int) -> tuple[int, Any]:
        """The item's number of tokens, 0 if it goes the ordinary way, and they; ``part``: cores that it may use."""

    @abstractmethod
    def _outputs(self, read: list[Any], threads: int) -> list[Any]:
        """The output of each; nothing if one of them is not finite."""


class DirectText(Direct):
    """Embeds single texts by one plan."""

    def __init__(self, vector: TextVector, plan: Plan, texts: TextTokenizer, **parts: Any) -> None:
        super().__init__(**parts)
        self._line = Line(self._cores, most=vector.most_texts, most_tokens=min(_TOGETHER, vector.most_tokens))
        self._vector, self._texts, self._prompt = vector, texts, plan.prompt
        self._most = min(plan.limit, vector.most_tokens)

    def _read(self, item: str, part: int) -> tuple[int, Ints | None]:
        if len(item) > MOST_CHARACTERS:
            return 0, None
        if not item.isascii():
            item.encode()  # raises for a lone surrogate
        if part > 1:
            self._vector.wake(min(part, self._threads.count(len(item) // _CHARACTERS_PER_TOKEN)) - 1)
        ids = self._texts.one(self._prompt + item)
        return (len(ids) if len(ids) <= self._most else 0), ids

    def _outputs(self, read: list[Ints], threads: int) -> list[EmbeddingOutput]:
        rows = self._vector(read, threads)
        if rows is None:
            return []
        return [
            EmbeddingOutput(
                embeddings=rows[index : index + 1],
                cached=np.zeros(1, dtype=np.bool_),
                truncated=np.zeros(1, dtype=np.bool_),
                usage=Usage(prompt_tokens=len(ids)),
            )
            for index, ids in enumerate(read)
        ]
