"""cluster: the Ray cluster that a run uses."""

from __future__ import annotations

import logging
import math
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import ray

from millpond.errors import InvalidRequestError

_CONNECT_SECONDS = 10.0


@contextmanager
def connected(address: str | None) -> Iterator[None]:
    """A connection to a cluster while the block runs; one that the program has already is used, and left open."""
    if ray.is_initialized():
        yield
        return
    local = address in (None, "", "local")
    options: dict[str, Any] = {"include_dashboard": False} if local else {}
    handlers: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():  # another thread may not set them
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        if not local:
            _check_reachable(str(address))
        # Workers' warnings come back with their results.
        ray.init(address="local" if local else address, log_to_driver=False, logging_level=logging.ERROR, **options)
    except (OSError, RuntimeError, ValueError) as error:
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise InvalidRequestError(
            f"address={address!r}: there is no Ray cluster that answers ({reason}); start one by "
            "`ray start --head`, or pass 'local'"
        ) from error
    _restore(handlers)  # Ray ends the program at SIGTERM
    try:
        yield
    finally:
        ray.shutdown()
        _restore(handlers)


def count_workers(workers: int | None, *, num_cpus: float, num_gpus: float, reads: bool) -> int:
    """How many workers to start: by default as many as fit, beside one CPU for reading if Ray reads the source."""
    for name, value in (("num_cpus", num_cpus), ("num_gpus", num_gpus)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise InvalidRequestError(f"{name}={value!r} must be a number from 0")
    if workers is not None and (isinstance(workers, bool) or not isinstance(workers, int) or workers < 1):
        raise InvalidRequestError(f"workers={workers!r} must be an int from 1, or None for as many as fit")
    total: Mapping[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    free = {"CPU": total.get("CPU", 0.0) - (1.0 if reads else 0.0), "GPU": total.get("GPU", 0.0)}
    needs = {"CPU": float(num_cpus), "GPU": float(num_gpus)}
    fit = min([math.floor(free[name] / needs[name] + 1e-6) for name in needs if needs[name]], default=1)
    if fit < (1 if workers is None else workers):
        beside = " beside the one that reads the dataset" if reads else ""
        raise InvalidRequestError(
            f"workers={workers or 1} with num_cpus={num_cpus:g} and num_gpus={num_gpus:g} each do not fit the cluster, "
            f"which has {max(free['CPU'], 0):g} CPUs{beside} and {free['GPU']:g} GPUs; lower them, or add machines "
            "first (of an autoscaling cluster by ray.autoscaler.sdk.request_resources)"
        )
    return fit if workers is None else workers


def _check_reachable(address: str) -> None:
    """Raise OSError if nothing listens at an address with a host and a port: Ray itself would try for minutes."""
    place = urlsplit(address if "://" in address else f"//{address}")
    if place.hostname and place.port:
        socket.create_connection((place.hostname, place.port), timeout=_CONNECT_SECONDS).close()


def _restore(handlers: Mapping[int, Any]) -> None:
    for number, handler in handlers.items():
        if handler is not None:  # else it was not set by Python
            signal.signal(number, handler)
