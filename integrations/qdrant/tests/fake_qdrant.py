"""A server with the part of Qdrant's REST API that sinks and indexes need, which answers out of local mode.

Every request is validated by the client's own models.
"""

from __future__ import annotations

import json
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from qdrant_client import QdrantClient, models

Answer = tuple[int, dict[str, str], str]  # status, headers, message


class FakeQdrant(ThreadingHTTPServer):
    """A server of the collection ``docs``; ``fault`` may answer a write instead of it."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        warnings.filterwarnings("ignore", message="Payload indexes have no effect")
        self.points = QdrantClient(":memory:", force_disable_check_same_thread=True)
        self.lock = threading.Lock()  # local mode is for one thread at a time
        self.requests: list[tuple[str, str, Any, int]] = []  # method, path below the collection, body, bytes
        self.keys: set[str | None] = set()
        self.payload_schema: dict[str, Any] = {}
        self.fault: Callable[[], Answer | None] = lambda: None
        self.before_search: Callable[[], None] = lambda: None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def bodies(self, method: str, path: str) -> list[Any]:
        return [body for done, where, body, _ in self.requests if done == method and where.partition("?")[0] == path]


class Handler(BaseHTTPRequestHandler):
    server: FakeQdrant
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None: ...

    def do_GET(self) -> None:
        self._answer("GET")

    def do_PUT(self) -> None:
        self._answer("PUT")

    def do_PATCH(self) -> None:
        self._answer("PATCH")

    def do_POST(self) -> None:
        self._answer("POST")

    def _answer(self, method: str) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        path = re.sub(r"^/collections/docs", "", self.path)
        self.server.requests.append((method, path, body, length))
        self.server.keys.add(self.headers.get("api-key"))
        path = path.partition("?")[0]
        status, headers, answer = 200, {}, None
        if path.startswith("/points/query"):
            self.server.before_search()
        if (method, path) == ("PUT", "/points") and (fault := self.server.fault()):
            status, headers, message = fault
            answer = {"status": {"error": message}, "time": 0.0}
        else:
            with self.server.lock:
                answer = {"result": self._result(method, path, body), "status": "ok", "time": 0.0}
        content = json.dumps(answer).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def _result(self, method: str, path: str, body: Any) -> Any:
        points = self.server.points
        done = {"operation_id": 0, "status": "completed"}
        match method, path:
            case "GET", "/exists":
                return {"exists": points.collection_exists("docs")}
            case "PUT", "":
                asked = models.CreateCollection(**body)
                points.create_collection(
                    "docs", asked.vectors, sparse_vectors_config=asked.sparse_vectors, metadata=asked.metadata
                )
                return True
            case "PATCH", "":
                return points.update_collection("docs", metadata=body["metadata"])
            case "GET", "":
                return points.get_collection("docs").model_dump(mode="json") | {
                    "payload_schema": self.server.payload_schema
                }
            case "PUT", "/index":
                index = models.CreateFieldIndex(**body)
                of = index.field_schema if isinstance(index.field_schema, str) else "integer"
                self.server.payload_schema[index.field_name] = {"data_type": of, "points": 0}
                return done
            case "PUT", "/points":
                batch = models.Batch(**body["batch"]) if "batch" in body else models.PointsList(**body).points
                points.upsert("docs", batch)
                return done
            case "POST", "/points":
                wanted = models.PointRequest(**body)
                found = points.retrieve("docs", wanted.ids, wanted.with_payload, wanted.with_vector)  # type: ignore[arg-type]
                return [point.model_dump(mode="json") for point in found]
            case "POST", "/points/query":
                request = models.QueryRequest(**body)
                return points.query_batch_points("docs", [request])[0].model_dump(mode="json")
            case "POST", "/points/query/batch":
                searches = models.QueryRequestBatch(**body).searches
                return [answer.model_dump(mode="json") for answer in points.query_batch_points("docs", searches)]
            case "POST", "/points/count":
                return {"count": points.count("docs", models.CountRequest(**body).filter, exact=True).count}
            case "POST", "/facet":
                facet = models.FacetRequest(**body)
                hits = points.facet("docs", facet.key, limit=facet.limit, exact=True).hits
                return {"hits": [hit.model_dump() for hit in hits]}
            case "POST", "/points/scroll":
                asked = models.ScrollRequest(**body)
                page, offset = points.scroll(
                    "docs", limit=asked.limit, offset=asked.offset, with_payload=asked.with_payload
                )
                return {"points": [point.model_dump(mode="json") for point in page], "next_page_offset": offset}
            case "POST", "/points/delete":
                points.delete(
                    "docs", models.PointIdsList(**body) if "points" in body else models.FilterSelector(**body)
                )
                return done
        raise AssertionError(f"{method} {self.path} is no request of a sink or an index")


@contextmanager
def serving() -> Iterator[FakeQdrant]:
    fake = FakeQdrant()
    thread = threading.Thread(target=fake.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield fake
    fake.shutdown()
    thread.join()
    fake.server_close()
    fake.points.close()
