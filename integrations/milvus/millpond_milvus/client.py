"""Opening a Milvus client by location, and saying what went wrong when it fails."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import grpc
from pymilvus import MilvusClient, MilvusException
from pymilvus.exceptions import ConnectionConfigException

from millpond.errors import InvalidRequestError, MissingExtraError, SinkError
from millpond.ingest.location import is_address, is_url, url_of

URL_SCHEMES = ("http://", "https://", "tcp://", "unix:")  # of a server

lite_lock = threading.RLock()
"""Held while a file of Milvus Lite is opened and a collection of it created, which Lite takes from one thread only."""


def connect(uri: str, timeout: float) -> MilvusClient:
    """A client of a server, or of Milvus Lite over a file.

    Raises:
        InvalidRequestError: The uri is neither, a URL with credentials, or an address without a scheme.
        MissingExtraError: The uri is a file, and milvus-lite is not installed.
        SinkError: Another process uses the file, or Milvus Lite did not write it.
    """
    if is_url(uri, URL_SCHEMES):
        if "@" in uri.partition("//")[2].split("/")[0]:
            raise InvalidRequestError("the URL holds credentials; leave them out and set MILVUS_TOKEN")
        try:
            return MilvusClient(uri, token=os.environ.get("MILVUS_TOKEN", ""), timeout=timeout)
        except ValueError as error:
            raise InvalidRequestError(
                f"uri={uri!r} is no URL of a Milvus ({error}); write http://host:19530"
            ) from error
    if is_address(uri) and "://" not in uri:
        shown = "the uri" if "@" in uri else f"uri={uri!r}"  # it might hold a password
        raise InvalidRequestError(
            f"{shown} looks like the address of a server; write {url_of(uri, port=19530)!r}, or './NAME.db' for a file "
            "of Milvus Lite"
        )
    if "://" in uri or "\0" in uri or uri.startswith("~") or not uri.endswith(".db"):
        raise InvalidRequestError(
            f"uri={uri!r} is no place for Milvus; pass a *.db file, a server's URL or a MilvusClient"
        )
    if not Path(uri).absolute().parent.is_dir():
        raise InvalidRequestError(
            f"uri={uri!r}: there is no folder {str(Path(uri).absolute().parent)!r}; create it first"
        )
    return _open_file(uri, timeout)


def describe_error(error: Exception, request: str) -> str | None:
    """An error of the client as the end of "Milvus at location ..."; ``None`` for any other error."""
    if isinstance(error, MilvusException):
        return f"refused {request}: {error.message}"
    if isinstance(error, grpc.RpcError):
        return f"did not answer {request}: {error.details() if isinstance(error, grpc.Call) else error}"
    return None


def _open_file(path: str, timeout: float) -> MilvusClient:
    try:
        import milvus_lite  # noqa: F401
    except ImportError:
        raise MissingExtraError("a *.db file needs Milvus Lite: pip install milvus-lite") from None
    # The client pings every 10 s by default; Lite's server closes an idle connection that pings.
    no_pings = {"grpc.keepalive_time_ms": 2**31 - 1, "grpc.keepalive_permit_without_calls": False}
    try:
        # Lite serves a file once per process, by its path as it is written; of two threads that ask for it at once, the
        # second would be told that another process has it.
        with lite_lock:
            return MilvusClient(os.path.realpath(path), timeout=timeout, grpc_options=no_pings)
    except ConnectionConfigException as error:
        raise SinkError(
            f"{path!r} cannot be opened: another process uses it (Milvus Lite serves one at a time, until it ends; run "
            "a Milvus server, which any number of processes may use, and pass its URL), or it is no database of Milvus "
            "Lite"
        ) from error
