"""Running a server: bind, load the models, serve, drain."""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

import uvicorn
from fastapi import FastAPI

from millpond.server.app import create_app
from millpond.server.launch import malloc, sockets
from millpond.server.launch.protocol import HttpProtocol
from millpond.server.launch.sockets import listen_error
from millpond.server.models import ServedModels
from millpond.server.settings.config import ModelConfig, ServerConfig
from millpond.server.telemetry.tracing import check_installed

logger = logging.getLogger(__name__)

# Longer than clients and proxies keep idle connections: if the server closed first, it could meet a request under way.
_KEEP_ALIVE_SECONDS = 65

Ready = Callable[[str, ServedModels], None]


def serve(models: Sequence[ModelConfig], config: ServerConfig, *, ready: Ready) -> None:
    """Serve until SIGTERM or SIGINT; then accept no connections, and give running requests ``drain_timeout``.

    The address is bound first, and accepts connections when every model is loaded. A second signal ends the process
    at once.

    Args:
        models: The models to load.
        config: The server's configuration.
        ready: Called with the address and the models when requests are accepted.

    Raises:
        InvalidRequestError: The address cannot be listened on, or an option is invalid.
        ModelLoadError: A checkpoint cannot be found, read or run; nothing stays open.
        MissingExtraError: Tracing is configured, and OpenTelemetry is not installed.
    """
    malloc.limit_arenas()
    check_installed(config.otlp_traces_endpoint)
    sockets.check_certificates(config)
    bound = sockets.bind(config)
    if not sockets.is_local(config) and not config.api_keys:
        logger.warning(
            "%s is reached from other machines and asks for no API key; set one with --api-key or MILLPOND_API_KEY",
            config.host,
        )
    try:
        with _sigterm_as_exit():
            loaded = ServedModels.load(models)
            try:
                app = create_app(loaded, config)
                address = sockets.address_of(bound, config)
                _Server(app, config, started=lambda: ready(address, loaded)).run(bound)
            finally:
                loaded.close()
    finally:
        sockets.close(bound, config)


class _Server(uvicorn.Server):
    """uvicorn's server; the first signal drains it and ends it with 0, the second ends it at once."""

    def __init__(self, app: FastAPI, config: ServerConfig, *, started: Callable[[], None]) -> None:
        super().__init__(_uvicorn_config(app, config))
        self._app = app
        self._settings = config
        self._started = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Open the sockets, then report."""
        try:
            await super().startup(sockets)
        except OSError as error:  # another process listens there since it was bound
            await self.lifespan.shutdown()
            raise listen_error(self._settings, error) from None
        self._started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the sockets, let requests finish, close the models."""
        logger.info("stopping: requests that run have %g s", self._settings.drain_timeout)
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains; the second ends the process as if it had no handler."""
        if self.should_exit:
            sockets.close([], self._settings)
            os._exit(128 + sig)  # not by the signal itself, which a container's first process ignores
        self._app.state.drain.begin()
        self.should_exit = True


def _uvicorn_config(app: FastAPI, config: ServerConfig) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=HttpProtocol,
        log_config=None,  # the program's own handlers write the log
        access_log=False,  # RequestMiddleware logs more
        server_header=False,
        lifespan="on",
        ws="none",
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=math.ceil(config.drain_timeout),
        ssl_certfile=config.ssl_certfile,
        ssl_keyfile=config.ssl_keyfile,
        ssl_ca_certs=None if config.ssl_ca_certs is None else str(config.ssl_ca_certs),
        ssl_cert_reqs=ssl.CERT_NONE if config.ssl_ca_certs is None else ssl.CERT_REQUIRED,
    )


@contextmanager
def _sigterm_as_exit() -> Iterator[None]:
    """Outside of uvicorn's own handling, SIGTERM raises SystemExit.

    A container's first process would otherwise ignore it.
    """

    def end(sig: int, _: FrameType | None) -> None:
        raise SystemExit(128 + sig)

    previous = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
