"""Opening a Milvus client by location: a server's URL, or a file of Milvus Lite."""

from __future__ import annotations

import os
from pathlib import Path

from pymilvus import MilvusClient

from millpond.errors import InvalidRequestError
from millpond.ingest.sinks.location import is_address, is_url
from millpond_milvus.lite import LiteFile, open_file, own_connection

URL_SCHEMES = ("http://", "https://", "tcp://", "unix:")  # of a server


def connect(uri: str) -> tuple[MilvusClient, LiteFile | None]:
    """A client of a server, or of Milvus Lite over a file, and this file.

    Raises:
        InvalidRequestError: The uri is neither, a URL with credentials, or an address without a scheme.
        MissingExtraError: The uri is a file, and milvus-lite is not installed.
        SinkError: Another process uses the file, or it cannot be written.
    """
    if is_url(uri, URL_SCHEMES):
        if "@" in uri.partition("//")[2].split("/")[0]:
            raise InvalidRequestError("the URL holds credentials; leave them out and set MILVUS_TOKEN")
        token = os.environ.get("MILVUS_TOKEN", "")
        try:
            return MilvusClient(uri, token=token, **own_connection()), None
        except ValueError as error:
            raise InvalidRequestError(
                f"uri={uri!r} is no URL of a Milvus ({error}); write http://host:19530"
            ) from error
    if is_address(uri) and "://" not in uri:
        raise InvalidRequestError(
            "the uri looks like the address of a server; write http://host:19530, or './NAME.db' for a file of Milvus "
            "Lite"
        )
    if "://" in uri or "\0" in uri or uri.startswith("~") or not uri.endswith(".db"):
        raise InvalidRequestError(
            f"uri={uri!r} is no place for Milvus; pass a *.db file, a server's URL or a MilvusClient"
        )
    if not Path(uri).absolute().parent.is_dir():
        raise InvalidRequestError(
            f"uri={uri!r}: there is no folder {str(Path(uri).absolute().parent)!r}; create it first"
        )
    return open_file(uri)
