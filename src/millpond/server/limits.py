"""Limits: how much one request may ask for."""

from __future__ import annotations

from fastapi import Request

from millpond.server.errors import RequestError
from millpond.server.state import config_of


def check_count(count: int, request: Request, *, field: str) -> None:
    """Refuse a request that has more texts than the server takes at once.

    Args:
        count: How many there are.
        request: Whose they are.
        field: What the request calls them.

    Raises:
        RequestError: More than ``max_inputs``.
    """
    most = config_of(request).max_inputs
    if count > most:
        raise RequestError(f"{count} {field} in one request; this server takes {most}: send them in parts", param=field)
