"""QdrantIndex over HTTP: its requests reach a server that checks and answers them out of local mode."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from qdrant_client import QdrantClient, models

from millpond.ingest import point_id
from millpond.testing.matrices import matrices, names, ragged
from millpond_qdrant import QdrantIndex

pytestmark = pytest.mark.contract


class Fake(ThreadingHTTPServer):
    """The part of Qdrant's REST API that an index needs; every request is validated by the client's own models."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.points = QdrantClient(":memory:", force_disable_check_same_thread=True)
        self.lock = threading.Lock()  # local mode is for one thread at a time
        self.requests: list[tuple[str, str, Any, int]] = []  # method, path, body, bytes
        self.payload_schema: dict[str, Any] = {}
        self.failure: tuple[int, str] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def bodies(self, method: str, path: str) -> list[Any]:
        return [body for done, where, body, _ in self.requests if done == method and where == path]


class Handler(BaseHTTPRequestHandler):
    server: Fake
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None: ...

    def do_GET(self) -> None:
        self._answer("GET")

    def do_PUT(self) -> None:
        self._answer("PUT")

    def do_POST(self) -> None:
        self._answer("POST")

    def _answer(self, method: str) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        self.server.requests.append((method, self.path, body, length))
        status, answer = 200, None
        with self.server.lock:
            if self.server.failure is not None and "exists" not in self.path:
                status, message = self.server.failure
                answer = {"status": {"error": message}, "time": 0.0}
            else:
                answer = {"result": self._result(method, body), "status": "ok", "time": 0.0}
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _result(self, method: str, body: Any) -> Any:
        points = self.server.points
        path = re.sub(r"^/collections/docs", "", self.path)
        done = {"operation_id": 0, "status": "completed"}
        match method, path:
            case "GET", "/exists":
                return {"exists": points.collection_exists("docs")}
            case "PUT", "":
                asked = models.CreateCollection(**body)
                points.create_collection("docs", asked.vectors, metadata=asked.metadata)
                return True
            case "GET", "":
                info = points.get_collection("docs").model_dump(mode="json")
                info["payload_schema"] = self.server.payload_schema
                return info
            case "PUT", "/index?wait=true":
                assert points.collection_exists("docs")
                asked = models.CreateFieldIndex(**body)
                self.server.payload_schema[asked.field_name] = {"data_type": "integer", "points": 0}
                return done
            case "PUT", "/points?wait=true":
                points.upsert("docs", models.PointsList(**body).points)
                return done
            case "POST", "/points":
                asked = models.PointRequest(**body)
                return [
                    point.model_dump(mode="json")
                    for point in points.retrieve("docs", asked.ids, with_payload=asked.with_payload)
                ]
            case "POST", "/points/query/batch":
                asked = models.QueryRequestBatch(**body)
                return [answer.model_dump(mode="json") for answer in points.query_batch_points("docs", asked.searches)]
            case "POST", "/points/count":
                asked = models.CountRequest(**body)
                return {"count": points.count("docs", asked.filter, exact=True).count}
            case "POST", "/facet":
                asked = models.FacetRequest(**body)
                hits = points.facet("docs", asked.key, limit=asked.limit, exact=True).hits
                return {"hits": [hit.model_dump() for hit in hits]}
            case "POST", "/points/scroll":
                asked = models.ScrollRequest(**body)
                page, offset = points.scroll(
                    "docs", limit=asked.limit, offset=asked.offset, with_payload=asked.with_payload
                )
                return {"points": [point.model_dump(mode="json") for point in page], "next_page_offset": offset}
            case "POST", "/points/delete?wait=true":
                selector = models.PointIdsList(**body) if "points" in body else models.FilterSelector(**body)
                points.delete("docs", selector)
                return done
        raise AssertionError(f"{method} {self.path} is no request of an index")


@pytest.fixture
def server() -> Iterator[Fake]:
    fake = Fake()
    thread = threading.Thread(target=fake.serve_forever, daemon=True)
    thread.start()
    yield fake
    fake.shutdown()
    fake.server_close()
    fake.points.close()
    thread.join()


def test_an_index_lives_on_a_server(server: Fake) -> None:
    values = matrices(12, tokens=[n % 5 for n in range(12)])
    with QdrantIndex(server.url, "docs", None) as index:
        report = index.add_embeddings(names(12), ragged(values), metadata=[{"n": n % 2} for n in range(12)])
        assert (report.added, len(index), index.stats().tokens) == (12, 12, 21)
        local = QdrantIndex(server.points, "docs", None)
        queries = ragged(matrices(2, seed=1))
        for options in ({}, {"exact": True}, {"filter": {"n": 1}}, {"ids": names(4)}, {"candidates": 3, "k": 2}):
            assert index.search_embeddings(queries, **options) == local.search_embeddings(queries, **options)
        assert "doc-3" in index and "doc-12" not in index and index.ids() == names(12) and index.check() == []
        assert index.delete(["doc-3", "doc-99"]) == 1 and index.delete(filter={"n": 1}) == 5
    with QdrantIndex(server.url, "docs", None) as index:
        assert index.ids() == names(12)[::2]


def test_the_collection_that_is_created(server: Fake) -> None:
    QdrantIndex(server.url, "docs", None).add_embeddings(["a"], ragged(matrices(1)))
    (created,) = server.bodies("PUT", "/collections/docs")
    assert created["vectors"] == {
        "tokens": {
            "size": 32,
            "distance": "Dot",
            "hnsw_config": {"m": 0},
            "on_disk": True,
            "datatype": "float16",
            "multivector_config": {"comparator": "max_sim"},
        },
        "muvera": {
            "size": 2560,
            "distance": "Dot",
            "quantization_config": {"scalar": {"type": "int8", "always_ram": True}},
            "on_disk": True,
            "datatype": "float16",
        },
    }
    assert created["metadata"]["millpond"]["kind"] == "late_interaction" and created["on_disk_payload"] is True
    (payload_index,) = server.bodies("PUT", "/collections/docs/index?wait=true")
    assert payload_index == {"field_name": "tokens", "field_schema": {"type": "integer", "lookup": True, "range": True}}


def test_filters_and_ids_hold_in_both_stages(server: Fake) -> None:
    index = QdrantIndex(server.url, "docs", None)
    values = matrices(6)
    index.add_embeddings(names(6), ragged(values))
    index.search_embeddings(ragged(values[:1]), k=2, candidates=3, filter={"n": 1}, ids=names(4))
    index.search_embeddings(ragged(values[:1]), k=2, candidates=3)
    index.search_embeddings(ragged(values[:1]), k=2, filter={"n": 1})
    index.search_embeddings(ragged(values[:1]), k=2, exact=True)
    both, alone, default, exact = (
        request
        for body in server.bodies("POST", "/collections/docs/points/query/batch")
        for request in body["searches"]
    )
    assert both["filter"] == both["prefetch"]["filter"]
    among, filter = both["filter"]["must"]
    assert among == {"has_id": [point_id(id) for id in names(4)]}
    assert filter["must"][0]["should"][0]["key"] == "metadata.n"
    assert (both["prefetch"]["using"], both["prefetch"]["limit"], both["using"]) == ("muvera", 3, "tokens")
    assert len(both["query"]["nearest"]) == 6 and len(both["prefetch"]["query"]) == 2560
    assert "filter" not in alone and "filter" not in alone["prefetch"] and alone["limit"] == 3
    assert default["prefetch"]["limit"] == 1000
    assert "prefetch" not in exact
