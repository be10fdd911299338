"""Sockets of a server: bound before its models are loaded, opened afterwards."""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import socket
import ssl
import stat
import sys
from pathlib import Path

from millpond.errors import InvalidRequestError
from millpond.server.settings.config import ServerConfig

logger = logging.getLogger(__name__)

# Files and sockets that the server opens beside its connections: caches, traces, temporary files.
_OTHER_FILES = 64
# More than one process can make use of; each may hold some 100 KB of a request that is not complete.
_MAX_DEFAULT = 16384
# A host name can resolve to an address family that the machine does not have.
_NO_SUCH_FAMILY = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def bind(config: ServerConfig) -> list[socket.socket]:
    """The bound sockets for ``config``; they refuse connections until the server listens."""
    if config.uds is not None:
        return [_bind_file(config.uds)]
    try:
        resolved = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise listen_error(config, error) from None
    sockets: list[socket.socket] = []
    addresses = list(dict.fromkeys((family, address) for family, _, _, _, address in resolved))
    for i, (family, address) in enumerate(addresses):
        # All addresses use the free port that the first one got.
        port = sockets[0].getsockname()[1] if sockets else config.port
        try:
            sockets.append(_bind_address(family, (address[0], port, *address[2:]), alone=len(addresses) == 1))
        except OSError as error:
            if error.errno in _NO_SUCH_FAMILY and (sockets or i + 1 < len(addresses)):
                continue
            close(sockets, config)
            raise listen_error(config, error) from None
    return sockets


def close(sockets: list[socket.socket], config: ServerConfig) -> None:
    """Close the sockets, and remove the file of a Unix socket."""
    for each in sockets:
        each.close()
    if config.uds is not None:
        config.uds.unlink(missing_ok=True)


def address_of(sockets: list[socket.socket], config: ServerConfig) -> str:
    """The address for clients: a URL, or ``unix:`` and a path."""
    if config.uds is not None:
        return f"unix:{config.uds}"
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"{'http' if config.ssl_certfile is None else 'https'}://{host}:{sockets[0].getsockname()[1]}"


def is_local(config: ServerConfig) -> bool:
    """Whether only programs on this machine can reach the server."""
    if config.uds is not None or config.host == "localhost":
        return True
    try:
        return ipaddress.ip_address(config.host).is_loopback
    except ValueError:
        return False


def check_certificates(config: ServerConfig) -> None:
    """Read the TLS files once, so that a mistake is reported before the models are loaded."""
    if config.ssl_certfile is None:
        return
    for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
        path: Path | None = getattr(config, name)
        if path is not None and not os.access(path, os.R_OK):
            raise InvalidRequestError(f"{name}={str(path)!r} is not there, or cannot be read; give a PEM file")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Without a password OpenSSL asks the terminal for that of an encrypted key.
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password="")
        if config.ssl_ca_certs is not None:
            context.load_verify_locations(config.ssl_ca_certs)
    except (ssl.SSLError, OSError) as error:
        raise InvalidRequestError(
            f"ssl_certfile={str(config.ssl_certfile)!r}, its key and its authorities do not work together "
            f"({error.strerror or error}); give PEM files that belong to each other, and a key that is not encrypted"
        ) from None


def _bind_address(family: int, address: tuple[object, ...], *, alone: bool) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":  # elsewhere the option would share the port with its owner
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and not alone:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound


def _bind_file(path: Path) -> socket.socket:
    """A Unix socket that only its owner can connect to; the file of a stopped server is replaced."""
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        problem = "is a file of another kind" if path.exists() and not stat.S_ISSOCK(path.stat().st_mode) else None
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            if problem is None and probe.connect_ex(str(path)) == 0:
                problem = "belongs to a server that runs"
        if problem is None:
            path.unlink(missing_ok=True)
            bound.bind(str(path))
            path.chmod(0o600)
            return bound
    except OSError as error:
        problem = f"cannot be listened on ({error.strerror or error})"
    bound.close()
    raise InvalidRequestError(f"uds={str(path)!r} {problem}; choose another path")


def listen_error(config: ServerConfig, error: OSError) -> InvalidRequestError:
    """The error for an address that cannot be listened on."""
    reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
    return InvalidRequestError(
        f"host={config.host!r}, port={config.port} cannot be listened on ({reason}); choose another port, 0 for any "
        "free one, or an address of this machine"
    )


def allowed_connections(asked: int | None) -> int:
    """The most connections that the limit of open files leaves room for, and of these at most ``asked``."""
    room = sys.maxsize
    try:
        import resource
    except ImportError:  # Windows has no such limit
        pass
    else:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if limit != resource.RLIM_INFINITY:
            try:
                opened = len(os.listdir("/dev/fd"))
            except OSError:
                opened = _OTHER_FILES
            room = max(1, limit - opened - min(_OTHER_FILES, limit // 4))
    if asked is None:
        return min(room, _MAX_DEFAULT)
    if asked > room:
        logger.warning(
            "--max-connections=%d is more than the limit of open files leaves room for (%d); raise it with ulimit -n",
            asked,
            room,
        )
    return min(room, asked)
