"""The load generator: its requests, its figures, and misbehaving servers."""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from load_generator import drive
from load_generator.drive import run
from load_generator.plan import LoadPlan
from load_generator.report import LoadReport, Sample
from load_generator.target import Target, UnusableAnswerError, tokens_of

from millpond.errors import InvalidRequestError

pytestmark = pytest.mark.contract

TEXTS = ["still water", "a mill", "the wheel turns", "grain", "flour, and bread of it"]


class BrokenError(Exception):
    """An incomplete answer."""


@dataclass
class Peer:
    """A server whose behaviour a test chooses."""

    answer: Callable[[int, dict[str, Any]], tuple[int, Any]]
    close: bool = False
    early: bool = False
    chunked: bool = False
    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    connections: int = 0


@contextlib.contextmanager
def serving(peer: Peer) -> Iterator[Peer]:
    numbers = itertools.count()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            peer.connections += 1

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            self.send({"object": "list", "data": [{"id": "the-only-one"}]}, 200)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            peer.asked.append(body)
            peer.paths.append(self.path)
            peer.headers.append({key.lower(): value for key, value in self.headers.items()})
            try:
                status, content = peer.answer(next(numbers), body)
            except BrokenError:
                self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{")
                self.wfile.flush()
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True
                return
            self.send(content, status)

        def send(self, content: Any, status: int) -> None:
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            if peer.early:
                self.send_response_only(103)
                self.end_headers()
            self.send_response(status)
            if peer.close:
                self.send_header("Connection", "close")
            if peer.chunked:
                self.send_header("Transfer-Encoding", "chunked")
                parts = [data[: len(data) // 2], data[len(data) // 2 :], b""]
                data = b"".join(f"{len(part):x}\r\n".encode() + part + b"\r\n" for part in parts)
            else:
                self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    peer.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield peer
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def embeddings(number: int, body: dict[str, Any]) -> tuple[int, Any]:
    rows = [{"index": i, "embedding": [0.5, 0.5]} for i in range(len(body["input"]))]
    return 200, {"data": rows, "usage": {"prompt_tokens": 7, "total_tokens": 7}}


def refusing_after(count: int, status: int) -> Callable[[int, dict[str, Any]], tuple[int, Any]]:
    """Answers ``count`` requests, then every later one with ``status``."""

    def answer(number: int, body: dict[str, Any]) -> tuple[int, Any]:
        return embeddings(number, body) if number < count else (status, {"error": {"message": "no more room"}})

    return answer


def loaded(peer: Peer, target: dict[str, Any] | None = None, **plan: Any) -> LoadReport:
    plan = {"texts_per_request": 2, "connections": 2, "warm_up": 0, "timeout": 30, **plan}
    if "requests" in plan:
        plan["duration"] = None
    return run(Target(url=peer.url, **(target or {})), LoadPlan(**plan), TEXTS)


# What is sent


def test_requests_hold_the_texts_in_turn_and_the_only_model():
    with serving(Peer(embeddings)) as peer:
        report = loaded(peer, {"api_key": "secret", "dimensions": 2, "encoding_format": "float"}, requests=6)
    assert len(peer.asked) == 7  # the first one is the look at the endpoint
    sent = [body["input"] for body in peer.asked[1:]]
    assert all(body["model"] == "the-only-one" and body["dimensions"] == 2 for body in peer.asked)
    assert peer.asked[0] == {
        "model": "the-only-one", "encoding_format": "float", "dimensions": 2, "input": ["still water", "a mill"]
    }  # fmt: skip
    assert sorted(map(tuple, sent)) == 3 * [("still water", "a mill")] + 3 * [("the wheel turns", "grain")]
    assert {header["authorization"] for header in peer.headers} == {"Bearer secret"}
    assert report.target.model == "the-only-one"


@pytest.mark.parametrize(
    ("api", "path", "body", "answer"),
    [
        ("embeddings", "/v1/embeddings", {"input": TEXTS[:2]}, {"data": [1, 2]}),
        ("rerank", "/rerank", {"query": TEXTS[0], "documents": TEXTS[:2]}, {"results": [1, 2]}),
        ("score", "/score", {"text_1": TEXTS[0], "text_2": TEXTS[:2]}, {"data": [1, 2]}),
        ("tei-embed", "/embed", {"inputs": TEXTS[:2]}, [[1.0], [2.0]]),
        ("tei-rerank", "/rerank", {"query": TEXTS[0], "texts": TEXTS[:2]}, [{"index": 0}, {"index": 1}]),
    ],
)
def test_every_api_has_its_route_and_its_body(api: str, path: str, body: dict[str, Any], answer: Any):
    with serving(Peer(lambda number, body: (200, answer))) as peer:
        report = loaded(peer, {"api": api, "model": "m"}, requests=1)
    assert peer.paths == [path, path] and peer.asked[0] == {"model": "m", **body}
    assert report.failed == 0 and report.as_dict()["tokens_per_second"] is None


# What is counted


def test_a_closed_loop_sends_as_many_as_are_asked_for_over_few_connections():
    with serving(Peer(embeddings)) as peer:
        report = loaded(peer, requests=40, connections=3)
    figures = report.as_dict()
    assert (figures["requests"], figures["failed"], figures["loop"]) == (40, 0, "closed")
    assert figures["statuses"].keys() == {"200"} and figures["statuses"]["200"]["requests"] == 40
    assert peer.connections <= 3
    assert figures["texts_per_second"] == pytest.approx(80 / report.seconds, rel=0.01)
    assert figures["tokens_per_second"] == pytest.approx(280 / report.seconds, rel=0.01)
    assert figures["distinct_requests"] == 2
    assert 0 < figures["latency_ms"]["p50"] <= figures["latency_ms"]["p99"] <= figures["latency_ms"]["max"]


def test_a_closed_loop_ends_with_its_time(monkeypatch: pytest.MonkeyPatch):
    # Every answer takes 10 ms of a clock that the machine's load does not move.
    monkeypatch.setattr(drive._Phase, "_now", lambda phase: len(phase.samples) * 0.01 + 0.001)
    with serving(Peer(embeddings)) as peer:
        report = loaded(peer, duration=0.2, warm_up=0.1)
    assert report.failed == 0
    # The two connections may both be under way at the end; the look at the endpoint and the warm-up do not count.
    assert len(report.samples) == 21
    assert len(peer.asked) == 1 + 11 + 21
    assert all(sample.sent < 0.2 for sample in report.samples)


def test_an_open_loop_sends_at_its_times():
    plan = LoadPlan(rate=400, requests=30, duration=None, seed=5)
    due = list(plan.arrivals())
    assert len(due) == 30 and due == sorted(due) and due == list(plan.arrivals())
    assert due != list(LoadPlan(rate=400, requests=30, duration=None, seed=6).arrivals())
    assert all(at < 0.5 for at in LoadPlan(rate=400, duration=0.5).arrivals())
    with serving(Peer(embeddings)) as peer:
        report = loaded(peer, rate=400, requests=30, seed=5, connections=8)
    assert sorted(sample.due for sample in report.samples) == pytest.approx(due)
    assert all(sample.due <= sample.sent <= sample.done for sample in report.samples)


def test_answers_other_than_200_are_counted_by_status():
    with serving(Peer(refusing_after(5, 429))) as peer:
        report = loaded(peer, requests=10)
    figures = report.as_dict()
    assert {status: row["requests"] for status, row in figures["statuses"].items()} == {"200": 4, "429": 6}
    assert figures["failed"] == 6 and "no more room" in figures["messages"]["429"]
    assert figures["texts_per_second"] == pytest.approx(8 / report.seconds, rel=0.01)
    assert "429" in report.table() and "no more room" in report.table()


def test_percentiles_are_those_of_the_samples():
    samples = [Sample(0.0, 0.0, (i + 1) / 1000, "200", 0) for i in range(101)]
    report = LoadReport(
        target=Target(url="http://x"), plan=LoadPlan(), samples=samples, messages={}, distinct=1, cpu_seconds=0.0
    )
    assert report.as_dict()["latency_ms"] == {"p50": 51.0, "p95": 96.0, "p99": 100.0, "mean": 51.0, "max": 101.0}


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        (b'{"data": [], "usage": {"prompt_tokens": 12, "total_tokens": 12}}', 12),
        (b'{"usage":{"total_tokens":3},"data":[' + b"0.25, " * 1000 + b"1]}", 3),
        (b'{"results": [{"text": "\\"usage\\": {\\"total_tokens\\": 9}"}], "usage": {"total_tokens": 4}}', 4),
        (b'{"results": [{"text": "\\"usage\\": {\\"total_tokens\\": 9}"}]}', None),
        (b'{"embeddings": [[0.5]], "load_duration": 0, "prompt_eval_count": 7}', 7),  # Ollama's
        (b"[[0.5, 0.25]]", None),
    ],
)
def test_tokens_are_read_off_the_usage(body: bytes, tokens: int | None):
    assert tokens_of(body) == tokens


# Servers that misbehave


@pytest.mark.parametrize(
    "manners", [{"close": True}, {"chunked": True}, {"close": True, "chunked": True}, {"early": True}]
)
def test_any_framing_of_answers_will_do(manners: dict[str, bool]):
    with serving(Peer(embeddings, **manners)) as peer:
        report = loaded(peer, requests=10)
    assert report.failed == 0 and len(report.samples) == 10
    assert (peer.connections > 10) == ("close" in manners)


def test_an_answer_that_breaks_off_is_a_failure_of_its_own():
    def answer(number: int, body: dict[str, Any]) -> tuple[int, Any]:
        if number == 3:
            raise BrokenError
        return embeddings(number, body)

    with serving(Peer(answer)) as peer:
        report = loaded(peer, requests=10)
    assert {status: row["requests"] for status, row in report.as_dict()["statuses"].items()} == {
        "200": 9,
        "connection": 1,
    }


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((404, {"error": {"message": "no such model"}}), "answers 404: .*no such model"),
        ((200, {"data": [1]}), "answers 2 texts with 1 rows"),
        ((200, b"<html>hello</html>"), "nothing with rows: <html>hello</html>"),
        ((200, {"results": [1, 2]}), "nothing with rows"),
        ((503, b""), "answers 503: an empty body"),
    ],
)
def test_an_endpoint_that_does_not_do_what_is_asked_is_told_at_once(answer: tuple[int, Any], message: str):
    with serving(Peer(lambda number, body: answer)) as peer, pytest.raises(UnusableAnswerError, match=message):
        loaded(peer, requests=5)
    assert len(peer.asked) == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"url": "localhost:8000"}, "is no address"),
        ({"url": "ftp://localhost"}, "is no address"),
        ({"url": "http://"}, "is no address"),
        ({"url": "http://localhost:99999"}, "is no address"),
        ({"api": "chat"}, "choose of embeddings, rerank"),
        ({"api": "rerank", "dimensions": 3}, "no dimensions"),
        ({"api_key": "a\r\nX: y"}, "printable"),
        ({"url": "https://localhost", "ca_file": Path("nowhere.pem")}, "nowhere.pem"),
    ],
)
def test_a_target_that_is_none_is_refused(fields: dict[str, Any], message: str):
    with pytest.raises(InvalidRequestError, match=message):
        Target(**{"url": "http://localhost:8000", **fields}).tls()


