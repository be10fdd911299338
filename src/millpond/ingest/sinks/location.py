"""Tells a server's address from a path, so that a mistyped address does not become a folder or file of that name."""

from __future__ import annotations

import ipaddress
import os
import re

from millpond.errors import InvalidRequestError

_PATH = re.compile(r"\.{0,2}[/\\]|~|[A-Za-z]:[/\\]")  # /x ./x ../x ~/x C:\x
_HOST_AND_PORT = re.compile(r".+:\d{1,5}")
_DOMAIN = re.compile(r"(?:[a-z0-9](?:[a-z0-9-]*[a-z0-9])?\.)+[a-z]{2,}\.?", re.IGNORECASE)
# Of names with one dot, only these are taken for a domain: vectors.db and model.v2 are folders.
_TOP_LEVEL = frozenset(["com", "net", "org", "io", "dev", "cloud", "local", "internal", "localhost"])


def is_url(location: str, schemes: tuple[str, ...]) -> bool:
    """Whether a location begins with one of these lower-case schemes, in any case."""
    return location.lower().startswith(schemes)


def is_address(location: str) -> bool:
    r"""Whether a location that is no URL is probably the address of a server, and no path.

    That is a host with a port, an IP address and ``localhost``, and, unless a folder or file has this name, a domain
    and anything with a colon in its first part (``http:/host``, ``C:`` of a drive apart). A location that begins as a
    path does (``/``, ``./``, ``../``, ``~``, ``C:\``) is none.
    """
    if _PATH.match(location):
        return False
    first = re.split(r"[/\\]", location, maxsplit=1)[0]
    if first.lower() == "localhost" or _HOST_AND_PORT.fullmatch(first) or _is_ip(first):
        return True
    if os.path.exists(location):
        return False
    return (
        ":" in first or location.lower().startswith(("http//", "https//")) or (first == location and _is_domain(first))
    )


def url_of(address: str, *, port: int) -> str:
    """The URL that somebody who wrote this address probably meant, for an error message; it never holds credentials."""
    host = re.sub(r"^https?(?::/?|//)(?!/)", "", address, flags=re.IGNORECASE).rstrip("/\\:").rpartition("@")[2]
    scheme = "https" if address.lower().startswith("https") else "http"
    if _is_ip(host):
        host = f"[{host.strip('[]')}]" if ":" in host else host
    elif _HOST_AND_PORT.fullmatch(re.split(r"[/\\]", host, maxsplit=1)[0]):
        return f"{scheme}://{host}"
    return f"{scheme}://{host}:{port}" if re.fullmatch(r"[\w.-]+|\[[0-9a-fA-F:.]+\]", host) else f"http://host:{port}"


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def _is_domain(name: str) -> bool:
    labels = name.removesuffix(".").split(".")
    if labels[-1].lower() == "db":  # no top-level domain, and the ending of database files
        return False
    return _DOMAIN.fullmatch(name) is not None and (len(labels) > 2 or labels[-1].lower() in _TOP_LEVEL)


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
