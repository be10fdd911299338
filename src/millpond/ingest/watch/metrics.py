"""The metrics of a watcher over HTTP, as Prometheus reads them, and whether it is well."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from millpond.errors import InvalidRequestError
from millpond.ingest.watch.state import WatchState

_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_GAUGES = (
    ("oldest_pending_seconds", "Age of the oldest change that is not in the collection yet; 0 without one."),
    ("waiting_deletions", "Records that are gone from the source and wait for their deletion."),
    ("held_deletions", "The same, if they are not deleted because they are too many."),
    ("database_unanswered", "1 while the database does not answer."),
    ("last_error_timestamp_seconds", "When the last error was, of a record or a request; 0 without one."),
)
_COUNTERS = (
    ("passes", "passes", "Changes that were taken over."),
    ("rows_written", "written", "Rows that the database acknowledged."),
    ("rows_deleted", "deleted", "Rows deleted because the source has them no more."),
    ("records_embedded", "embedded", "Records whose vector was computed."),
    ("records_failed", "failed", "Records and files that were left out."),
    ("retries", "retried", "Requests that were sent again."),
    ("errors", "errors", "Errors of records and requests."),
)


def metrics_text(state: WatchState) -> str:
    """The metrics in Prometheus's text format."""
    values = {
        "oldest_pending_seconds": round(state.age(), 3),
        "waiting_deletions": state.waiting,
        "held_deletions": state.waiting if state.held else 0,
        "database_unanswered": int(state.unanswered),
        "last_error_timestamp_seconds": round(state.last_error_at, 3),
    }
    counts, lines = state.now(), []
    for name, words in _GAUGES:
        lines += _family(name, "gauge", words, f"millpond_watch_{name} {values[name]}")
    for name, key, words in _COUNTERS:
        lines += _family(f"{name}_total", "counter", words, f"millpond_watch_{name}_total {counts[key]}")
    return "\n".join(lines) + "\n"


def health(state: WatchState) -> tuple[int, dict[str, object]]:
    """A status of HTTP, and what it is about: 503 while the database does not answer, or deletions are held."""
    well = not (state.unanswered or state.held)
    found: dict[str, object] = {"status": "ok" if well else "waiting", "oldest_pending_seconds": round(state.age(), 3)}
    if state.held:
        found["held"] = state.held
    if state.last_error:
        found["last_error"] = state.last_error
    return (200 if well else 503), found


@contextmanager
def serving(address: tuple[str, int] | None, state: WatchState) -> Iterator[int | None]:
    """Serve ``/metrics`` and ``/health`` while the block runs; yields the port."""
    if address is None:
        yield None
        return

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/metrics":
                self._answer(200, metrics_text(state), _TYPE)
            elif path == "/health":
                status, found = health(state)
                self._answer(status, json.dumps(found, ensure_ascii=False) + "\n", "application/json")
            else:
                self._answer(404, "there is /metrics and /health\n", _TYPE)

        def _answer(self, status: int, text: str, kind: str) -> None:
            data = text.encode(errors="backslashreplace")
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *given: object) -> None:
            """Nothing: a line for each scrape tells nobody anything."""

    try:
        server = ThreadingHTTPServer(address, Handler)
    except OSError as error:
        raise InvalidRequestError(
            f"metrics={address[0]}:{address[1]} cannot be opened ({error.strerror}); choose another port"
        ) from error
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="millpond-metrics", daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


def read_address(text: str) -> tuple[str, int]:
    """``HOST:PORT``, or a port of this machine alone."""
    host, colon, port = text.rpartition(":")
    host = (host if colon else "127.0.0.1").strip("[]")
    if not port.isdecimal() or int(port) > 65535 or not host:
        raise InvalidRequestError(f"metrics={text!r} is no address; write HOST:PORT, as 127.0.0.1:9400")
    return host, int(port)


def _family(name: str, kind: str, words: str, line: str) -> list[str]:
    return [f"# HELP millpond_watch_{name} {words}", f"# TYPE millpond_watch_{name} {kind}", line]
