"""Starting the server: the models load in a thread while the client and the server greet each other.

Not while the protocol's library is imported, which takes longer: both are imports of Python modules, one at a time, and
together they take as long as one after the other; so the greeting is answered half a second earlier.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from millpond.errors import InvalidRequestError
from millpond.mcp.service import SearchService
from millpond.mcp.targets.target import TargetOptions
from millpond.support.api_keys import ApiKeys

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

logger = logging.getLogger(__name__)

_LOCAL = ("127.0.0.1", "localhost", "::1")


def serve_stdio(words: Sequence[str], options: TargetOptions, *, budget: int, log_level: str) -> None:
    """Serve over standard input and output until the client closes them."""
    service = SearchService(words, options)
    from millpond.mcp.server import create_server

    service.start()
    try:
        server = create_server(service, budget=budget, writable=options.writable, log_level=log_level)
        server.run("stdio")
    finally:
        service.close()


def serve_http(
    words: Sequence[str],
    options: TargetOptions,
    *,
    budget: int,
    log_level: str,
    address: tuple[str, int],
    keys: ApiKeys,
    ready: Callable[[str], None],
) -> None:
    """Serve streamable HTTP at ``/mcp`` until SIGTERM or Ctrl-C.

    Args:
        words: The targets.
        options: How they are opened.
        budget: Most characters of an answer.
        log_level: Lowest level of the log.
        address: Host and port; port 0 is a free one.
        keys: Keys of which a request must have one; none: no key is needed.
        ready: Called with the URL when requests are accepted.
    """
    host, port = address
    bound = _bind(host, port)
    if not keys and not _is_local(host):
        logger.warning(
            "%s is reached from other machines and asks for no API key; set one with --api-key or MILLPOND_API_KEY",
            host,
        )
    service = SearchService(words, options)
    try:
        import uvicorn

        from millpond.mcp.server import create_server

        service.start()
        server = create_server(service, budget=budget, writable=options.writable, log_level=log_level)
        app = _Keyed(server.streamable_http_app(host=host), keys)
        service.wait()  # a model that is not there is a mistake in the command
        config = uvicorn.Config(app, log_level=log_level.lower(), timeout_graceful_shutdown=5)
        shown = f"[{host}]" if ":" in host else host
        ready(f"http://{shown}:{bound.getsockname()[1]}/mcp")
        uvicorn.Server(config).run(sockets=[bound])
    finally:
        bound.close()
        service.close()


def read_address(text: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``; an IPv6 address stands in brackets."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535 or not host:
        raise InvalidRequestError(f"http={text!r} is no HOST:PORT, as 127.0.0.1:8000")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen(128)  # before a client is told of it
    except OSError as error:
        bound.close()
        raise InvalidRequestError(
            f"http={host}:{port} cannot be listened on ({error.strerror}); choose another"
        ) from None
    return bound


def _is_local(host: str) -> bool:
    try:
        return host in _LOCAL or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class _Keyed:
    """ASGI middleware that refuses requests without a key."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._keys:
            sent = [value.decode("latin-1") for name, value in scope["headers"] if name == b"authorization"]
            if not self._keys.accept(sent):
                problem = "Invalid API key" if sent else "Missing API key"
                return await _refuse(send, f"{problem}; send one as 'Authorization: Bearer KEY'")
        await self._app(scope, receive, send)


async def _refuse(send: Send, message: str) -> None:
    import json

    body = json.dumps({"error": {"message": message, "type": "Unauthorized"}}).encode()
    headers: list[Any] = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": body})
