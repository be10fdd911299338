"""What went wrong in a request to Milvus: in words, and as the kind of error that tells a run what to do about it."""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

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
from pymilvus.grpc_gen import common_pb2, milvus_pb2, milvus_pb2_grpc

from millpond.errors import SinkError, SinkRejectedError, SinkTooLargeError, SinkUnavailableError
from millpond_milvus.deadline import DeadlineError

# Seconds of a look at the server after a connection failed, to say why.
_PROBE_SECONDS = 2
_PORT = 19530

# Codes of a server's answer (pkg/util/merr of Milvus 2.6). A request with one of these may succeed later: not ready,
# unavailable, memory, queue full, rate limit, time tick, resources; loading, recovering; nodes and channels that move.
_BUSY = frozenset(
    [1, 2, 3, 4, 8, 11, 12, 103, 106, 110, 202, 305, 401, 503, 505, 507, 902, 905, 1002, 1003, 1807, 2200, 10_001]
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
_LARGER = re.compile(r"larger than max|exceeds? (the )?max(imum)? (message|size)|too large", re.IGNORECASE)
_NO_GRPC = re.compile(r"http1\.x server|Failed parsing HTTP/2|Expected SETTINGS frame")
_HTTP_STATUS = re.compile(r"\(HTTP status (\d+)\)")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What went wrong.

    Attributes:
        words: The end of "Milvus at location ...".
        kind: What it becomes.
    """

    words: str
    kind: type[SinkError]


def find_fault(error: Exception, request: str, *, uri: str, timeout: float, lite: bool = False) -> Fault | None:
    """What an error of the client means; ``None`` for an error that no client raises on purpose.

    After a request that failed without saying why, this looks at the server for a few seconds.

    Args:
        error: The error.
        request: What was asked, as "an upsert of 3 rows".
        uri: Where the server is, as the user wrote it.
        timeout: Seconds that the request might take.
        lite: Whether it is Milvus Lite, whose codes are others.
    """
    late = isinstance(error, DeadlineError)
    call = rpc_error(error)
    if call is None and (late or _is_silent(error)):  # the client kept the reason to itself
        call = _refusal(uri)
        if call is None:
            reason = _silence(uri) if request in ("the connection", "the version") else ""
            return Fault(words=f"did not answer {request} within {timeout:g} s{reason}", kind=SinkUnavailableError)
    if call is not None:
        return _transport_fault(call, request, uri=uri, timeout=timeout)
    if isinstance(error, MilvusException):
        return _answer_fault(error, request, lite=lite)
    if isinstance(error, ValueError) and "closed channel" in str(error):
        return Fault(words=f"did not get {request}: its client is closed; open another one", kind=SinkError)
    return None


def retry_after(error: Exception) -> float | None:
    """Seconds that a proxy before the server asks to wait."""
    call = rpc_error(error)
    if call is None:
        return None
    trailers = {str(key): value for key, value in (call.trailing_metadata() or ())}
    for key, unit in (("grpc-retry-pushback-ms", 1000.0), ("retry-after", 1.0)):
        with suppress(KeyError, ValueError):
            if (seconds := float(trailers[key]) / unit) >= 0:
                return seconds
    return None


def rpc_error(error: BaseException) -> grpc.Call | None:
    """gRPC's error behind one of the client, which keeps it as the cause or the context."""
    return next(
        (each for each in _chain(error) if isinstance(each, grpc.RpcError) and isinstance(each, grpc.Call)), None
    )


def _is_silent(error: Exception) -> bool:
    """Whether pymilvus 2 could not connect, of which it does not say why."""
    return isinstance(error, MilvusException) and str(error.message).startswith("Fail connecting to server")


def _refusal(uri: str) -> grpc.Call | None:
    """Why a server cannot be reached, from an attempt of our own; ``None`` if it answers, or says nothing."""
    host, port = _address(uri)
    if host is None:
        return None
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    secure = uri.lower().startswith("https")
    channel = grpc.secure_channel(address, grpc.ssl_channel_credentials()) if secure else grpc.insecure_channel(address)
    with channel:
        try:
            milvus_pb2_grpc.MilvusServiceStub(channel).Connect(milvus_pb2.ConnectRequest(), timeout=_PROBE_SECONDS)
        except grpc.RpcError as error:
            if isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.UNAVAILABLE:
                return error
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


def _transport_fault(call: grpc.Call, request: str, *, uri: str, timeout: float) -> Fault:
    code, details = call.code(), call.details() or ""
    busy = SinkUnavailableError
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        reason = _silence(uri) if request in ("the connection", "the version") else ""
        return Fault(words=f"did not answer {request} within {timeout:g} s{reason}", kind=busy)
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return Fault(words=f"refused {request}: {_access(details)}", kind=SinkError)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        if _LARGER.search(details):
            return Fault(words=f"refused {request}: it is too large ({details})", kind=SinkTooLargeError)
        return Fault(words=f"is too busy for {request}: {details}", kind=busy)
    if code is grpc.StatusCode.UNIMPLEMENTED and request == "the connection":
        return Fault(
            words=f"refused {request}: what answers there is no Milvus, or one before 2.3 ({details}); check the port, "
            f"which is usually {_PORT}",
            kind=SinkError,
        )
    if code is grpc.StatusCode.UNAVAILABLE:
        return _unavailable(details, request, uri=uri)
    if code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN) and _LARGER.search(details):
        return Fault(words=f"refused {request}: it is too large ({details})", kind=SinkTooLargeError)
    kind = busy if code in _BUSY_RPC else SinkError
    return Fault(words=f"did not answer {request}: {details or code.name}", kind=kind)


