"""Errors of qdrant-client: what happened in words, and what a run can do about it."""

from __future__ import annotations

import re
import sqlite3
import ssl
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from json import JSONDecodeError

import grpc
import httpx
from qdrant_client.common.client_exceptions import QdrantException, ResourceExhaustedResponse
from qdrant_client.http.exceptions import ApiException, ResponseHandlingException, UnexpectedResponse

from millpond.errors import SinkError, SinkRejectedError, SinkTooLargeError, SinkUnavailableError

_SHOWN = 300  # bytes of an answer
_BUSY = (408, 425, 429)
_BAD_ROWS = (400, 422)
# "Payload error: JSON payload (62922836 bytes) is larger than allowed (limit: 33554432 bytes)": Qdrant's 400.
_TOO_LARGE = re.compile(rb"(?i)(payload|body|entity|request)[^.]*(larger than|too large|exceeds? )")
# "Sent message larger than max", "decoded message length too large", "Received message larger than max"
_LARGE_MESSAGE = re.compile(r"(?i)message (length )?(too large|larger than)")
_BAD_RETRY_AFTER = "Retry-After header value is not a valid integer: "
# Of a connection that ended; any other error of the protocol is an answer that is no HTTP.
_ENDED = re.compile(r"(?i)disconnected|closed|terminated|reset")
_GRPC_BUSY = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INTERNAL,  # Qdrant's 500
}


class UnfinishedError(Exception):
    """Qdrant answered a change that was to be waited for with a status other than ``completed``."""

    def __init__(self, status: object) -> None:
        super().__init__(status)
        self.status = str(getattr(status, "value", status))


def describe_error(error: Exception, request: str) -> str | None:
    """An error of the client as the end of "Qdrant at location ..."; ``None`` for any other error."""
    match error:
        case UnexpectedResponse():
            detail = error.content[:_SHOWN].decode(errors="replace")
            moved = error.headers.get("Location") if error.headers is not None else None
            to = f", to {_without_credentials(moved)}; pass the URL where it is" if moved else ""
            return f"answered {request} with {error.status_code} {error.reason_phrase}{to}: {detail}"
        case ResourceExhaustedResponse():
            return f"is too busy for {request}; it asks to wait {error.retry_after_s} s"
        case QdrantException() if _BAD_RETRY_AFTER in str(error):
            return f"is too busy for {request}; it asks to wait until {str(error).partition(_BAD_RETRY_AFTER)[2]}"
        case ResponseHandlingException(source=httpx.TimeoutException()):
            return f"did not answer {request}: {error.source!r}; pass a larger timeout if the server is only slow"
        case ResponseHandlingException(source=httpx.RemoteProtocolError() as source) if not _may_pass(source):
            return f"answered {request} with something that is not HTTP ({source})"
        case ResponseHandlingException(source=httpx.TransportError()):
            return f"did not answer {request}: {error.source!r}"
        case ResponseHandlingException():
            return f"answered {request} with something that its client cannot read: {_in_a_line(error.source)}"
        case JSONDecodeError():
            return f"answered {request} with something that is not JSON ({error})"
        case UnfinishedError():
            return (
                f"answered {request} with the status {error.status!r} instead of 'completed', so whether the rows are "
                "stored is not known; run again"
            )
        case grpc.RpcError():
            code, details = _grpc_status(error)
            verb = "did not answer" if code in (grpc.StatusCode.UNAVAILABLE, None) else "answered"
            name = "an unknown status" if code is None else code.name
            return f"{verb} {request} over gRPC{' with' if verb == 'answered' else ':'} {name}: {details[:_SHOWN]}"
        case ApiException() | QdrantException() | ValueError() | RuntimeError() | OSError() | sqlite3.Error():
            return f"refused {request}: {error}"
    return None


def classify_error(error: Exception) -> type[SinkError]:
    """What kind of SinkError an error of the client becomes."""
    match error:
        case UnexpectedResponse(status_code=int() as status):
            if status == 413 or (status == 400 and _TOO_LARGE.search(error.content)):
                return SinkTooLargeError
            if status in _BUSY or status >= 500:
                return SinkUnavailableError
            return SinkRejectedError if status in _BAD_ROWS else SinkError
        case ResourceExhaustedResponse():
            # Over gRPC it may be a message that is too large, of which a wait makes nothing smaller.
            return SinkTooLargeError if _LARGE_MESSAGE.search(str(error)) else SinkUnavailableError
        case QdrantException() if _BAD_RETRY_AFTER in str(error):
            return SinkUnavailableError
        case ResponseHandlingException(source=httpx.TransportError() as source):
            return SinkUnavailableError if _may_pass(source) else SinkError
        case UnfinishedError(status="wait_timeout"):
            return SinkUnavailableError
        case grpc.RpcError():
            code, details = _grpc_status(error)
            if _LARGE_MESSAGE.search(details):
                return SinkTooLargeError
            if code in _GRPC_BUSY:
                return SinkUnavailableError
            return SinkRejectedError if code is grpc.StatusCode.INVALID_ARGUMENT else SinkError
    return SinkError


def retry_after(error: Exception) -> float | None:
    """Seconds that the server asks to wait."""
    match error:
        case ResourceExhaustedResponse():
            return _seconds(str(error.retry_after_s))
        case QdrantException() if _BAD_RETRY_AFTER in str(error):
            return _seconds(str(error).partition(_BAD_RETRY_AFTER)[2])
        case UnexpectedResponse() if error.headers is not None:
            return _seconds(error.headers.get("Retry-After"))
    return None


def _seconds(value: str | None) -> float | None:
    """Seconds of a Retry-After: a number, or a date."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            date = parsedate_to_datetime(value)
        except ValueError:
            return None
        seconds = (date.astimezone(UTC) - datetime.now(UTC)).total_seconds()
        return max(seconds, 0.0)
    return seconds if 0 <= seconds < float("inf") else None


def _may_pass(error: httpx.TransportError) -> bool:
    """Whether the same request may succeed later."""
    if isinstance(error, httpx.LocalProtocolError | httpx.UnsupportedProtocol):
        return False
    if isinstance(error, httpx.RemoteProtocolError):
        return bool(_ENDED.search(str(error)))
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return False
        if isinstance(cause, ssl.SSLError) and cause.reason == "WRONG_VERSION_NUMBER":  # no TLS at that port
            return False
        cause = cause.__cause__ or cause.__context__
    return True


def _grpc_status(error: grpc.RpcError) -> tuple[grpc.StatusCode | None, str]:
    """Code and details of a call, which the base class does not have."""
    if not isinstance(error, grpc.Call):
        return None, str(error)
    return error.code(), error.details() or ""


def _in_a_line(error: Exception) -> str:
    return " ".join(str(error).split())[:_SHOWN] or repr(error)


def _without_credentials(url: str) -> str:
    return re.sub(r"//[^/@]*@", "//", url)