def test_a_key_is_in_no_report():
    target = Target(url="http://x", api_key="do-not-tell")
    report = LoadReport(target=target, plan=LoadPlan(), samples=[], messages={}, distinct=1, cpu_seconds=0.0)
    assert "do-not-tell" not in f"{target!r} {report!r} {json.dumps(report.as_dict())} {report.table()}"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"connections": 0}, "connections=0"),
        ({"texts_per_request": 0}, "texts_per_request=0"),
        ({"rate": -1.0}, "rate=-1.0"),
        ({"rate": float("nan")}, "rate=nan"),
        ({"duration": 0.0}, "duration=0.0"),
        ({"timeout": float("inf")}, "timeout=inf"),
        ({"warm_up": -1.0}, "warm_up=-1.0"),
        ({"requests": 5}, "either duration or requests"),
        ({"duration": None}, "either duration or requests"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(fields: dict[str, Any], message: str):
    with pytest.raises(InvalidRequestError, match=message):
        LoadPlan(**fields)


def test_the_script_prints_figures(tmp_path: Path):
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(TEXTS), encoding="utf-8")
    script = Path(drive.__file__).parents[1] / "load_server.py"
    with serving(Peer(embeddings)) as peer:
        words = [sys.executable, script, peer.url, texts, "-n", "2", "--requests", "4", "--output", "json"]
        run = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(run.stdout)["requests"] == 4
