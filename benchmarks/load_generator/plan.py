"""LoadPlan: the size, the arrival pattern and the duration of a load."""

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
        connections: Closed loop: number of clients, each sending its next request after an answer. Open loop: most
            connections at once; a request without a free one waits, and the wait counts as latency.
        rate: Requests per second of an open loop, arriving as a Poisson process independent of the answers; ``None``
            for a closed loop.
        duration: Seconds during which requests are sent; requests in progress at the end are awaited.
        requests: Number of requests, instead of ``duration``.
        warm_up: Seconds of the same load before the measurement.
        timeout: Seconds after which a request is given up.
        seed: Seed of the arrival times.
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
            raise InvalidRequestError(
                f"give either duration or requests, not duration={self.duration} and requests={self.requests}"
            )

    @property
    def loop(self) -> str:
        """``closed`` or ``open``."""
        return "closed" if self.rate is None else "open"

    def arrivals(self) -> Iterator[float]:
        """Seconds after the start at which the requests of an open loop are due."""
        assert self.rate is not None
        random_times = random.Random(self.seed)
        at, sent = 0.0, 0
        while True:
            at += random_times.expovariate(self.rate)
            if (self.duration is not None and at >= self.duration) or sent == self.requests:
                return
            sent += 1
            yield at
