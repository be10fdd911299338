"""RetryingWriter: a batch written to a sink, with the retries, the splits and the rows that the database refuses."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from tenacity import RetryCallState, Retrying, retry_if_exception, stop_before_delay, wait_exponential, wait_random

from millpond.errors import InvalidRequestError, SinkRejectedError, SinkTooLargeError, SinkUnavailableError
from millpond.ingest.sinks.batch import WriteBatch

T = TypeVar("T")

# If more rows in a row than this are refused, the collection does not fit the run, and not the rows.
_MAX_REJECTED_ROWS = 16


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """How long a run waits for a database that does not answer, or is too busy.

    A request that fails with :class:`~millpond.errors.SinkUnavailableError` is sent again after a wait, which doubles
    each time and has a random part, and is at least what the database asks for. Errors of other kinds are not retried.

    Attributes:
        give_up_after: Seconds from the first attempt after which no other begins: the run stops and can be resumed.
            ``math.inf``: never.
        first_wait: Seconds of the first wait.
        longest_wait: Most seconds of a wait, unless the database asks for more.

    Raises:
        InvalidRequestError: A number that is negative, or no first wait.
    """

    give_up_after: float = 120.0
    first_wait: float = 0.5
    longest_wait: float = 20.0

    def __post_init__(self) -> None:
        for name, least in (("give_up_after", 0.0), ("first_wait", 1e-3), ("longest_wait", 1e-3)):
            value = getattr(self, name)
            most = math.inf if name == "give_up_after" else 1e9
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
                raise InvalidRequestError(f"{name}={value!r} must be a number of seconds from {least:g}")


class RetryingWriter:
    """Sends requests to one sink."""

    def __init__(
        self, policy: RetryPolicy, stop: threading.Event, retrying: Callable[[BaseException, float], object]
    ) -> None:
        self._stop = stop
        self._note = retrying
        self._one_at_a_time = threading.Lock()
        self._rejected = 0  # rows, since the last one that was accepted
        self._unanswered: BaseException | None = None  # the error that is waited after
        backoff = wait_exponential(policy.first_wait, policy.longest_wait) + wait_random(0, policy.first_wait)

        def wait(state: RetryCallState) -> float:
            asked = getattr(state.outcome.exception() if state.outcome else None, "retry_after", None)
            return max(float(backoff(state)), asked or 0.0)

        self._retrying = Retrying(
            wait=wait,
            stop=stop_before_delay(policy.give_up_after),
            retry=retry_if_exception(lambda error: isinstance(error, SinkUnavailableError) and not stop.is_set()),
            before_sleep=self._before_wait,
            sleep=self._sleep,
            reraise=True,
        )

    def send(self, request: Callable[[], T]) -> T:
        """Make a request until it succeeds; returns its result. One at a time, whichever thread asks."""

        def alone() -> T:
            with self._one_at_a_time:
                return request()

        return self._retrying.copy()(alone)

    def write(self, write: Callable[[WriteBatch], object], batch: WriteBatch) -> list[tuple[int, str]]:
        """Write a batch; one that is too large goes in halves.

        The rows that the database refuses are left out and returned: the place of each in the batch, and the reason.
        """
        rejected: list[tuple[int, str]] = []
        self._write(write, batch, 0, rejected)
        return rejected

    def _write(
        self, write: Callable[[WriteBatch], object], batch: WriteBatch, first: int, rejected: list[tuple[int, str]]
    ) -> None:
        try:
            self.send(lambda: write(batch))
        except (SinkRejectedError, SinkTooLargeError) as error:
            if len(batch) == 1:
                self._rejected += 1
                if self._rejected > _MAX_REJECTED_ROWS:
                    raise
                rejected.append((first, str(error)))
                return
            middle = len(batch) // 2
            self._write(write, batch.part(slice(0, middle)), first, rejected)
            self._write(write, batch.part(slice(middle, None)), first + middle, rejected)
        else:
            self._rejected = 0

    def _before_wait(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        if error is not None and state.next_action is not None:
            self._unanswered = error
            self._note(error, state.next_action.sleep)

    def _sleep(self, seconds: float) -> None:
        if self._stop.wait(seconds) and self._unanswered is not None:
            raise self._unanswered