def _unavailable(details: str, request: str, *, uri: str) -> Fault:
    """The server cannot be reached, or is no Milvus; gRPC says which in its details."""
    host, port = _address(uri)
    where = f"{host}:{port}"
    if "Connection refused" in details:
        words = f"refused {request}: nothing listens on {where}; start Milvus there, or correct host and port"
        return Fault(words=words, kind=SinkUnavailableError)
    if re.search(r"errors resolving|DNS|[Nn]ame (resolution|or service)|Domain name|hostname lookup", details):
        words = f"did not answer {request}: the name {host!r} is not known here (DNS); check the host ({details})"
        return Fault(words=words, kind=SinkUnavailableError)
    if "CERTIFICATE_VERIFY_FAILED" in details or "Peer name" in details or "peer certificate" in details:
        words = (
            f"did not answer {request}: its certificate is not trusted here ({_end(details)}); pass a MilvusClient "
            "with server_pem_path, or set GRPC_DEFAULT_SSL_ROOTS_FILE_PATH to its issuer's certificate"
        )
        return Fault(words=words, kind=SinkError)
    if uri.lower().startswith("https") and re.search(r"WRONG_VERSION_NUMBER|WRONG_SSL_VERSION|HTTP_REQUEST", details):
        words = f"did not answer {request}: it does not speak TLS; write http:// instead of https://"
        return Fault(words=words, kind=SinkError)
    secure = host is not None and not uri.lower().startswith("https") and _speaks_tls(host, port)
    if secure:
        words = f"did not answer {request}: it speaks TLS; write https:// instead of http://"
        return Fault(words=words, kind=SinkError)
    if _NO_GRPC.search(details):
        status = match[1] if (match := _HTTP_STATUS.search(details)) else None
        passing = status is not None and (status == "429" or status.startswith("5"))
        shown = f"HTTP/1.1 with status {status}" if status else "no gRPC"
        words = (
            f"did not answer {request}: what listens on {where} speaks {shown}, and is no Milvus; check the port, "
            f"which is usually {_PORT}"
        )
        return Fault(words=words, kind=SinkUnavailableError if passing else SinkError)
    if re.search(r"Socket closed|Connection reset|Broken pipe|EOF|GOAWAY|recvmsg", details):
        words = (
            f"did not answer {request}: it closed the connection; the server stopped, or a proxy before it ({details})"
        )
        return Fault(words=words, kind=SinkUnavailableError)
    return Fault(words=f"did not answer {request}: {details}", kind=SinkUnavailableError)


def _answer_fault(error: MilvusException, request: str, *, lite: bool) -> Fault:
    """What the server answered, or the client refused to send."""
    message, code = error.message, error.code
    refused = f"refused {request}: {message}"
    if isinstance(error, _REJECTED):
        return Fault(words=refused, kind=SinkRejectedError)
    if lite:
        return Fault(words=refused, kind=SinkRejectedError if code == _LITE_INVALID else SinkError)
    if code in _NO_DATABASE:
        words = f"{refused}; the path of the URL names the database (http://host:{_PORT}/name), and without one it is "
        return Fault(words=words + "'default'", kind=SinkError)
    if code in _NO_ACCESS:
        return Fault(words=f"refused {request}: {_access(message)}", kind=SinkError)
    if code == _TOO_LARGE or (code in _INVALID and _LARGER.search(str(message))):
        return Fault(words=refused, kind=SinkTooLargeError)
    rate_limited = error.compatible_code == common_pb2.RateLimit
    # The client's own failures have code 1, which of a server means "not ready".
    own = str(message).startswith("Unexpected error, message=<")
    if not own and (rate_limited or code in _BUSY or getattr(error, "retriable", False)):
        return Fault(words=f"is too busy for {request}: {message}", kind=SinkUnavailableError)
    if code in _INVALID:
        return Fault(words=refused, kind=SinkRejectedError)
    return Fault(words=refused, kind=SinkError)


def _access(details: str) -> str:
    return (
        f"the token is missing, wrong, or of a user without the privilege ({details}); set MILVUS_TOKEN to "
        "user:password, or to an API key"
    )


def _end(details: str) -> str:
    """The last part of gRPC's details, which says it."""
    return details.rpartition("CERTIFICATE_VERIFY_FAILED: ")[2].removesuffix(": OK") or details


def _address(uri: str) -> tuple[str | None, int]:
    """Host and port of a URL; ``None`` of anything else."""
    try:
        parts = urlsplit(uri)
        port = parts.port
    except ValueError:
        return None, _PORT
    if parts.scheme.lower() not in ("http", "https", "tcp") or not parts.hostname:
        return None, _PORT
    return parts.hostname, port or (443 if parts.scheme.lower() == "https" else _PORT)


def _speaks_tls(host: str, port: int) -> bool:
    """Whether a server answers a TLS handshake."""
    context = ssl.create_default_context()
    context.check_hostname = False  # nothing is sent, and nobody trusted
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with socket.create_connection((host, port), timeout=_PROBE_SECONDS) as plain:
            context.wrap_socket(plain, server_hostname=host).close()
    except OSError:
        return False
    return True


def _silence(uri: str) -> str:
    """Why a connection was not answered, as the end of a sentence."""
    host, port = _address(uri)
    if host is None:
        return ""
    try:
        socket.create_connection((host, port), timeout=_PROBE_SECONDS).close()
    except TimeoutError:
        return f": nothing answers on {host}:{port}, which a firewall may drop; check host and port"
    except OSError as error:
        return f": {host}:{port} cannot be reached ({error.strerror or error})"
    return (
        f": {host}:{port} takes connections and says nothing; it is no Milvus (its port is usually {_PORT}), or one "
        "that hangs"
    )
