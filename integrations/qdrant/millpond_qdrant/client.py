"""Opening a Qdrant client by location, and saying what went wrong when it fails."""

from __future__ import annotations

import os
import sqlite3
from json import JSONDecodeError
from pathlib import Path
from urllib.parse import urlsplit

from qdrant_client import QdrantClient
from qdrant_client.common.client_exceptions import QdrantException, ResourceExhaustedResponse
from qdrant_client.http.exceptions import ApiException, ResponseHandlingException, UnexpectedResponse

from millpond.errors import InvalidRequestError, SinkError
from millpond.ingest.location import is_address, is_url, url_of
from millpond_qdrant.folder import FolderLease

_MEMORY = ":memory:"
_SCHEMES = ("http://", "https://")


def connect(location: str, timeout: int) -> QdrantClient | FolderLease:
    """A client of a server or of memory, or the use of a folder.

    Raises:
        InvalidRequestError: The location is none of these, a URL with credentials, or an address without a scheme.
        SinkError: The folder is in use by another process, damaged, or cannot be created.
    """
    if location == _MEMORY:
        return QdrantClient(_MEMORY)
    if is_url(location, _SCHEMES):
        return _connect_server(location, timeout)
    if "://" in location or "\0" in location or location.startswith("~") or not location:
        raise InvalidRequestError(
            f"location={location!r} is no place for Qdrant; pass ':memory:', an http(s) URL, a folder or a QdrantClient"
        )
    if is_address(location):
        shown = "the location" if "@" in location else f"location={location!r}"  # it might hold a password
        raise InvalidRequestError(
            f"{shown} looks like the address of a server; write {url_of(location, port=6333)!r}, or "
            f"{'./' + location if '@' not in location else './NAME'!r} for a folder of this name"
        )
    if Path(location).exists() and not Path(location).is_dir():
        raise InvalidRequestError(f"location={location!r} is a file; Qdrant keeps its data in a folder")
    return _open_folder(location)


def describe_error(error: Exception, request: str) -> str | None:
    """An error of the client as the end of "Qdrant at location ..."; ``None`` for any other error."""
    match error:
        case UnexpectedResponse():
            detail = error.content[:300].decode(errors="replace")
            return f"answered {request} with {error.status_code} {error.reason_phrase}: {detail}"
        case ResourceExhaustedResponse():
            return f"is too busy for {request}; it asks to wait {error.retry_after_s} s"
        case ResponseHandlingException():
            return f"did not answer {request}: {error.source!r}"
        case JSONDecodeError():
            return f"answered {request} with something that is not JSON ({error})"
        case ApiException() | QdrantException() | ValueError() | RuntimeError() | OSError() | sqlite3.Error():
            return f"refused {request}: {error}"
    return None


def _connect_server(url: str, timeout: int) -> QdrantClient:
    if "@" in url.split("/")[2]:
        raise InvalidRequestError("the URL holds credentials; leave them out and set QDRANT_API_KEY")
    key = os.environ.get("QDRANT_API_KEY") or None
    try:
        if not urlsplit(url).hostname:
            raise ValueError("it names no host")
        return QdrantClient(url=url, api_key=key, timeout=timeout, check_compatibility=False)
    except ValueError as error:
        raise InvalidRequestError(
            f"location={url!r} is no URL of a Qdrant ({error}); write http://host:6333"
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
