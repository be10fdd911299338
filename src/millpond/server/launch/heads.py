"""Heads: what RFC 9112 demands of a request's head, beyond what the parser refuses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus

# RFC 3986's host, which is a name or an address in brackets and may be empty, and a port. An address may also
# have a zone, which some clients send (fe80::1%eth0).
_HOST = re.compile(
    rb"(?:\[[0-9A-Fa-fv:.]+(?:%[A-Za-z0-9._~-]+)?\]|(?:[A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*)(?::[0-9]*)?"
)


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why a message is not taken as a request.

    Attributes:
        status: The status of the answer.
        message: What is wrong with it.
    """

    status: HTTPStatus
    message: str


def refusal(version: str, headers: Sequence[tuple[bytes, bytes]]) -> Refusal | None:
    """What is wrong with a head; ``None`` if it is that of a request.

    Args:
        version: HTTP version, such as ``1.1``.
        headers: Names in lower case, and values without whitespace around them.
    """
    if version not in ("1.0", "1.1"):
        status = HTTPStatus.BAD_REQUEST if version == "0.9" else HTTPStatus.HTTP_VERSION_NOT_SUPPORTED
        return Refusal(status=status, message=f"Unsupported HTTP version {version}; use HTTP/1.1")
    hosts, codings = [], []
    for name, value in headers:
        if name == b"host":
            hosts.append(value)
        elif name == b"transfer-encoding":
            codings.append(value)
    if len(hosts) > 1:
        return _bad(f"The request has {len(hosts)} Host headers; send one")
    if not hosts and version == "1.1":
        return _bad("The request has no Host header, which HTTP/1.1 demands; send one")
    if hosts and _HOST.fullmatch(hosts[0]) is None:
        return _bad("The Host header is no host with an optional port; send one such as localhost:8000")
    return _coding_refusal(version, b",".join(codings)) if codings else None


def _coding_refusal(version: str, field: bytes) -> Refusal | None:
    if version == "1.0":
        return _bad("HTTP/1.0 has no Transfer-Encoding; send a Content-Length")
    if field.lower() != b"chunked":
        return _bad("Transfer-Encoding is other than chunked, which is all that is read here; send it alone")
    return None


def _bad(message: str) -> Refusal:
    return Refusal(status=HTTPStatus.BAD_REQUEST, message=message)
