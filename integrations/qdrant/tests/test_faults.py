"""Every way in which a server fails: the class of the error, its words, and no wait beyond the deadline."""

from __future__ import annotations

import gzip
import json
import socket
import ssl
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from email.utils import formatdate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from qdrant_client import models

from millpond import Engine, InvalidRequestError
from millpond.errors import SinkError, SinkRejectedError, SinkTooLargeError, SinkUnavailableError
from millpond.ingest import CollectionManifest, Record, WriteBatch, point_id
from millpond_qdrant import QdrantIndex, QdrantSink

pytestmark = pytest.mark.contract

Fault = Callable[["Server", socket.socket], None]

PATIENCE = 20.0  # s: what a fault lasts if nobody gives up
BOUND = 10.0  # s: more than any timeout below, less than PATIENCE


class Server:
    """A socket that answers looks at a collection, and a write as ``fault`` does."""

    def __init__(self, manifest: CollectionManifest) -> None:
        self.manifest = manifest
        self.fault: Fault = lambda server, connection: None
        self.before_body: Fault | None = None  # instead, before the body of a write is read
        self.writes = 0
        self.over = threading.Event()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.thread = threading.Thread(target=self._accept, daemon=True)
        self.thread.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.listener.getsockname()[1]}"

    def close(self) -> None:
        self.over.set()
        self.listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                while self._answer(connection):
                    pass
            except OSError:  # the client gave up
                pass

    def _answer(self, connection: socket.socket) -> bool:
        data = b""
        while b"\r\n\r\n" not in data:
            if not (more := connection.recv(1)):
                return False
            data += more
        head = data.decode()
        write = head.startswith(("PUT", "POST"))
        if write:
            self.writes += 1
            if self.before_body is not None:
                self.before_body(self, connection)
                return False
            length = next(int(line[15:]) for line in head.split("\r\n") if line.lower().startswith("content-length:"))
            while length:
                length -= len(connection.recv(length))
            self.fault(self, connection)
            return False
        connection.sendall(http(200, ok({"exists": True} if "/exists " in head else self._collection())))
        return True

    def _collection(self) -> dict[str, Any]:
        vectors = {f"d{width}": {"size": width, "distance": "Cosine"} for width in self.manifest.dimensions}
        optimizer = {"deleted_threshold": 0.2, "vacuum_min_vector_number": 1, "flush_interval_sec": 5}
        config = {
            "params": {"vectors": vectors},
            "hnsw_config": {"m": 16, "ef_construct": 100, "full_scan_threshold": 10000},
            "optimizer_config": {**optimizer, "default_segment_number": 0},
            "metadata": {"millpond": self.manifest.to_dict()},
        }
        return {
            "status": "green",
            "optimizer_status": "ok",
            "segments_count": 1,
            "config": config,
            "payload_schema": {},
        }


def http(status: int, body: bytes, **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} Some Reason", f"Content-Length: {len(body)}", "Content-Type: application/json"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def ok(result: object) -> bytes:
    return json.dumps({"result": result, "status": "ok", "time": 0.0}).encode()


def refusal(message: str) -> bytes:
    return json.dumps({"status": {"error": message}, "time": 0.0}).encode()


def sends(data: bytes) -> Fault:
    return lambda server, connection: connection.sendall(data)


def trickles(head: bytes, data: bytes) -> Fault:
    """Send the head, then a byte at a time, for longer than any test waits."""

    def fault(server: Server, connection: socket.socket) -> None:
        connection.sendall(head)
        for start in range(len(data)):
            connection.sendall(data[start : start + 1])
            if server.over.wait(PATIENCE / len(data)):
                return

    return fault


def hangs(server: Server, connection: socket.socket) -> None:
    server.over.wait(PATIENCE)


