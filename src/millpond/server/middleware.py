"""Gate: what every request passes on its way in and out: its id, its key, its deadline, its line in the log."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import time
import uuid
from typing import Any

from fastapi import Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from millpond.server.admission.body_budget import BodyBudget
from millpond.server.admission.drain import Drain
from millpond.server.errors import ClientGoneError, answer_error, error_response
from millpond.server.settings.config import ServerConfig
from millpond.server.telemetry import logs

# They say nothing that a key protects; orchestrators and browsers ask for them without one.
_OPEN = frozenset(
    "/ /docs /docs/oauth2-redirect /favicon.ico /health /metrics /openapi.json /ping /ready /version".split()
)
_OPEN_FOLDERS = ("/page/",)
_NOT_IN_IDS = re.compile(r"[^A-Za-z0-9._:/+=@-]")
_ID_LENGTH = 128
# uvloop's words for a connection that is gone; uvicorn does not notice where another request waits behind this one.
_CLOSED = "the handler is closed"


class Keys:
    """The API keys of a server.

    Args:
        keys: Any of these will do; none opens everything.
    """

    def __init__(self, keys: tuple[str, ...]) -> None:
        # Digests are of one length, so that a comparison tells nothing about a key's.
        self._digests = tuple(hashlib.sha256(key.encode()).digest() for key in keys)

    def guard(self, method: str, path: str) -> bool:
        """Whether a request needs a key."""
        if not self._digests:
            return False
        if method not in ("GET", "HEAD"):  # what is posted to / is TEI's, and work
            return path != "/ping"
        return path not in _OPEN and not path.startswith(_OPEN_FOLDERS)

    def fit(self, authorization: str | None) -> bool:
        """Whether an Authorization header holds a key; every key is compared, whichever fits."""
        scheme, _, token = (authorization or "").partition(" ")
        digest = hashlib.sha256(token.strip().encode("latin-1")).digest()
        found = False
        for known in self._digests:
            found |= hmac.compare_digest(known, digest)
        return found and scheme.lower() == "bearer"


class Gate:
    """ASGI middleware around everything else.

    Puts into ``request.state``: ``request_id``, and ``deadline`` in the event loop's time. Routes add ``model`` and
    ``tokens``, which the log has.
    """

    def __init__(self, app: ASGIApp, *, config: ServerConfig, drain: Drain, held: BodyBudget) -> None:
        self._app = app
        self._config = config
        self._drain = drain
        self._held = held
        self._keys = Keys(config.api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it here."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        if self._config.root_path:
            scope["root_path"] = self._config.root_path
        began = time.perf_counter()
        headers = Headers(scope=scope)
        state: dict[str, Any] = scope.setdefault("state", {})
        state["request_id"] = request_id(headers.get("x-request-id"))
        state["deadline"] = asyncio.get_running_loop().time() + self._config.request_timeout
        token = logs.REQUEST_ID.set(state["request_id"])
        status: int | None = None

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                sent = MutableHeaders(scope=message)
                sent["X-Request-Id"] = state["request_id"]
                if self._drain.begun:
                    sent["Connection"] = "close"
            try:
                await send(message)
            except RuntimeError as error:
                if _CLOSED not in str(error):
                    raise
                raise _UnreachableError from None

        try:
            guarded = self._keys.guard(scope["method"], route_path(scope))
            if guarded and not self._keys.fit(headers.get("authorization")):
                await _refuse(headers)(scope, receive, answer)
            else:
                await self._app(scope, receive, answer)
        except asyncio.CancelledError:
            if not self._drain.begun or status is not None:
                raise
            await _stopped()(scope, receive, answer)  # the drain's time is over
        except _UnreachableError:
            status = ClientGoneError().status
        except Exception as error:
            response = await answer_error(Request(scope), error)  # logs it
            if status is None:
                await response(scope, receive, answer)
            else:  # half an answer is on its way: the server has to break the connection
                raise
        finally:
            self._held.give_back(scope)
            if self._config.log_requests:
                logs.access(scope, status=status, seconds=time.perf_counter() - began)
            logs.REQUEST_ID.reset(token)


class _UnreachableError(Exception):
    """An answer that nobody can be given."""


def request_id(given: str | None) -> str:
    """A client's own id, of harmless characters and length, or a new one."""
    return _NOT_IN_IDS.sub("", given or "")[:_ID_LENGTH] or uuid.uuid4().hex


def route_path(scope: Scope) -> str:
    """The path that the router looks at: without the prefix that a proxy in front of the server stands for."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    if root and path.startswith(root) and path[len(root) : len(root) + 1] in ("", "/"):
        return path[len(root) :]
    return path


def _stopped() -> ASGIApp:
    message = "The server is stopping and did not wait any longer; ask another, or this one later"
    return error_response(503, "ServiceUnavailableError", message, headers={"Retry-After": "1"})


def _refuse(headers: Headers) -> ASGIApp:
    problem = "The API key is none of this server's" if "authorization" in headers else "This server asks for a key"
    return error_response(
        401,
        "Unauthorized",
        f"{problem}; send one as 'Authorization: Bearer KEY'",
        headers={"WWW-Authenticate": "Bearer"},
    )
