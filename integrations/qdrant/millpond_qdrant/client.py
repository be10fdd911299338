"""Opening a Qdrant client by location."""

from __future__ import annotations

import math
import os
import re
import sqlite3
from pathlib import Path
from urllib.parse import urlsplit

import httpx
from qdrant_client import QdrantClient

from millpond.errors import InvalidRequestError, SinkError
from millpond.ingest.sinks.location import is_address, is_url
from millpond_qdrant.folder import FolderLease

_MEMORY = ":memory:"
_SCHEMES = ("http://", "https://")
_KEY = re.compile(r"[!-~]+( +[!-~]+)*")
# Qdrant closes a connection that is idle for 5 s; one that is used at that moment would fail.
_LIMITS = httpx.Limits(max_connections=None, keepalive_expiry=3.0)


def connect(
    location: str, timeout: float, *, prefer_grpc: bool = False, grpc_port: int = 6334
) -> QdrantClient | FolderLease:
    """A client of a server or of memory, or the use of a folder.

    Args:
        location: The URL, ``":memory:"`` or the folder.
        timeout: Seconds from the start of a request to a server until the last byte of its answer.
        prefer_grpc: Whether a server's points are written and searched over gRPC.
        grpc_port: The server's port for that.

    Raises:
        InvalidRequestError: The location is none of these, a URL with credentials, or an address without a scheme.
        SinkError: The folder is in use by another process, damaged, or cannot be created.
    """
    if location == _MEMORY:
        return QdrantClient(_MEMORY)
    if is_url(location, _SCHEMES):
        return _connect_server(location, timeout, prefer_grpc, grpc_port)
    if "://" in location or "\0" in location or location.startswith("~") or not location:
        raise InvalidRequestError(
            f"location={location!r} is no place for Qdrant; pass ':memory:', an http(s) URL, a folder or a QdrantClient"
        )
    if is_address(location):
        raise InvalidRequestError(
            "the location looks like the address of a server; write http://host:6333, or './NAME' for a folder"
        )
    if Path(location).exists() and not Path(location).is_dir():
        raise InvalidRequestError(f"location={location!r} is a file; Qdrant keeps its data in a folder")
    return _open_folder(location)


def _connect_server(url: str, timeout: float, prefer_grpc: bool, grpc_port: int) -> QdrantClient:
    if "@" in url.split("/")[2]:
        raise InvalidRequestError("the URL holds credentials; leave them out and set QDRANT_API_KEY")
    key = os.environ.get("QDRANT_API_KEY") or None
    if key is not None and not _KEY.fullmatch(key):  # else the error of the header would show it
        raise InvalidRequestError(
            "QDRANT_API_KEY holds a character that no key has (a line end, a space around it, a letter beyond ASCII); "
            "set it again"
        )
    try:
        if not urlsplit(url).hostname:
            raise ValueError("it names no host")
        return QdrantClient(
            url=url,
            api_key=key,
            timeout=math.ceil(timeout),
            check_compatibility=False,
            prefer_grpc=prefer_grpc,
            grpc_port=grpc_port,
            grpc_options={"grpc.enable_retries": 0},
            limits=_LIMITS,
        )
    except ValueError as error:
        raise InvalidRequestError(
            f"location={url!r} cannot be used ({error}); write http://host:6333, and a proxy that speaks HTTP"
        ) from error


def _open_folder(folder: str) -> FolderLease:
    try:
        return FolderLease(folder)
    except RuntimeError as error:
        raise SinkError(
            f"the folder {folder!r} is in use by another process or client; close that one, or run a Qdrant server, "
            "which any number of processes may use, and pass its URL"
        ) from error
    except OSError as error:
        raise SinkError(f"the folder {folder!r} cannot be opened or made ({error.strerror}); choose another") from error
    except (ValueError, LookupError, TypeError, AttributeError, sqlite3.Error) as error:
        # qdrant-client does not validate the files: damage or a foreign file raises any of these.
        raise SinkError(
            f"the folder {folder!r} holds no database that this qdrant-client can read "
            f"({type(error).__name__}: {error}); restore it, or choose another folder"
        ) from error
