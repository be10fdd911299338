"""A failing server: the error names server and request, and nothing hangs."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from qdrant_client import QdrantClient, models

from millpond import Engine
from millpond.ingest import CollectionManifest, Record, RetryPolicy, SinkError, WriteBatch, ingest, point_id
from millpond_qdrant import QdrantSink
from millpond_qdrant.probe import PartialPoints

pytestmark = pytest.mark.contract

Answer = tuple[int, dict[str, str], bytes]


class Fake(ThreadingHTTPServer):
    """The part of Qdrant's REST API that a run needs; ``upsert`` makes the answer to a write."""

    daemon_threads = True

    def __init__(self, manifest: CollectionManifest) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.manifest = manifest
        self.upsert: Callable[[], Answer | None] = lambda: ok({"operation_id": 0, "status": "completed"})
        self.upserts: list[dict[str, Any]] = []
        self.queries: list[str] = []
        self.deletes: list[tuple[str, dict[str, Any]]] = []  # path and body
        self.searches: list[str] = []  # paths
        self.bodies: list[list[dict[str, Any]]] = []  # of each search, its requests
        self.points = QdrantClient(":memory:")  # answers the searches
        self.lock = threading.Lock()  # local mode is for one thread at a time
        self.before_search: Callable[[], None] = lambda: None
        self.keys: set[str | None] = set()
        self.free = threading.Event()  # releases the hanging requests

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Fake
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None: ...

    def do_GET(self) -> None:
        if self.path.endswith("/exists"):
            self._send(ok({"exists": True}))
            return
        vectors = {f"d{width}": {"size": width, "distance": "Cosine"} for width in self.server.manifest.dimensions}
        config = {
            "params": {"vectors": vectors},
            "hnsw_config": {"m": 16, "ef_construct": 100, "full_scan_threshold": 10000},
            "optimizer_config": {"deleted_threshold": 0.2, "vacuum_min_vector_number": 1, "flush_interval_sec": 5},
            "metadata": {"millpond": self.server.manifest.to_dict()},
        }
        config["optimizer_config"]["default_segment_number"] = 0
        self._send(ok({"status": "green", "optimizer_status": "ok", "segments_count": 1, "config": config,
                       "payload_schema": {}}))  # fmt: skip

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.keys.add(self.headers.get("api-key"))
        self.server.queries.append(self.path)
        self.server.upserts.append(json.loads(body))
        answer = self.server.upsert()
        if answer is None:
            self.server.free.wait(30)
            self.close_connection = True
        else:
            self._send(answer)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if "/points/query" in self.path:
            self._search(json.loads(body))
            return
        self.server.deletes.append((self.path, json.loads(body)))
        self._send(ok({"operation_id": 0, "status": "completed"}))

    def _search(self, body: dict[str, Any]) -> None:
        self.server.searches.append(self.path)
        batch = self.path.endswith("/batch")
        self.server.bodies.append(body["searches"] if batch else [body])
        requests = [models.QueryRequest(**request) for request in self.server.bodies[-1]]
        self.server.before_search()
        with self.server.lock:
            answers = self.server.points.query_batch_points("docs", requests)
        results = [answer.model_dump(mode="json") for answer in answers]
        self._send(ok(results if batch else results[0]))

    def _send(self, answer: Answer) -> None:
        status, headers, body = answer
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def ok(result: object) -> Answer:
    return 200, {}, json.dumps({"result": result, "status": "ok", "time": 0.0}).encode()


def error(status: int, message: str, **headers: str) -> Answer:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return status, named, json.dumps({"status": {"error": message}, "time": 0.0}).encode()


