"""The table of "When the database fails": a server that fails in every way, behind ``millpond ingest`` itself."""

import contextlib
import io
import json
import socket
import sys
import threading
import time

import pytest
from tests.ingest.failing_qdrant import FailingQdrant
from tests.tiny import write_checkpoint

from millpond import Engine
from millpond.__main__ import main

pytest.importorskip("millpond_qdrant")
pytestmark = pytest.mark.contract

ROWS = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "model", "bert")


@pytest.fixture(scope="module")
def spec(model):
    with Engine(model, dtype="float32", device="cpu") as engine:
        return engine.spec


@pytest.fixture
def server(spec):
    with FailingQdrant(spec) as server:
        yield server


@pytest.fixture
def ingest(model, tmp_path, monkeypatch, capsys):
    """Runs the program; returns its exit code, the counts and the lines on standard error."""
    source = tmp_path / "source.jsonl"
    source.write_text("".join(json.dumps({"id": f"r{n}", "text": f"text {n}"}) + "\n" for n in range(ROWS)))

    def ingest(url, *more):
        words = ["ingest", source, "--model", model, "--to", f"qdrant+{url}#docs", "--engine"]
        words += ["dtype=float32", "--engine", "device=cpu", "--cache", tmp_path / "cache.db", *more]
        monkeypatch.setattr(sys, "argv", ["millpond", *map(str, words)])
        monkeypatch.setattr(sys, "stdin", io.StringIO())
        code = 0
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        out, err = capsys.readouterr()
        return code, json.loads(out) if out else None, err.splitlines()

    return ingest


QUICK = ("--retry-for", "1.5", "--sink", "timeout=1")
FAULTS = {
    "500": (lambda handler: handler.fail(500), "500"),
    "503": (lambda handler: handler.fail(503), "503"),
    "429": (lambda handler: handler.fail(429, Retry_After="1"), "busy"),
    "302": (lambda handler: handler.fail(302, Location="http://127.0.0.1:9/elsewhere"), "302"),
    "hang": (lambda handler: handler.hang(), "1 s|seconds|in time|timed out|timeout"),
    "trickle": (lambda handler: handler.trickle(), "1 s|seconds|in time|timed out|timeout"),
    "close": (lambda handler: handler.close(), "connect|closed|without"),
    "garbage": (lambda handler: handler.garbage(), "HTTP|connect|read"),
    "html": (lambda handler: handler.answer(200, b"<html>a proxy</html>", Content_Type="text/html") or True, ""),
    "null": (lambda handler: handler.answer(200, {"result": None, "status": "ok", "time": 0}) or True, ""),
    "list": (lambda handler: handler.answer(200, []) or True, ""),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_database_that_fails_for_good_ends_the_run_which_then_goes_on(ingest, server, name):
    failure, words = FAULTS[name]
    server.write = failure
    code, counts, lines = ingest(server.url, *QUICK)
    assert code == 1 and counts is None, lines
    assert lines[-1].startswith("millpond: Qdrant at http://127.0.0.1:"), lines[-1]
    assert "Traceback" not in "".join(lines) and not server.points
    assert any(word in lines[-1] for word in words.split("|")), lines[-1]
    server.write = lambda handler: False
    code, counts, _ = ingest(server.url, *QUICK)
    assert (code, counts["written"], counts["cached"]) == (0, ROWS, ROWS) and len(server.points) == ROWS


@pytest.mark.parametrize(
    "name", [*(pytest.param(code, marks=pytest.mark.slow) for code in ("500", "503")), "429", "close"]
)
def test_a_database_that_fails_twice_is_asked_again(ingest, server, name, caplog):
    failure, _ = FAULTS[name]
    server.write = lambda handler: server.writes <= 2 and failure(handler)
    code, counts, lines = ingest(server.url, "--retry-for", "30")
    assert (code, counts["written"], counts["retried"], counts["failed"]) == (0, ROWS, 2, 0), lines
    assert len(server.points) == ROWS and caplog.text.count("trying again in") == 2


def test_a_request_that_is_too_large_is_halved(ingest, server):
    limits = []

    def write(handler):
        limits.append(int(handler.headers["Content-Length"]))
        return limits[-1] > 12000 and handler.fail(413)

    server.write = write
    code, counts, _ = ingest(server.url, *QUICK)
    assert (code, counts["written"], counts["failed"]) == (0, ROWS, 0) and len(server.points) == ROWS
    assert max(limits) > 12000 and len(limits) > 3


def test_a_database_that_acknowledges_without_storing_is_found_by_verify(ingest, server):
    server.stores = False
    code, counts, lines = ingest(server.url, "--verify")
    assert code == 1 and counts["verification"]["missing"] == ROWS
    assert any(f"{ROWS} rows are missing" in line for line in lines)
    server.stores = True
    code, counts, _ = ingest(server.url, "--verify")
    assert code == 0 and counts["written"] == ROWS and counts["verification"]["missing"] == 0


@pytest.mark.parametrize("listens", [True, False], ids=["a full queue", "nobody"])
def test_a_server_that_accepts_no_connection_is_given_up(ingest, listens):
    with contextlib.ExitStack() as open_sockets:
        full = open_sockets.enter_context(socket.socket())
        full.bind(("127.0.0.1", 0))
        if listens:
            full.listen(0)
            for _ in range(4):  # the queue is full: further connections wait for ever
                other = open_sockets.enter_context(socket.socket())
                other.setblocking(False)
                other.connect_ex(full.getsockname())
        url = f"http://127.0.0.1:{full.getsockname()[1]}"
        code, counts, lines = ingest(url, *QUICK)
    assert code == 1 and counts is None
    assert lines[-1].startswith(
        f"millpond: {f'Qdrant at {url}' if listens else f'nothing listens at {url}, so Qdrant'}"
    )


def test_a_server_that_dies_and_comes_back_is_waited_for(ingest, spec):
    with FailingQdrant(spec) as server:
        address, died = server.server_address, threading.Event()

        def write(handler):
            died.set()
            return handler.close()

        server.write = write
        points, come = server.points, threading.Event()

        def come_back():
            died.wait(60)
            server.shutdown()
            server.server_close()
            time.sleep(1.5)
            with FailingQdrant(spec, address) as again:
                again.points = points
                come.wait(60)

        thread = threading.Thread(target=come_back)
        thread.start()
        try:
            code, counts, lines = ingest(server.url, "--retry-for", "60")
        finally:
            come.set()
            died.set()
            thread.join()
    assert (code, counts["written"]) == (0, ROWS), lines
    assert counts["retried"] >= 1 and len(points) == ROWS
