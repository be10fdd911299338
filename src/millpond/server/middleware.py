"""RequestMiddleware: the id, the API key, the deadline and the log line of every request."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Sequence
from typing import Any

from fastapi import Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from millpond.server.errors import BodyTooLargeError, ClientGoneError, RequestError, answer_error
from millpond.server.requests.body_budget import LARGEST_DROPPED, BodyBudget
from millpond.server.requests.response_budget import ResponseBudget
from millpond.server.settings.config import ServerConfig
from millpond.server.state import Drain
from millpond.server.telemetry import logs
from millpond.server.telemetry.scope import StatusObserver, route_path
from millpond.support.api_keys import ApiKeys

# Nothing here needs protection; orchestrators and browsers send no key.
_OPEN = frozenset(
    (
        "/ /.well-known/live /.well-known/ready /docs /docs/oauth2-redirect /favicon.ico /health /metrics "
        "/openapi.json /ping /ready /version"
    ).split()
)
_OPEN_FOLDERS = ("/page/",)
_NOT_IN_IDS = re.compile(r"[^A-Za-z0-9._:/+=@-]")
_MAX_ID_LENGTH = 128
# uvloop's message about a closed connection, which uvicorn misses while another request is pipelined after this one.
_CLOSED = "the handler is closed"


class RouteKeys(ApiKeys):
    """The API keys of the server, and the routes that need none."""

    def required(self, method: str, path: str) -> bool:
        """Whether a request needs a key."""
        if not self:
            return False
        if method not in ("GET", "HEAD"):  # POST / is TEI's and runs a model
            return path != "/ping"
        return path not in _OPEN and not path.startswith(_OPEN_FOLDERS)


class RequestMiddleware:
    """ASGI middleware around the routes.

    Sets ``request.state.request_id``, ``request.state.deadline`` in the event loop's time, and
    ``request.state.text_errors``: whether the client is Ollama's or Weaviate's and reads ``error`` as a text. Routes
    set ``model`` and ``tokens``, which the log line shows.
    """

    def __init__(
        self, app: ASGIApp, *, config: ServerConfig, drain: Drain, budgets: Sequence[BodyBudget | ResponseBudget]
    ) -> None:
        self._app = app
        self._config = config
        self._drain = drain
        self._budgets = budgets
        self._keys = RouteKeys(config.api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        start = time.perf_counter()
        headers = Headers(scope=scope)
        header = headers.get("x-request-id", "")
        request = _NOT_IN_IDS.sub("", header)[:_MAX_ID_LENGTH] or os.urandom(16).hex()
        state: dict[str, Any] = scope.setdefault("state", {})
        state["request_id"] = request
        state["deadline"] = asyncio.get_running_loop().time() + self._config.request_timeout
        if self._config.root_path:
            scope["root_path"] = self._config.root_path
        state["text_errors"] = self._config.protocol == "weaviate" or route_path(scope).startswith("/api/")
        token = logs.REQUEST_ID.set(request)
        response = _Response(send, request_id=request, drain=self._drain)
        try:
            self._check(scope, headers)
            await self._app(scope, receive, response)
        except asyncio.CancelledError:
            if not self._drain.begun or response.status is not None:
                raise
            message = "The server is shutting down; retry on another instance"  # the drain timeout has passed
            stopping = RequestError(message, status=503, type="ServiceUnavailableError", headers={"Retry-After": "1"})
            answer = await answer_error(Request(scope), stopping)
            await answer(scope, receive, response)
        except _ConnectionClosedError:
            response.status = ClientGoneError().status
        except Exception as error:
            answer = await answer_error(Request(scope), error)  # logs it
            if response.status is not None:  # the response has started: the server has to break the connection
                raise
            await answer(scope, receive, response)
        finally:
            for budget in self._budgets:
                budget.give_back(scope)
            if self._config.log_requests:
                logs.access(scope, status=response.status, seconds=time.perf_counter() - start)
            logs.REQUEST_ID.reset(token)

    def _check(self, scope: Scope, headers: Headers) -> None:
        """Refuse a request without a key, or with too large a body."""
        key_required = self._keys.required(scope["method"], route_path(scope))
        if key_required and not self._keys.accept(headers.getlist("authorization")):
            problem = "Invalid API key" if "authorization" in headers else "Missing API key"
            message, challenge = f"{problem}; send one as 'Authorization: Bearer KEY'", {"WWW-Authenticate": "Bearer"}
            raise RequestError(message, status=401, type="Unauthorized", headers=challenge)
        _check_length(headers, self._config.max_body_bytes)


class _Response(StatusObserver):
    """An ASGI ``send`` that adds the headers of every response."""

    def __init__(self, send: Send, *, request_id: str, drain: Drain) -> None:
        super().__init__(send)
        self._request_id = request_id
        self._drain = drain

    async def __call__(self, message: Message) -> None:
        """Pass a message on."""
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], (b"x-request-id", self._request_id.encode())]
            if self._drain.begun:
                MutableHeaders(scope=message)["Connection"] = "close"
        try:
            await super().__call__(message)
        except RuntimeError as error:
            if _CLOSED not in str(error):
                raise
            raise _ConnectionClosedError from None


class _ConnectionClosedError(Exception):
    """The client's connection was closed before the response was sent."""


def _check_length(headers: Headers, max_bytes: int) -> None:
    """Refuse a body that would not be read to its end, also on routes that read none."""
    length = headers.get("content-length", "")
    if not (length.isascii() and length.isdigit()) or (len(length) < 20 and int(length) <= max_bytes):
        return
    asks_first = headers.get("expect", "").lower() == "100-continue"  # and has not sent any of it
    if asks_first or len(length) > 19 or int(length) > LARGEST_DROPPED * max_bytes:
        raise BodyTooLargeError(max_bytes, unread=True)
