"""Scope: what middleware and telemetry read from an ASGI scope, and the status that they observe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.types import Message, Scope, Send


def route_path(scope: Scope) -> str:
    """The path that the router matches: without the prefix of a proxy in front of the server."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    if root and path.startswith(root) and path[len(root) : len(root) + 1] in ("", "/"):
        return path[len(root) :]
    return path


def declared_path(scope: Scope) -> str | None:
    """The path of the matched route as it was declared; ``None`` before routing and for unknown paths."""
    path: str | None = getattr(scope.get("route"), "path", None)
    return path


def request_state(scope: Scope) -> Mapping[str, Any]:
    """What middleware and routes stored about the request: ``request_id``, ``model``, ``tokens``, ``work``."""
    state: Mapping[str, Any] = scope.get("state", {})
    return state


class StatusObserver:
    """An ASGI ``send`` that remembers the HTTP status of the response."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status: int | None = None  # until a response has started

    async def __call__(self, message: Message) -> None:
        """Pass a message on."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self._send(message)