def resets(server: Server, connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def reads_slowly(server: Server, connection: socket.socket) -> None:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and not server.over.wait(0.05):
        connection.recv(1 << 16)


@pytest.fixture
def server(engine: Engine) -> Iterator[Server]:
    server = Server(CollectionManifest.of(engine.spec, dimensions=(8,), fields="plain"))
    yield server
    server.close()


def batch(rows: int = 3, text: str = "text") -> WriteBatch:
    records = [Record(f"r{row}", text) for row in range(rows)]
    vectors = np.eye(rows, 8, dtype=np.float32)
    return WriteBatch(records=records, ids=[point_id(record.id) for record in records], vectors={8: vectors})


def failure(engine: Engine, url: str, *, timeout: float = 5, rows: WriteBatch | None = None) -> SinkError:
    """The error of one write, raised within the bound."""
    with QdrantSink(url, "docs", dimensions=[8], timeout=timeout) as sink:
        sink.prepare(engine.spec)
        started = time.monotonic()
        with pytest.raises(SinkError) as caught:
            sink.write(rows or batch())
        assert time.monotonic() - started < BOUND
    assert str(caught.value).startswith(f"Qdrant at {url} ")
    assert "an upsert of " in str(caught.value)
    assert caught.value.__cause__ is not None
    return caught.value


TOO_LARGE = "Payload error: JSON payload (62922836 bytes) is larger than allowed (limit: 33554432 bytes)."


@pytest.mark.parametrize(
    ("status", "message", "kind"),
    [
        (400, "Wrong input: Vector dimension error: expected dim: 8, got 9", SinkRejectedError),
        (422, "Validation error in JSON body: [points[0].id: not valid]", SinkRejectedError),
        (400, TOO_LARGE, SinkTooLargeError),
        (413, "Request Entity Too Large", SinkTooLargeError),
        (408, "timed out", SinkUnavailableError),
        (429, "slow down", SinkUnavailableError),
        (500, "Service internal error: No space left on device", SinkUnavailableError),
        (401, "Must provide an API key", SinkError),
        (404, "Not found: Collection `docs` doesn't exist!", SinkError),
        (307, "moved", SinkError),
        (204, "", SinkError),
    ],
    ids=lambda value: str(value)[:24] if not isinstance(value, type) else value.__name__,
)
def test_a_status_is_retried_split_isolated_or_final(
    engine: Engine, server: Server, status: int, message: str, kind: type[SinkError]
) -> None:
    server.fault = sends(http(status, refusal(message), Location="http://user:hunter2@elsewhere/x"))
    error = failure(engine, f"http://{server.address}")
    assert type(error) is kind
    assert f"answered an upsert of 3 points with {status} " in str(error)
    assert "hunter2" not in str(error)
    if status >= 300 and status < 400:
        assert "to http://elsewhere/x; pass the URL where it is" in str(error)
    if status != 204:
        assert message in str(error)
    assert server.writes == 1  # the caller decides what is sent again


@pytest.mark.parametrize(
    ("status", "value", "seconds"),
    [
        (429, "7", 7.0),
        (429, "1.5", 1.5),
        (429, formatdate(time.time() + 3600, usegmt=True), 3600.0),
        (429, formatdate(1, usegmt=True), 0.0),
        (429, "soon", None),
        (503, "-1", None),
        (503, None, None),
    ],
    ids=["int", "float", "date", "past", "words", "negative", "none"],
)
def test_what_the_server_asks_to_wait_is_handed_on(
    engine: Engine, server: Server, status: int, value: str | None, seconds: float | None
) -> None:
    headers = {} if value is None else {"Retry_After": value}
    server.fault = sends(http(status, refusal("busy"), **headers))
    error = failure(engine, f"http://{server.address}")
    assert type(error) is SinkUnavailableError
    if seconds is None:
        assert error.retry_after is None
    else:
        assert error.retry_after == pytest.approx(seconds, abs=0 if seconds < 100 else 1800)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"<html><body>502 of a proxy</body></html>", "something that is not JSON"),
        (b"", "something that is not JSON"),
        (b"\xff\xfe\x00garbage", "cannot read|not JSON"),
        (ok(None), "its client cannot read"),
        (ok({"operation_id": 0, "status": "lost"}), "its client cannot read"),
        (b"null", "its client cannot read"),
        (ok({"operation_id": 0, "status": "acknowledged"}), "the status 'acknowledged' instead of 'completed'"),
    ],
    ids=["html", "empty", "binary", "null-result", "unknown-status", "null", "acknowledged"],
)
def test_nonsense_is_final(engine: Engine, server: Server, body: bytes, message: str) -> None:
    server.fault = sends(http(200, body))
    error = failure(engine, f"http://{server.address}")
    assert type(error) is SinkError
    assert any(part in str(error) for part in message.split("|"))
    assert server.writes == 1


@pytest.mark.skipif(not hasattr(models.UpdateStatus, "WAIT_TIMEOUT"), reason="a client that knows no such status")
def test_a_write_that_the_server_did_not_finish_waiting_for_may_be_sent_again(engine: Engine, server: Server) -> None:
    server.fault = sends(http(200, ok({"operation_id": 0, "status": "wait_timeout"})))
    error = failure(engine, f"http://{server.address}")
    assert type(error) is SinkUnavailableError and "'wait_timeout' instead of 'completed'" in str(error)


HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n"


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        (sends(b""), SinkUnavailableError, "did not answer"),
        (resets, SinkUnavailableError, "did not answer"),
        (sends(HEAD), SinkUnavailableError, "did not answer"),
        (sends(HEAD + b"\r\n{"), SinkUnavailableError, "did not answer"),
        (sends(b"SSH-2.0-OpenSSH_9.2\r\n\r\n"), SinkError, "with something that is not HTTP"),
        (sends(b"\x00\x01\x02\xff" * 64 + b"\r\n\r\n"), SinkError, "with something that is not HTTP"),
        (sends(http(200, b"no gzip", Content_Encoding="gzip")), SinkError, "cannot read"),
        (sends(http(200, gzip.compress(ok(None))[:30], Content_Encoding="gzip")), SinkError, "JSON"),
    ],
    ids=["closed", "reset", "closed-in-head", "closed-in-body", "ssh", "garbage", "no-gzip", "cut-gzip"],
)
def test_a_connection_that_ends_may_be_tried_again_and_one_that_talks_nonsense_not(
    engine: Engine, server: Server, fault: Fault, kind: type[SinkError], message: str
) -> None:
    server.fault = fault
    error = failure(engine, f"http://{server.address}")
    assert type(error) is kind and message in str(error)
    assert server.writes == 1


@pytest.mark.parametrize(
    "fault",
    [
        hangs,
        trickles(b"", HEAD + b"X-Padding: " + b"x" * 500),
        trickles(HEAD + b"\r\n", b" " * 500),
        trickles(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n" * 90),
    ],
    ids=["hang", "trickled-head", "trickled-body", "trickled-chunks"],
)
def test_the_whole_answer_has_one_deadline(engine: Engine, server: Server, fault: Fault) -> None:
    server.fault = fault
    error = failure(engine, f"http://{server.address}", timeout=0.5)
    assert type(error) is SinkUnavailableError
    assert "did not answer an upsert of 3 points within 0.5 s; pass a larger timeout" in str(error)
    assert server.writes == 1


@pytest.mark.parametrize("fault", [hangs, reads_slowly], ids=["not-read", "read-slowly"])
def test_so_has_the_writing_of_a_request(engine: Engine, server: Server, fault: Fault) -> None:
    server.before_body = fault
    rows = batch(rows=8, text="x" * (3 << 19))
    error = failure(engine, f"http://{server.address}", timeout=0.5, rows=rows)
    assert type(error) is SinkUnavailableError
    assert "within 0.5 s" in str(error)


def connecting(url: str, timeout: float = 0.5) -> SinkError:
    """The error of the first request."""
    started = time.monotonic()
    with QdrantSink(url, "docs", timeout=timeout) as sink, pytest.raises(SinkError) as caught:
        sink.count()
    assert time.monotonic() - started < BOUND
    assert "did not answer a look for the collection" in str(caught.value)
    return caught.value


def test_so_has_connecting() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = full.getsockname()
        waiting = []
        for _ in range(4):  # the queue is full, and the next one waits
            one = socket.socket()
            one.setblocking(False)
            one.connect_ex(address)
            waiting.append(one)
        error = connecting(f"http://127.0.0.1:{address[1]}")
        for one in waiting:
            one.close()
    assert type(error) is SinkUnavailableError and "within 0.5 s" in str(error)


@pytest.mark.parametrize("fault", [hangs, trickles(b"\x16\x03\x03\x40\x00", b"\x02" * 200)], ids=["silent", "trickled"])
def test_so_has_tls(server: Server, fault: Fault) -> None:
    server._serve = lambda connection: fault(server, connection)  # type: ignore[method-assign]
    error = connecting(f"https://{server.address}")
    assert type(error) is SinkUnavailableError and "within 0.5 s" in str(error)


def test_a_certificate_that_nobody_vouches_for_is_final(server: Server, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-days", "2"]
    try:
        subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no openssl")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    def serve(connection: socket.socket) -> None:
        with suppress(OSError):
            context.wrap_socket(connection, server_side=True).close()

    server._serve = serve  # type: ignore[method-assign]
    error = connecting(f"https://{server.address}", timeout=5)
    assert type(error) is SinkError and "CERTIFICATE_VERIFY_FAILED" in str(error)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), "60", True, None], ids=repr)
def test_a_timeout_that_is_none_is_refused(timeout: Any) -> None:
    with pytest.raises(InvalidRequestError, match="must be a number of seconds above 0"):
        QdrantSink(":memory:", "docs", timeout=timeout)


@pytest.mark.parametrize("key", ["hunter2\n", " hunter2", "hünter2"], ids=ascii)
def test_a_key_that_no_header_takes_is_refused_and_not_shown(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("QDRANT_API_KEY", key)
    with pytest.raises(InvalidRequestError, match="QDRANT_API_KEY holds a character") as caught:
        QdrantSink("https://127.0.0.1:1", "docs")
    assert "ter2" not in str(caught.value)


def test_an_index_has_the_same_deadline_and_classes(engine: Engine, server: Server) -> None:
    server.fault = hangs
    with pytest.raises(
        SinkUnavailableError, match="nothing listens at http://127.0.0.1:1, so Qdrant did not answer a look"
    ):
        QdrantIndex("http://127.0.0.1:1", "docs", None, timeout=1)
