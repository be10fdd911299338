"""Timings: the time of each part of a request, in the headers that TEI's clients read."""

from __future__ import annotations

import time
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from millpond.server.telemetry.scope import request_state
from millpond.values.stats import Timings


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work that a model did for a request."""

    device: str  # cpu, cuda or mps
    timings: Timings
    tokens: int
    characters: int  # characters of the texts; token ids have none
    ended: int  # when the engine had the result, in Unix nanoseconds

    def headers(self, total: float) -> list[tuple[bytes, bytes]]:
        """TEI's headers, in whole milliseconds; ``total``: seconds since the request arrived."""
        timings = self.timings
        return [
            (b"x-compute-type", self.device.encode()),
            (b"x-compute-time", b"%d" % (1000 * total)),
            (b"x-compute-characters", b"%d" % self.characters),
            (b"x-compute-tokens", b"%d" % self.tokens),
            (b"x-total-time", b"%d" % (1000 * total)),
            (b"x-tokenization-time", b"%d" % (1000 * timings.tokenization)),
            (b"x-queue-time", b"%d" % (1000 * timings.queue)),
            (b"x-inference-time", b"%d" % (1000 * timings.inference)),
        ]


def work_of(scope: Scope) -> Work | None:
    """The work for a request, or ``None`` if no model ran."""
    work: Work | None = request_state(scope).get("work")
    return work


class TimingHeadersMiddleware:
    """ASGI middleware: adds the headers to responses of requests that ran a model."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        start = time.perf_counter()

        async def respond(message: Message) -> None:
            if message["type"] == "http.response.start" and (work := work_of(scope)) is not None:
                message["headers"] = [*message["headers"], *work.headers(time.perf_counter() - start)]
            await send(message)

        await self._app(scope, receive, respond)
