"""Held: how many bytes of bodies all requests under way have together."""

from __future__ import annotations

from starlette.types import Scope

from millpond.errors import EngineOverloadedError

# A server has room for this many bytes, and for some of the largest bodies that it takes.
_LEAST = 512 << 20
_LARGEST = 4
_KEY = "held_bytes"


class BodyBudget:
    """Bounds what a flood of large bodies can take: each counts from its first byte to the end of its answer.

    Args:
        max_body_bytes: The largest body that one request may have.
    """

    def __init__(self, max_body_bytes: int) -> None:
        self._most = max(_LEAST, _LARGEST * max_body_bytes)
        self._held = 0

    @property
    def count(self) -> int:
        """How many there are."""
        return self._held

    def take(self, scope: Scope, count: int) -> None:
        """Count bytes for a request; called by the event loop alone.

        Raises:
            EngineOverloadedError: Others have too many already.
        """
        if self._held + count > self._most:
            raise EngineOverloadedError(
                f"the bodies of the requests under way have {self._held} bytes, and {self._most} is the most; "
                "retry in about 1 s",
                retry_after=1.0,
            )
        self._held += count
        scope["state"][_KEY] = scope["state"].get(_KEY, 0) + count

    def give_back(self, scope: Scope) -> None:
        """Forget the bytes of a request that is over."""
        self._held -= scope["state"].pop(_KEY, 0)
