"""Raw HTTP: bytes to a server on a port, and the responses in what comes back."""

from __future__ import annotations

import contextlib
import re
import socket
from urllib.parse import urlsplit


def connect(address: str) -> socket.socket:
    split = urlsplit(address)
    connection = socket.create_connection((str(split.hostname), int(split.port or 0)), timeout=300)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def received(connection: socket.socket) -> bytes:
    """Everything until the server closes the connection."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(1 << 16):
            data += part
    return data


def talk(address: str, *parts: bytes, leave: bool = False) -> bytes:
    """What the server sends in return; with ``leave`` it is told that no more comes, as by a client that is gone."""
    with connect(address) as connection:
        with contextlib.suppress(OSError):  # it does not listen any more
            for part in parts:
                connection.sendall(part)
            if leave:
                connection.shutdown(socket.SHUT_WR)
        return received(connection)


def replies(data: bytes) -> list[tuple[int, str, bytes]]:
    """The status, the head in lower case and the body of each response."""
    found = []
    while data:
        head, _, data = data.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1."), head
        length = re.search(rb"content-length: (\d+)", head.lower())
        size = int(length[1]) if length else 0
        found.append((int(head.split()[1]), head.decode("latin-1").lower(), data[:size]))
        data = data[size:]
    return found


def statuses(data: bytes) -> list[int]:
    return [status for status, _, _ in replies(data)]


def chunks(*parts: bytes) -> bytes:
    """A body in chunks, and the header that says so."""
    return b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(b"%x\r\n%s\r\n" % (len(each), each) for each in parts)
