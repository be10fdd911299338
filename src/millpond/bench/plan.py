"""LoadPlan: how much is asked of a server, how, and for how long."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from millpond.errors import InvalidRequestError


@dataclass(frozen=True, kw_only=True)
class LoadPlan:
    """A load, valid from construction.

    Attributes:
        texts_per_request: Texts, or documents of one query, in each request.
        connections: Closed loop: how many clients, each of which sends its next request when it has its answer. Open
            loop: the most connections at once; a request that finds none free waits, and its waiting counts.
        rate: Requests per second of an open loop, which arrive as a Poisson process whether or not the earlier ones
            have been answered; None for a closed loop.
        duration: Seconds during which requests are sent; those under way then are waited for.
        requests: How many are sent, in the place of ``duration``.
        warm_up: Seconds of the same load before it counts.
        timeout: Seconds until a request is given up.
        seed: Of the arrivals.
    """

    texts_per_request: int = 32
    connections: int = 8
    rate: float | None = None
    duration: float | None = 10.0
    requests: int | None = None
    warm_up: float = 1.0
    timeout: float = 60.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("texts_per_request", "connections"):
            if getattr(self, name) < 1:
                raise InvalidRequestError(f"{name}={getattr(self, name)} is too few; give 1 or more")
        for name in ("rate", "duration", "requests", "timeout"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise InvalidRequestError(f"{name}={value} is not a positive number")
        if not 0 <= self.warm_up < float("inf"):
            raise InvalidRequestError(f"warm_up={self.warm_up} is not a number of seconds; 0 leaves it out")
        if (self.duration is None) == (self.requests is None):
            raise InvalidRequestError("give either duration or requests")

    @property
    def loop(self) -> str:
        """``closed`` or ``open``."""
        return "closed" if self.rate is None else "open"

    def arrivals(self) -> Iterator[float]:
        """Seconds after the start at which the requests of an open loop are due."""
        assert self.rate is not None
        chance = random.Random(self.seed)
        at, sent = 0.0, 0
        while True:
            at += chance.expovariate(self.rate)
            if (self.duration is not None and at >= self.duration) or sent == self.requests:
                return
            sent += 1
            yield at
