"""Running a server: bind, load the models, serve, drain."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from millpond.server.app import create_app
from millpond.server.launch import sockets
from millpond.server.launch.server import Server
from millpond.server.served.models import ServedModels
from millpond.server.settings.config import ModelConfig, ServerConfig
from millpond.server.telemetry.tracing import check_installed
from millpond.support import heap

logger = logging.getLogger(__name__)

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
    heap.limit_arenas()
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
                Server(app, config, started=lambda: ready(address, loaded)).run(bound)
            finally:
                loaded.close()
    finally:
        sockets.close(bound, config)


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
