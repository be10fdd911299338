"""A deadline over a whole HTTP request. httpx limits each wait on its own, which one byte a second never exceeds."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import httpcore
import httpx

# Of a write. A socket takes at least a part of it within one wait, so a slow reader costs one wait for each.
_WRITTEN = 1 << 14


class DeadlineTransport(httpx.HTTPTransport):
    """HTTP over connections that are kept alive, with one deadline for each request.

    Connecting, TLS, writing the request and reading the answer share the time. It does not cover the system's resolver.

    Args:
        seconds: From the start of a request until the last byte of its answer.
        proxy: URL of a proxy.
        limits: Of the pool of connections.
    """

    def __init__(self, seconds: float, *, proxy: str | None = None, limits: httpx.Limits | None = None) -> None:
        super().__init__(proxy=proxy, limits=limits or httpx.Limits())
        self._clock = _Clock(seconds)
        # A pool takes a backend at construction only, which HTTPTransport does itself.
        self._pool._network_backend = _Backend(self._pool._network_backend, self._clock)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request; its deadline begins."""
        self._clock.start()
        return super().handle_request(request)


class _Clock(threading.local):
    """What is left of the request of this thread, which sends it and reads the answer."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._end = math.inf

    def start(self) -> None:
        self._end = time.monotonic() + self._seconds

    def left(self, timeout: float | None, error: type[httpcore.TimeoutException]) -> float:
        """Seconds that the next wait may take."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise error("timed out")
        return left if timeout is None else min(left, timeout)

    @contextmanager
    def named(self) -> Iterator[None]:
        """Put the limit into the message of an error."""
        try:
            yield
        except httpcore.TimeoutException as error:
            raise type(error)(f"timed out, not done after {self._seconds:g} s") from error


class _Backend(httpcore.NetworkBackend):
    def __init__(self, inner: httpcore.NetworkBackend, clock: _Clock) -> None:
        self._inner = inner
        self._clock = clock

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        hosts = _addresses(host, port)
        with self._clock.named():
            for number, address in enumerate(hosts):
                left = self._clock.left(timeout, httpcore.ConnectTimeout)
                try:
                    stream = self._inner.connect_tcp(
                        address,
                        port,
                        timeout=left / (len(hosts) - number),  # an address that is not reachable leaves some to others
                        local_address=local_address,
                        socket_options=socket_options,
                    )
                    break
                except (httpcore.ConnectError, httpcore.ConnectTimeout):
                    if number == len(hosts) - 1:
                        raise
        return _Stream(stream, self._clock)

    def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[Any] | None = None
    ) -> httpcore.NetworkStream:
        with self._clock.named():
            left = self._clock.left(timeout, httpcore.ConnectTimeout)
            return _Stream(self._inner.connect_unix_socket(path, left, socket_options), self._clock)

    def sleep(self, seconds: float) -> None:
        self._inner.sleep(seconds)


class _Stream(httpcore.NetworkStream):
    def __init__(self, inner: httpcore.NetworkStream, clock: _Clock) -> None:
        self._inner = inner
        self._clock = clock

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        with self._clock.named():
            return self._inner.read(max_bytes, self._clock.left(timeout, httpcore.ReadTimeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        with self._clock.named():
            for start in range(0, len(buffer), _WRITTEN):
                left = self._clock.left(timeout, httpcore.WriteTimeout)
                self._inner.write(buffer[start : start + _WRITTEN], left)

    def close(self) -> None:
        self._inner.close()

    def start_tls(
        self, ssl_context: Any, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        with self._clock.named():
            left = self._clock.left(timeout, httpcore.ConnectTimeout)
            return _Stream(self._inner.start_tls(ssl_context, server_hostname, left), self._clock)

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)


def _addresses(host: str, port: int) -> list[str]:
    """The addresses of a host; the host itself if there is one."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise httpcore.ConnectError(str(error)) from error
    addresses = list(dict.fromkeys(str(address[4][0]) for address in found))
    return addresses if len(addresses) > 1 else [host]