@pytest.fixture
def server(engine: Engine) -> Iterator[Fake]:
    fake = Fake(CollectionManifest.of(engine.spec, dimensions=(64, 384), fields="plain"))
    thread = threading.Thread(target=fake.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield fake
    fake.free.set()
    fake.shutdown()
    thread.join()
    fake.server_close()


def run(engine: Engine, server: Fake, records: list[Record], timeout: int = 60) -> int:
    with QdrantSink(server.url, "docs", dimensions=[64, 384], timeout=timeout) as sink:
        report = ingest(records, engine=engine, sink=sink, show_progress=False, retry=RetryPolicy(give_up_after=0))
        return report.written


def test_requests_are_bounded_by_rows(engine: Engine, server: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QDRANT_API_KEY", "hunter2")
    with pytest.warns(UserWarning, match="insecure connection"):  # qdrant-client's own: a key over plain http
        assert run(engine, server, [Record(f"r{i}", f"text {i}") for i in range(600)]) == 600
    rows = [len(body["batch"]["ids"]) for body in server.upserts]
    assert sum(rows) == 600 and max(rows) == 256
    assert all("wait=true" in query for query in server.queries)
    assert server.keys == {"hunter2"}
    first = server.upserts[0]["batch"]
    assert sorted(first["vectors"]) == ["d384", "d64"] and len(first["vectors"]["d64"][0]) == 64


def test_a_request_is_bounded_by_bytes_too(engine: Engine, server: Fake) -> None:
    records = [Record(f"r{i}", "x" * (3 << 20)) for i in range(12)]
    vectors = {width: np.eye(12, width, dtype=np.float32) for width in (64, 384)}
    with QdrantSink(server.url, "docs", dimensions=[64, 384]) as sink:
        sink.prepare(engine.spec)
        sink.write(WriteBatch(records=records, ids=[point_id(record.id) for record in records], vectors=vectors))
    sizes = [len(json.dumps(body)) for body in server.upserts]
    assert len(sizes) == 3 and max(sizes) < 17 << 20


def test_a_run_waits_for_a_busy_server_and_splits_what_is_too_large(
    engine: Engine, server: Fake, records: list[Record]
) -> None:
    busy = iter([error(503, "starting"), error(429, "slow down", Retry_After="0"), error(413, "too large")])
    server.upsert = lambda: next(busy, ok({"operation_id": 0, "status": "completed"}))
    with QdrantSink(server.url, "docs", dimensions=[64, 384]) as sink:
        policy = RetryPolicy(first_wait=0.01)
        report = ingest(records, engine=engine, sink=sink, show_progress=False, retry=policy)
    assert (report.written, report.failed) == (12, 0)
    assert [len(body["batch"]["ids"]) for body in server.upserts] == [12, 12, 12, 6, 6]


def test_a_run_leaves_out_the_rows_that_the_server_refuses(
    engine: Engine, server: Fake, records: list[Record], tmp_path: Path
) -> None:
    def upsert() -> Answer:
        bad = point_id("doc-5") in server.upserts[-1]["batch"]["ids"]
        return error(400, "wrong dimension") if bad else ok({"operation_id": 0, "status": "completed"})

    server.upsert = upsert
    with QdrantSink(server.url, "docs", dimensions=[64, 384]) as sink:
        letters = tmp_path / "dead.jsonl"
        report = ingest(records, engine=engine, sink=sink, show_progress=False, dead_letters=letters)
    assert (report.written, report.failed) == (11, 1)
    (letter,) = [json.loads(line) for line in letters.read_text().splitlines()]
    assert letter["id"] == "doc-5" and "wrong dimension" in json.dumps(letter)


def test_a_server_that_fails_halfway_leaves_what_it_has(engine: Engine, server: Fake) -> None:
    answers = iter([ok({"operation_id": 0, "status": "completed"}), error(500, "full")])
    server.upsert = lambda: next(answers)
    with pytest.raises(SinkError, match="an upsert of 44 points with 500"):
        run(engine, server, [Record(f"r{i}", f"text {i}") for i in range(300)])


@pytest.mark.parametrize("condition", [None, {"lang": "en"}])
def test_a_search_is_one_request_and_finds_what_lacks_a_vector(
    engine: Engine, server: Fake, records: list[Record], condition: dict[str, str] | None
) -> None:
    local = QdrantSink(server.points, "docs", dimensions=[64, 384])
    ingest(records, engine=engine, sink=local, show_progress=False)
    stray = [
        models.PointStruct(
            id=width,
            vector={f"d{width}": engine.embed(["tides"], dimensions=width, normalize=True).embeddings[0].tolist()},
            payload={"text": f"tides {width}", "metadata": {"lang": "en"}},
        )
        for width in (64, 384)
    ]
    server.points.upsert("docs", stray)
    with QdrantSink(server.url, "docs") as sink:
        for coarse_to_fine in (True, False):
            server.searches.clear()
            hits = sink.search(engine, "tides", k=5, coarse_to_fine=coarse_to_fine, filter=condition)
            assert hits == local.search(engine, "tides", k=5, coarse_to_fine=coarse_to_fine, filter=condition)
            assert {hit.text for hit in hits[:2]} == {"tides 64", "tides 384"}
            assert server.searches == ["/collections/docs/points/query/batch"]
    with QdrantSink(server.url, "docs", dimensions=[384]) as sink:
        server.searches.clear()
        assert sink.search(engine, "tides", k=1)[0].text == "tides 384"
        assert server.searches == ["/collections/docs/points/query"]


# ---------------------------------------------------------------------------- looking for what lacks a vector, or not


class Clock:
    """Seconds that a test sets."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def shape(requests: list[dict[str, Any]]) -> tuple[int, int, int]:
    """Of the requests of one search: probes, searches, and stages before the first search."""
    searches = [request for request in requests if "query" in request]
    return len(requests) - len(searches), len(searches), len(searches[0].get("prefetch", []))


# Of a collection of two widths: asked, and all is looked for; no point lacks a vector; some lack d64; some lack d384.
ASKED, WHOLE, LACK_64, LACK_384 = (2, 2, 2), (0, 1, 1), (0, 1, 2), (0, 2, 1)


def add_point(engine: Engine, server: Fake, id: int, width: int, lang: str = "en") -> None:
    """Add a point as a framework does, with one vector."""
    vector = engine.embed(["tides"], dimensions=width, normalize=True).embeddings[0].tolist()
    payload = {"text": f"tides {width}", "metadata": {"lang": lang}}
    with server.lock:
        server.points.upsert("docs", [models.PointStruct(id=id, vector={f"d{width}": vector}, payload=payload)])


@pytest.fixture
def whole(engine: Engine, server: Fake, records: list[Record]) -> Fake:
    """A server whose points all have every vector."""
    local = QdrantSink(server.points, "docs", dimensions=[64, 384])
    ingest(records, engine=engine, sink=local, show_progress=False)
    return server


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def sink(whole: Fake, clock: Clock) -> Iterator[QdrantSink]:
    with QdrantSink(whole.url, "docs") as sink:
        sink._driver._partial_points = PartialPoints(clock=clock)
        yield sink


def test_a_search_that_fails_has_asked_nothing(engine: Engine, whole: Fake, sink: QdrantSink) -> None:
    def fail() -> None:
        raise ConnectionAbortedError

    whole.before_search, whole.handle_error = fail, lambda *of: None  # type: ignore[method-assign]
    with pytest.raises(SinkError, match="did not answer a search"):
        sink.search(engine, "tides")
    whole.before_search = lambda: None
    add_point(engine, whole, 1, 384)
    assert sink.search(engine, "tides")[0].text == "tides 384"
    assert [shape(body) for body in whole.bodies] == [ASKED, ASKED]
