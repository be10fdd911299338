"""Timings: the time of each part of a request, in the headers that TEI's clients read."""

from __future__ import annotations

import time
from dataclasses import dataclass

from starlette.datastructures import MutableHeaders
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

    def headers(self, total: float) -> dict[str, str]:
        """TEI's headers, in whole milliseconds; ``total``: seconds since the request arrived."""
        return {
            "x-compute-type": self.device,
            "x-compute-time": _milliseconds(total),
            "x-compute-characters": str(self.characters),
            "x-compute-tokens": str(self.tokens),
            "x-total-time": _milliseconds(total),
            "x-tokenization-time": _milliseconds(self.timings.tokenization),
            "x-queue-time": _milliseconds(self.timings.queue),
            "x-inference-time": _milliseconds(self.timings.inference),
        }


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
                MutableHeaders(scope=message).update(work.headers(time.perf_counter() - start))
            await send(message)

        await self._app(scope, receive, respond)


def _milliseconds(seconds: float) -> str:
    return str(int(seconds * 1000))
