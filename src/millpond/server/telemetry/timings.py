"""Where a request's time went, in the headers that clients of TEI read."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from millpond.inputs import TokenIds, size_of
from millpond.server.models import ServedModel
from millpond.stats import Timings
from millpond.vllm_dialect.model import Pending


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a model did for a request.

    Attributes:
        model: What the model is called.
        device: ``cpu``, ``cuda`` or ``mps``.
        timings: Of the engine's call.
        tokens: Read for it.
        characters: Of its texts; token ids have none.
        ended: When the engine had the result, in nanoseconds of Unix time.
    """

    model: str
    device: str
    timings: Timings
    tokens: int
    characters: int
    ended: int

    def headers(self, total: float) -> dict[str, str]:
        """TEI's headers, in whole milliseconds as there; ``total``: seconds since the request came."""
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


def note(request: Request, model: ServedModel, pending: Pending[Any], output: Any) -> None:
    """Remember what a call that is over did, as ``request.state.work`` and ``request.state.timings``."""
    timings = pending.future.timings
    if timings is None:  # its future has a result, so they are there; nothing here is worth an answer
        return
    request.state.timings = timings
    request.state.work = Work(
        model=model.name,
        device=model.engine.device.partition(":")[0],
        timings=timings,
        tokens=output.usage.prompt_tokens,
        characters=sum(size_of(item) for item in pending.items if not isinstance(item, TokenIds)),
        ended=time.time_ns(),
    )


def work_of(scope: Scope) -> Work | None:
    """What was done for a request, if anything was."""
    work: Work | None = scope.get("state", {}).get("work")
    return work


class TimingHeaders:
    """ASGI middleware: puts the headers on answers to requests that were worked on."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        began = time.perf_counter()

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start" and (work := work_of(scope)) is not None:
                MutableHeaders(scope=message).update(work.headers(time.perf_counter() - began))
            await send(message)

        await self._app(scope, receive, answer)


def _milliseconds(seconds: float) -> str:
    return str(int(seconds * 1000))
