"""Server: uvicorn's server with its drain and its two signals."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
import ssl
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from millpond.server.launch import sockets as bound_sockets
from millpond.server.launch.protocol import ConnectionCap, HttpProtocol
from millpond.server.launch.sockets import allowed_connections, listen_error
from millpond.server.settings.config import ServerConfig

logger = logging.getLogger(__name__)

# Longer than clients and proxies keep idle connections: if the server closed first, it could meet a request under way.
KEEP_ALIVE_SECONDS = 65
_STARTUP_FAILURE = 3  # uvicorn's exit code
_BACKLOG = 2048
# A client that does not begin TLS, or does not end it, keeps its connection for so long.
_TLS_SECONDS: dict[str, Any] = {"ssl_handshake_timeout": 10.0, "ssl_shutdown_timeout": 10.0}


class Server(uvicorn.Server):
    """The first signal drains the server and ends it with 0, the second ends it at once."""

    def __init__(
        self,
        app: FastAPI,
        config: ServerConfig,
        *,
        started: Callable[[], None] = lambda: None,
        keep_alive: float = KEEP_ALIVE_SECONDS,
    ) -> None:
        settings = uvicorn.Config(
            app,
            http=HttpProtocol,
            log_config=None,  # the program's own handlers write the log
            access_log=False,  # RequestMiddleware logs more
            server_header=False,
            lifespan="on",
            ws="none",
            timeout_keep_alive=keep_alive,  # type: ignore[arg-type]  # HttpProtocol's timer takes fractions
            timeout_graceful_shutdown=math.ceil(config.drain_timeout),
            ssl_certfile=config.ssl_certfile,
            ssl_keyfile=config.ssl_keyfile,
            ssl_ca_certs=None if config.ssl_ca_certs is None else str(config.ssl_ca_certs),
            ssl_cert_reqs=ssl.CERT_NONE if config.ssl_ca_certs is None else ssl.CERT_REQUIRED,
        )
        super().__init__(settings)
        self._app = app
        self._settings = config
        self._started = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application and open the sockets, then report."""
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            raise SystemExit(_STARTUP_FAILURE)
        loop, context = asyncio.get_running_loop(), self.config.ssl
        cap = ConnectionCap(allowed_connections(self._settings.max_connections))
        connect = partial(HttpProtocol, self.config, self.server_state, self.lifespan.state, cap=cap)
        tls = {} if context is None else {"ssl": context, **_TLS_SECONDS}
        try:
            self.servers = [
                await loop.create_server(connect, sock=each, backlog=_BACKLOG, **tls) for each in sockets or ()
            ]
        except OSError as error:  # another process listens there since it was bound
            await self.lifespan.shutdown()
            raise listen_error(self._settings, error) from None
        self.started = True
        self._started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the sockets, let requests finish, close the models."""
        logger.info("stopping: requests that run have %g s", self._settings.drain_timeout)
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains; the second ends the process as if it had no handler."""
        if self.should_exit:
            bound_sockets.close([], self._settings)
            os._exit(128 + sig)  # not by the signal itself, which a container's first process ignores
        self._app.state.drain.begin()
        self.should_exit = True
