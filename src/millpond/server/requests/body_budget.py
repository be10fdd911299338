"""BodyBudget: the memory that the bodies of all requests in flight may take together."""

from __future__ import annotations

from typing import cast

from fastapi import Request
from starlette.types import Scope

from millpond.errors import EngineOverloadedError

# The budget is the larger of this many bytes and this many bodies of the largest allowed size.
_MIN_BYTES = 512 << 20
_LARGEST_BODIES = 4
_KEY = "body_bytes"
# A body up to this many times the limit is read to its end and dropped: most clients read the response only when they
# have sent everything, and would see a broken connection instead.
LARGEST_DROPPED = 2


class BodyBudget:
    """Bounds the memory of a flood of large bodies: a body counts from its first byte to the end of the response."""

    def __init__(self, max_body_bytes: int) -> None:
        self._max_bytes = max(_MIN_BYTES, _LARGEST_BODIES * max_body_bytes)
        self.used = 0  # bytes

    def take(self, scope: Scope, count: int) -> None:
        """Count ``count`` bytes for a request; called by the event loop only."""
        if self.used + count > self._max_bytes:
            raise EngineOverloadedError(
                f"the bodies of the requests under way have {self.used} bytes, and {self._max_bytes} is the most; "
                "retry in about 1 s",
                retry_after=1.0,
            )
        self.used += count
        scope["state"][_KEY] = scope["state"].get(_KEY, 0) + count

    @staticmethod
    def taken(scope: Scope) -> int:
        """Bytes of a request's body so far."""
        taken: int = scope["state"].get(_KEY, 0)
        return taken

    def give_back(self, scope: Scope) -> None:
        """Release the bytes of a request that has ended."""
        self.used -= scope["state"].pop(_KEY, 0)


def body_budget_of(request: Request) -> BodyBudget:
    """The budget of all request bodies in flight."""
    return cast("BodyBudget", request.app.state.body_budget)
