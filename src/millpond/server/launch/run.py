"""Running a server: load, listen, answer, drain."""

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
from millpond.server.launch.protocol import Wire
from millpond.server.launch.sockets import refused
from millpond.server.models import ServedModels
from millpond.server.settings.config import ModelConfig, ServerConfig
from millpond.server.telemetry.tracing import check_installed

logger = logging.getLogger(__name__)

# Longer than clients and proxies keep idle connections: who closes first never closes on a request that is on its way.
_KEEP_ALIVE_SECONDS = 65

Ready = Callable[[str, ServedModels], None]


def serve(models: Sequence[ModelConfig], config: ServerConfig, *, ready: Ready) -> None:
    """Serve until SIGTERM or SIGINT; then no connection is accepted, and requests that run have ``drain_timeout``.

    The address is taken first and answers only when every model is loaded. A second signal ends the process at once.

    Args:
        models: What to load.
        config: How to behave.
        ready: Told the address and the models as soon as requests are answered.

    Raises:
        InvalidRequestError: The address cannot be listened on, or an option makes no sense.
        ModelLoadError: A checkpoint cannot be found, read or run; nothing stays open.
        MissingExtraError: Traces are asked for without the package that sends them.
    """
    malloc.keep_few()
    check_installed(config.otlp_traces_endpoint)
    sockets.check_certificates(config)
    bound = sockets.bind(config)
    if not sockets.is_local(config) and not config.api_keys:
        logger.warning(
            "%s is reached from other machines and asks for no API key; set one with --api-key or MILLPOND_API_KEY",
            config.host,
        )
    try:
        with _ending_orderly():
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
    """uvicorn's server, which ends with 0 after a signal and at once after another."""

    def __init__(self, app: FastAPI, config: ServerConfig, *, started: Callable[[], None]) -> None:
        super().__init__(_uvicorn_config(app, config))
        self._app = app
        self._ours = config
        self._tell = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Open the sockets, then tell."""
        try:
            await super().startup(sockets)
        except OSError as error:  # somebody else listens there since it was bound
            await self.lifespan.shutdown()
            raise refused(self._ours, error) from None
        self._tell()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the sockets, let requests end, close the models."""
        logger.info("stopping: requests that run have %g s", self._ours.drain_timeout)
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, the second ends the process as it would one that handles none."""
        if self.should_exit:
            sockets.close([], self._ours)
            os._exit(128 + sig)  # not by the signal itself: a container's first process would survive that
        self._app.state.drain.begin()
        self.should_exit = True


def _uvicorn_config(app: FastAPI, config: ServerConfig) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=Wire,
        log_config=None,  # the program's own handlers write its lines
        access_log=False,  # the gate's line says more
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
def _ending_orderly() -> Iterator[None]:
    """Where uvicorn does not listen to it, SIGTERM ends the program as an exception does.

    A container's first process would not hear it otherwise.
    """

    def end(sig: int, _: FrameType | None) -> None:
        raise SystemExit(128 + sig)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
