"""What went wrong in a request to Milvus: in words, and as the kind of error that tells a run what to do about it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import grpc
from pymilvus import MilvusException
from pymilvus.exceptions import (
    DataNotMatchException,
    DataTypeNotMatchException,
    DataTypeNotSupportException,
    FieldTypeException,
    ParamError,
    PartitionKeyException,
    PrimaryKeyException,
)
from pymilvus.grpc_gen import common_pb2

from millpond.errors import SinkError, SinkRejectedError, SinkTooLargeError, SinkUnavailableError
from millpond.ingest.sinks.client import Fault

# Codes of a server's answer (pkg/util/merr of Milvus 2.6). A request with one of these may succeed later: not ready,
# unavailable, memory, queue full, rate limit, time tick, resources; loading, recovering; nodes and channels that move.
_BUSY = frozenset(
    [1, 2, 3, 4, 8, 11, 12, 103, 106, 110, 202, 305, 401, 503, 505, 507, 902, 905, 1002, 1003, 1807, 2200, 10_001]
)
# Of those, and besides: the server starts, loads a collection, or moves it from a node that is gone. It is soon over.
_UNLOADED = frozenset([101, 201])
_STARTING = _UNLOADED | {1, 2, 103, 106, 202, 401, 500, 503, 901, 902, 904, 905}
_STARTING_WORDS = re.compile(
    r"not (fully )?loaded|recovering|not ready|service unavailable|no available shard|"
    r"(channel|node) (is )?(not available|not found|offline)",
    re.IGNORECASE,
)
# Of invalid parameters: their rows are refused, others may be accepted. 6 is Milvus Lite's.
_INVALID = frozenset([1100, 1101, 1804])
_LITE_INVALID = 6
_TOO_LARGE = 1102
_NO_DATABASE = frozenset([800, 802])
_NO_ACCESS = frozenset([1400, 1401, 1800])
_REJECTED = (
    DataNotMatchException,
    DataTypeNotMatchException,
    DataTypeNotSupportException,
    FieldTypeException,
    ParamError,
    PartitionKeyException,
    PrimaryKeyException,
)
_BUSY_RPC = frozenset(
    [
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.ABORTED,
    ]
)
_LARGE_RPC = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
_LARGER = re.compile(r"larger than max|exceeds? (the )?max(imum)? (message|size)|too large", re.IGNORECASE)
_NO_GRPC = re.compile(r"http1\.x server|Failed parsing HTTP/2|Expected SETTINGS frame")
_HTTP_STATUS = re.compile(r"\(HTTP status (\d+)\)")


def is_starting(error: Exception) -> bool:
    """Whether a server says that it, or the collection, is not ready yet; what a client says of itself does not."""
    if not isinstance(error, MilvusException) or error.code in _INVALID or _own(error):
        return False
    message = str(error.message)
    return error.code in _STARTING or (_STARTING_WORDS.search(message) is not None and "expression" not in message)


def is_unloaded(error: Exception) -> bool:
    """Whether a server says that the collection must be loaded."""
    if not isinstance(error, MilvusException) or not is_starting(error):
        return False
    return error.code in _UNLOADED or "not loaded" in str(error.message)


def _own(error: MilvusException) -> bool:
    """Whether the client itself failed, whose code 1 of a server means "not ready"."""
    return str(error.message).startswith(("Unexpected error, message=<", "Fail connecting to server"))


def fault_of(error: Exception, request: str, *, uri: str, lite: bool = False) -> Fault | None:
    """What an error of the client means; ``None`` for an error that no client raises on purpose."""
    call = next(
        (each for each in _chain(error) if isinstance(each, grpc.RpcError) and isinstance(each, grpc.Call)), None
    )
    if call is not None:  # gRPC's error behind one of the client, which keeps it as the cause or the context
        fault = _transport_fault(call, request, uri=uri)
        return replace(fault, retry_after=_retry_after(call))
    if isinstance(error, MilvusException):
        if str(error.message).startswith("Fail connecting to server"):  # it keeps the reason to itself
            return Fault(words=f"did not answer {request}: {error.message}", kind=SinkUnavailableError)
        return _answer_fault(error, request, lite=lite)
    if isinstance(error, ValueError) and "closed channel" in str(error):
        return Fault(words=f"did not get {request}: its client is closed; open another one")
    return None


def _retry_after(call: grpc.Call) -> float | None:
    """Seconds that a proxy before the server asks to wait."""
    trailers = {str(key): value for key, value in (call.trailing_metadata() or ())}
    for key, unit in (("grpc-retry-pushback-ms", 1000.0), ("retry-after", 1.0)):
        with suppress(KeyError, ValueError):
            if (seconds := float(trailers[key]) / unit) >= 0:
                return seconds
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    pending = [error]
    while pending:
        each = pending.pop(0)
        if id(each) in seen:  # the client raises errors from themselves
            continue
        seen.add(id(each))
        yield each
        pending += [other for other in (each.__cause__, each.__context__) if other is not None]


def _transport_fault(call: grpc.Call, request: str, *, uri: str) -> Fault:
    """What gRPC says of a call."""
    code, details = call.code(), call.details() or ""
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return Fault(words=f"refused {request}: {_access(details)}")
    if _LARGER.search(details) and code in _LARGE_RPC:
        return Fault(words=f"refused {request}: it is too large ({details})", kind=SinkTooLargeError)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return Fault(words=f"is too busy for {request}: {details}", kind=SinkUnavailableError)
    if code is grpc.StatusCode.UNIMPLEMENTED and request == "the connection":
        words = (
            f"what answers there is no Milvus, or one before 2.3 ({details}); check the port, which is usually 19530"
        )
        return Fault(words=f"refused {request}: {words}")
    if code is grpc.StatusCode.UNAVAILABLE:
        return _unavailable(details, request, secure=uri.lower().startswith("https"))
    kind = SinkUnavailableError if code in _BUSY_RPC else SinkError
    return Fault(words=f"did not answer {request}: {details or code.name}", kind=kind)


def _unavailable(details: str, request: str, *, secure: bool) -> Fault:
    """The server cannot be reached, or is no Milvus; gRPC says which in its details."""
    refused = f"did not answer {request}: "
    if "CERTIFICATE_VERIFY_FAILED" in details or "Peer name" in details or "peer certificate" in details:
        return Fault(
            words=f"{refused}its certificate is not trusted here ({details}); pass a MilvusClient with "
            "server_pem_path, or set GRPC_DEFAULT_SSL_ROOTS_FILE_PATH to its issuer's certificate"
        )
    if secure and re.search(r"WRONG_VERSION_NUMBER|WRONG_SSL_VERSION|HTTP_REQUEST", details):
        return Fault(words=f"{refused}it does not speak TLS; write http:// instead of https://")
    if _NO_GRPC.search(details):
        status = match[1] if (match := _HTTP_STATUS.search(details)) else ""
        shown = f"HTTP/1.1 with status {status}" if status else "no gRPC"
        kind = SinkUnavailableError if status == "429" or status.startswith("5") else SinkError
        words = f"what listens there speaks {shown}, and is no Milvus; check the port, which is usually 19530"
        return Fault(words=refused + words, kind=kind)
    return Fault(words=f"{refused}{details}; check host and port, and http:// or https://", kind=SinkUnavailableError)


def _answer_fault(error: MilvusException, request: str, *, lite: bool) -> Fault:
    """What the server answered, or the client refused to send."""
    message, code = error.message, error.code
    refused = f"refused {request}: {message}"
    if isinstance(error, _REJECTED):
        return Fault(words=refused, kind=SinkRejectedError)
    if lite:
        return Fault(words=refused, kind=SinkRejectedError if code == _LITE_INVALID else SinkError)
    if code in _NO_DATABASE:
        words = f"{refused}; the path of the URL names the database (http://host:19530/name), and without one it is "
        return Fault(words=words + "'default'")
    if code in _NO_ACCESS:
        return Fault(words=f"refused {request}: {_access(message)}")
    if code == _TOO_LARGE or (code in _INVALID and _LARGER.search(str(message))):
        return Fault(words=refused, kind=SinkTooLargeError)
    rate_limited = error.compatible_code == common_pb2.RateLimit
    if is_unloaded(error):
        return Fault(words=f"is not ready for {request}: {message}", kind=SinkUnavailableError)
    busy = rate_limited or code in _BUSY or getattr(error, "retriable", False) or is_starting(error)
    if busy and not _own(error):
        return Fault(words=f"is too busy for {request}: {message}", kind=SinkUnavailableError)
    if code in _INVALID:
        return Fault(words=refused, kind=SinkRejectedError)
    return Fault(words=refused)


def _access(details: str) -> str:
    return (
        f"the token is missing, wrong, or of a user without the privilege ({details}); set MILVUS_TOKEN to "
        "user:password, or to an API key"
    )
