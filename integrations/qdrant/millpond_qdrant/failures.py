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
from millpond.ingest.sinks.client import Fault

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


def fault_of(error: Exception, request: str) -> Fault | None:
    """What an error of the client means; ``None`` for one that no client raises on purpose."""
    match error:
        case UnexpectedResponse():
            return _answered(error, request)
        case ResourceExhaustedResponse():
            words = f"is too busy for {request}; it asks to wait {error.retry_after_s} s"
            # Over gRPC it may be a message that is too large, of which a wait makes nothing smaller.
            kind = SinkTooLargeError if _LARGE_MESSAGE.search(str(error)) else SinkUnavailableError
            return Fault(words=words, kind=kind, retry_after=_seconds(str(error.retry_after_s)))
        case QdrantException() if _BAD_RETRY_AFTER in str(error):
            asked = str(error).partition(_BAD_RETRY_AFTER)[2]
            words = f"is too busy for {request}; it asks to wait until {asked}"
            return Fault(words=words, kind=SinkUnavailableError, retry_after=_seconds(asked))
        case ResponseHandlingException(source=httpx.TransportError() as source):
            return _unanswered(source, request)
        case ResponseHandlingException():
            shown = " ".join(str(error.source).split())[:_SHOWN] or repr(error.source)
            return Fault(words=f"answered {request} with something that its client cannot read: {shown}")
        case JSONDecodeError():
            return Fault(words=f"answered {request} with something that is not JSON ({error})")
        case UnfinishedError():
            words = (
                f"answered {request} with the status {error.status!r} instead of 'completed', so whether the rows are "
                "stored is not known; run again"
            )
            return Fault(words=words, kind=SinkUnavailableError if error.status == "wait_timeout" else SinkError)
        case grpc.RpcError():
            return _rpc_fault(error, request)
        case ApiException() | QdrantException() | ValueError() | RuntimeError() | OSError() | sqlite3.Error():
            return Fault(words=f"refused {request}: {error}")
    return None


def _answered(error: UnexpectedResponse, request: str) -> Fault:
    """A status that is no success."""
    status, headers = error.status_code, error.headers or httpx.Headers()
    kind: type[SinkError] = SinkRejectedError if status in _BAD_ROWS else SinkError
    if status == 413 or (status == 400 and _TOO_LARGE.search(error.content)):
        kind = SinkTooLargeError
    elif status is not None and (status in _BUSY or status >= 500):
        kind = SinkUnavailableError
    moved = re.sub(r"//[^/@]*@", "//", headers.get("Location") or "")  # without credentials
    to = f", to {moved}; pass the URL where it is" if moved else ""
    detail = error.content[:_SHOWN].decode(errors="replace")
    words = f"answered {request} with {status} {error.reason_phrase}{to}: {detail}"
    return Fault(words=words, kind=kind, retry_after=_seconds(headers.get("Retry-After")))


def _unanswered(source: httpx.TransportError, request: str) -> Fault:
    """No answer, or one that is no HTTP."""
    passes = _may_pass(source)
    if isinstance(source, httpx.RemoteProtocolError) and not passes:
        return Fault(words=f"answered {request} with something that is not HTTP ({source})")
    late = "; pass a larger timeout if the server is only slow" if isinstance(source, httpx.TimeoutException) else ""
    kind = SinkUnavailableError if passes else SinkError
    return Fault(words=f"did not answer {request}: {source!r}{late}", kind=kind)


def _rpc_fault(error: grpc.RpcError, request: str) -> Fault:
    """A status of gRPC."""
    code, details = (error.code(), error.details() or "") if isinstance(error, grpc.Call) else (None, str(error))
    name = "an unknown status" if code is None else code.name
    verb, link = ("did not answer", ":") if code in (grpc.StatusCode.UNAVAILABLE, None) else ("answered", " with")
    kind: type[SinkError] = SinkError
    if _LARGE_MESSAGE.search(details):
        kind = SinkTooLargeError
    elif code in _GRPC_BUSY:
        kind = SinkUnavailableError
    elif code is grpc.StatusCode.INVALID_ARGUMENT:
        kind = SinkRejectedError
    return Fault(words=f"{verb} {request} over gRPC{link} {name}: {details[:_SHOWN]}", kind=kind)


def _seconds(value: str | None) -> float | None:
    """Seconds of a Retry-After: a number, or a date."""
    try:
        seconds = float(value or "none")
    except ValueError:
        try:
            date = parsedate_to_datetime(value or "")
        except ValueError:
            return None
        return max((date.astimezone(UTC) - datetime.now(UTC)).total_seconds(), 0.0)
    return seconds if 0 <= seconds < float("inf") else None


def _may_pass(error: httpx.TransportError) -> bool:
    """Whether the same request may succeed later."""
    if isinstance(error, httpx.LocalProtocolError | httpx.UnsupportedProtocol):
        return False
    if isinstance(error, httpx.RemoteProtocolError):
        return bool(_ENDED.search(str(error)))
    cause: BaseException | None = error
    while cause is not None:  # neither a certificate nor a port without TLS becomes another one
        wrong = isinstance(cause, ssl.SSLError) and cause.reason == "WRONG_VERSION_NUMBER"
        if wrong or isinstance(cause, ssl.SSLCertVerificationError):
            return False
        cause = cause.__cause__ or cause.__context__
    return True
