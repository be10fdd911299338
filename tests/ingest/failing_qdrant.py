"""A server on loopback that speaks the part of Qdrant's REST API that a run needs, and fails as a test says."""

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from millpond.ingest import CollectionManifest


class FailingQdrant(ThreadingHTTPServer):
    """Stores points in a dict. ``write`` is called with the handler of each upsert; it returns whether it answered."""

    daemon_threads = True

    def __init__(self, spec, address=("127.0.0.1", 0)):
        super().__init__(address, Handler)
        self.spec = spec
        self.manifest = CollectionManifest.of(spec, dimensions=None, fields="plain")
        self.points = {}
        self.write = lambda handler: False
        self.stores = True
        self.writes = 0
        self.closing = threading.Event()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request, client_address): ...

    def __enter__(self):
        self.thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()
        return self

    def __exit__(self, *error):
        self.closing.set()
        self.shutdown()
        self.thread.join()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format, *args): ...

    def do_GET(self):
        if self.path == "/":
            self.answer(200, {"title": "qdrant", "version": "1.17.0"})
        elif self.path.endswith("/exists"):
            self.ok({"exists": True})
        else:
            manifest = self.server.manifest
            vectors = {f"d{width}": {"size": width, "distance": "Cosine"} for width in manifest.dimensions}
            config = {
                "params": {"vectors": vectors},
                "hnsw_config": {"m": 16, "ef_construct": 100, "full_scan_threshold": 10000},
                "optimizer_config": {
                    "deleted_threshold": 0.2,
                    "vacuum_min_vector_number": 1,
                    "flush_interval_sec": 5,
                    "default_segment_number": 0,
                },
                "metadata": {"millpond": manifest.to_dict()},
            }
            result = {"status": "green", "optimizer_status": "ok", "segments_count": 1, "config": config}
            self.ok({**result, "payload_schema": {}})

    def do_PUT(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "/points" not in self.path:
            self.ok(True)
            return
        self.server.writes += 1
        if self.server.write(self):
            return
        if self.server.stores:
            batch = body["batch"]
            for n, each in enumerate(batch["ids"]):
                vectors = {name: rows[n] for name, rows in batch["vectors"].items()}
                self.server.points[each] = {"id": each, "payload": batch["payloads"][n], "vector": vectors}
        self.ok({"operation_id": 0, "status": "completed"})

    def do_PATCH(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.manifest = CollectionManifest.from_dict(body["metadata"]["millpond"], collection="docs")
        self.ok(True)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path.split("?")[0].endswith("/count"):
            self.ok({"count": len(self.server.points)})
        elif self.path.split("?")[0].endswith("/scroll"):
            self.ok({"points": list(self.server.points.values()), "next_page_offset": None})
        elif self.path.split("?")[0].endswith("/points"):
            found = [self.server.points[each] for each in body["ids"] if each in self.server.points]
            self.ok([{"id": each["id"], "payload": each["payload"], "vector": each["vector"]} for each in found])
        else:
            self.ok({"operation_id": 0, "status": "completed"})

    def ok(self, result):
        self.answer(200, {"result": result, "status": "ok", "time": 0.0})

    def answer(self, status, content, **headers):
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def fail(self, status, **headers):
        self.answer(status, {"status": {"error": f"a failure with {status}"}, "time": 0.0}, **headers)
        return True

    def close(self):
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)
        return True

    def hang(self):
        self.server.closing.wait(60)
        return self.close()

    def trickle(self):
        """A byte a second: no read waits long, and the answer never ends."""
        self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 999\r\n\r\n")
        while not self.server.closing.wait(1):
            try:
                self.wfile.write(b" ")
            except OSError:
                break
        return self.close()

    def garbage(self):
        self.wfile.write(b"\x00\xffnothing that HTTP knows\r\n\r\n")
        return self.close()
