"""ResponseBudget: how large a response may be, and how much memory the results of all requests may take together."""

from __future__ import annotations

import asyncio
import threading
from typing import cast

from fastapi import Request
from starlette.types import Scope

from millpond.errors import EngineOverloadedError
from millpond.server.errors import RequestError

# The budget is this many of the largest responses: for the numbers that the engine computes, and for the responses.
_LARGEST_RESPONSES = 4
_KEY = "result_bytes"
# A request waits for others to end for so long before it gets 429.
WAIT_SECONDS = 10.0


class ResultsFullError(EngineOverloadedError):
    """The results of the requests in progress leave no room for another's."""

    def __init__(self, memory: int, used: int, most: int) -> None:
        super().__init__(
            f"the results of the requests under way take about {used} bytes, this one's would take {memory} more, and "
            f"{most} is the most; retry in about 1 s",
            retry_after=1.0,
        )
        self.memory = memory


class ResponseBudget:
    """Bounds what a small request can make large; a result counts from before its work to the end of the response."""

    def __init__(self, max_response_bytes: int) -> None:
        self.largest = max_response_bytes
        self._most = _LARGEST_RESPONSES * max_response_bytes
        self._lock = threading.Lock()
        self._waiting: list[asyncio.Future[None]] = []  # requests that wait for room, all in one event loop
        self.used = 0  # bytes

    @property
    def waiting(self) -> int:
        """Requests that wait for room."""
        return len(self._waiting)

    def check(self, size: int, way_out: str, *, param: str | None = None) -> None:
        """Refuse a response of about ``size`` bytes, if that is too many."""
        if size > self.largest:
            raise RequestError(
                f"The response would have about {size} bytes, and {self.largest} is the most that this server sends "
                f"(--max-response-bytes): {way_out}",
                param=param,
            )

    def reserve(self, scope: Scope, *, size: int, memory: int, way_out: str, param: str | None = None) -> None:
        """Count a result before it is computed; called by any thread.

        Args:
            scope: Of the request, at whose end the result is given back.
            size: Bytes of the response, about.
            memory: Bytes of the result on its way to the response, and of the response.
            way_out: What the client can do about a response that is too large.
            param: The field of the request that makes it large.
        """
        self.check(size, way_out, param=param)
        if memory > self._most:
            raise RequestError(
                f"The result would take about {memory} bytes of memory, and {self._most} is the most on this server "
                f"(four times --max-response-bytes): {way_out}",
                param=param,
            )
        state = scope["state"]
        with self._lock:
            mine: int | None = state.get(_KEY, 0)
            if mine is None:
                return  # the request has ended, and nobody waits for this
            if self.used > mine and self.used + memory > self._most:
                raise ResultsFullError(memory, self.used, self._most)
            self.used += memory
            state[_KEY] = mine + memory

    async def wait(self, full: ResultsFullError) -> None:
        """Wait until another request has ended."""
        if self.used + full.memory <= self._most:
            return
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(ended)
        try:
            await ended
        finally:
            if ended in self._waiting:  # the request ended first
                self._waiting.remove(ended)

    def give_back(self, scope: Scope) -> None:
        """Release what a request has reserved, at its end; called by the event loop only."""
        with self._lock:
            self.used -= scope["state"].get(_KEY, 0) or 0
            scope["state"][_KEY] = None
        waiting, self._waiting = self._waiting, []
        for ended in waiting:
            if not ended.done():
                ended.set_result(None)


def response_budget_of(request: Request) -> ResponseBudget:
    """The budget of all results in progress."""
    return cast("ResponseBudget", request.app.state.response_budget)
