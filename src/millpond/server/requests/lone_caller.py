"""LoneCaller: whether a short call may block the event loop, because the loop serves nobody else."""

from __future__ import annotations

from typing import cast

from fastapi import Request

from millpond.server.requests.body_budget import BodyBudget
from millpond.server.state import state_of

# Calls that came one by one over one connection before the loop computes for it.
_CALLS = 8
# Each of them took so little time, and the body is so short, that another client would hardly notice to wait for it.
_SECONDS = 0.01
_BODY_BYTES = 512


class LoneCaller:
    """Follows who calls, and for how long.

    To hand a call to a thread and back takes 4 to 15 % of the processor time of a request with a short text. With more
    callers it pays, since the threads compute at the same time.
    """

    def __init__(self) -> None:
        self._caller: object = None
        self._calls = 0

    def comes(self, request: Request, model: str) -> bool:
        """A request calls a model; returns whether the call may run in the thread of the event loop."""
        scope = request.scope
        caller = (scope.get("client"), scope["path"], model)
        if caller != self._caller:
            self._caller, self._calls = caller, 0
        return (
            self._calls >= _CALLS
            and bool(request.client and request.client.port)  # else it names a host, which may have many connections
            and state_of(request).metrics.in_flight == 1
            and BodyBudget.taken(scope) <= _BODY_BYTES
        )

    def ran(self, seconds: float) -> None:
        """The call took so long."""
        self._calls = self._calls + 1 if seconds <= _SECONDS else 0


def lone_caller_of(request: Request) -> LoneCaller:
    """That of the application."""
    return cast("LoneCaller", request.app.state.lone_caller)
