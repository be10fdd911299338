"""Tells a URL from a path: a URL has a scheme, a path has none."""

from __future__ import annotations

import os
import re

from millpond.errors import InvalidRequestError

# host:6333, which would otherwise become a folder or file of that name; ./host:6333 is one.
_HOST_AND_PORT = re.compile(
    r"(?!\.{0,2}[/\\]|~|[A-Za-z]:[/\\])[^/\\]+:\d{1,5}(?:[/\\].*)?|localhost(?:[/\\].*)?", re.IGNORECASE
)


def is_url(location: str, schemes: tuple[str, ...]) -> bool:
    """Whether a location begins with one of these lower-case schemes, in any case."""
    return location.lower().startswith(schemes)


def is_address(location: str) -> bool:
    """Whether a location without a scheme is a host with a port, or ``localhost``: somebody forgot the scheme."""
    return _HOST_AND_PORT.fullmatch(location) is not None


def check_exists(path: str, *, database: str, marker: str = "") -> None:
    """Raise InvalidRequestError unless a database is at a path, so that a mistyped path does not become a new one.

    Args:
        path: Its folder or file.
        database: The database's name.
        marker: A file of that folder, which every database of this kind has.
    """
    place = os.path.expanduser(path)
    if not os.path.exists(os.path.join(place, marker) if marker else place):
        raise InvalidRequestError(
            f"there is no database of {database} at {path!r}; ingest into it first, or correct the path"
        )
