"""Calls of clients that disconnect, calls that time out, and calls without room in the queue."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.server.wire import connect, replies, talk

from millpond.engine.engine import submission_of
from millpond.engine.tokenize import large_texts
from millpond.server import ModelConfig, ServedModels, ServerConfig, create_app
from tests.server.conftest import address_of, ask, running, serving, until

PATH = "/v1/embeddings"


def send(address: str, body: bytes, *headers: str) -> socket.socket:
    """A request on its own socket, whose answer is not read yet."""
    lines = [f"POST {PATH} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {len(body)}"]
    connection = connect(address)
    connection.sendall("\r\n".join([*lines, *headers, "", ""]).encode() + body)
    return connection


# --- Clients that leave ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("api_keys", [(), ("key",)])
@pytest.mark.parametrize("origins", [(), ("https://app.example",)])
def test_the_work_of_a_client_that_leaves_is_dropped(held: Any, api_keys: Any, origins: Any) -> None:
    """With every optional middleware installed."""
    pond = held()
    config = ServerConfig(api_keys=api_keys, cors_origins=origins)
    with running(pond.models, config) as address:
        headers = ("Authorization: Bearer key", "Origin: https://app.example")
        with send(address, b'{"input": ["a", "b", "c"]}', *headers):
            until(lambda: pond.waiting == 3)
        until(lambda: pond.waiting == 0)  # though nothing was released
        assert pond.cancelled == 1
        pond.release()
        assert (
            httpx.post(address + PATH, json={"input": "a"}, headers={"Authorization": "Bearer key"}).status_code == 200
        )


def test_a_client_that_leaves_while_its_call_is_checked_leaves_nothing_behind(
    held: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The preparing thread cannot be stopped; the call that it then queues is cancelled."""
    pond, entered, go = held(), threading.Event(), threading.Event()
    submission = type(submission_of(pond.engine))
    start = submission.start_here

    def slow(self: Any, *args: Any) -> Any:
        entered.set()
        assert go.wait(timeout=300)
        return start(self, *args)

    monkeypatch.setattr(submission, "start_here", slow)
    app = create_app(pond.models)
    with serving(app) as server:
        connection = send(address_of(server), b'{"input": ["a", "b"]}')
        assert entered.wait(timeout=300)
        connection.close()
        until(lambda: not any(_busy(connection) for connection in server.server_state.connections))
        go.set()
        until(lambda: pond.cancelled == 1 and pond.waiting == 0)
        pond.release()


def _busy(connection: Any) -> bool:
    cycle = getattr(connection, "cycle", None)
    return cycle is not None and not (cycle.response_complete or cycle.disconnected)


# --- Requests that take too long ------------------------------------------------------------------------------------


def test_a_request_that_takes_too_long_is_given_up(held: Any) -> None:
    pond = held()
    # Long enough that the call is in the engine by then, also on a busy machine.
    with running(pond.models, ServerConfig(request_timeout=2)) as address:
        response = httpx.post(address + PATH, json={"input": ["a", "b"]}, timeout=300)
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["type"]) == (504, 504, "Gateway Timeout")
        assert "2 s" in error["message"]
        until(lambda: pond.waiting == 0)
        assert pond.cancelled == 1
        pond.release()


def test_an_engine_that_is_stopped_answers(held: Any) -> None:
    """Its futures are cancelled, which must not cancel the request."""
    pond = held()
    app = create_app(pond.models)
    with serving(app) as server, ThreadPoolExecutor(1) as threads:
        answer = threads.submit(httpx.post, address_of(server) + PATH, json={"input": "a"}, timeout=300)
        until(lambda: pond.waiting == 1)
        for call in list(pond.engine._dispatcher._admission.calls()):
            call.future.cancel()
        assert answer.result(timeout=300).status_code == 503
        pond.release()


def test_both_texts_of_an_explanation_are_given_up(held: Any) -> None:
    pond = held()
    body = {"query": "how deep?", "document": "The pond is deep."}
    with running(pond.models, ServerConfig(request_timeout=2)) as address:
        response = httpx.post(f"{address}/explain", json=body, timeout=300)
        assert (response.status_code, response.json()["error"]["type"]) == (504, "Gateway Timeout")
        until(lambda: pond.waiting == 0)
        assert pond.cancelled == 2
        pond.release()
        assert httpx.post(f"{address}/explain", json=body, timeout=300).status_code == 200


# --- A full queue ---------------------------------------------------------------------------------------------------


def test_a_full_queue_is_429_and_health_answers(held: Any) -> None:
    pond = held(max_queue=4)
    with running(pond.models) as address, ThreadPoolExecutor(2) as threads:
        first = threads.submit(httpx.post, address + PATH, json={"input": ["a", "b", "c"]}, timeout=300)
        until(lambda: pond.waiting == 3)
        response = httpx.post(address + PATH, json={"input": ["d", "e"]}, timeout=300)
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["type"]) == (429, 429, "TooManyRequestsError")
        assert int(response.headers["retry-after"]) >= 1
        assert "max_queue=4" in error["message"]
        for path in ("/health", "/ready", "/ping", "/version", "/v1/models"):
            assert httpx.get(address + path, timeout=300).status_code == 200
        assert httpx.get(address + "/load", timeout=300).json() == {"server_load": 1}
        second = threads.submit(
            httpx.post, address + PATH, json={"input": ["d"]}, timeout=300
        )  # for which there is room
        until(lambda: pond.waiting == 4)
        pond.release()
        assert len(first.result(timeout=300).json()["data"]) == 3
        assert len(second.result(timeout=300).json()["data"]) == 1


def test_where_no_text_finds_room_no_body_is_waited_for(held: Any) -> None:
    pond = held(max_queue=2)
    blocking = pond.engine.submit("embed", ["a", "b"])
    with running(pond.models) as address:
        head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
        ((status, headers, body),) = replies(talk(address, head.encode()))  # without a body
        assert status == 429 and "retry-after: 1" in headers
        assert "max_queue=2" in json.loads(body)["error"]["message"]
        assert httpx.post(address + "/tokenize", json={"prompt": "a"}, timeout=300).status_code == 200
        metrics = httpx.get(address + "/metrics", timeout=300).text
        assert f'millpond_requests_rejected_total{{model="tiny",route="{PATH}"}} 1.0' in metrics
        pond.release()
        blocking.result(timeout=300)


@pytest.mark.contract
@pytest.mark.parametrize(
    ("path", "small", "large"),
    [
        ("/embed", {"inputs": "a pond"}, {"inputs": "\u6c60" * 140_000}),
        pytest.param("/tokenize", {"prompt": "a pond"}, {"prompt": "\u6c60" * 140_000}, marks=pytest.mark.slow),
        pytest.param(
            *("/rerank", {"query": "a", "texts": ["b"]}),
            {"query": "a", "texts": ["\u6c60" * 140_000], "truncate": True},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_small_requests_are_answered_while_large_texts_wait_for_their_turn(
    held: Any, path: str, small: dict[str, Any], large: dict[str, Any]
) -> None:
    pond, turns = held(), ExitStack()
    pond.release()
    for _ in range(large_texts.SLOTS):
        turns.enter_context(large_texts.TURNS.turn(large_texts.SLOTS))
    with turns, running(pond.models) as address, ThreadPoolExecutor(20) as threads:
        slow = [threads.submit(httpx.post, address + path, json=large, timeout=300) for _ in range(20)]
        for _ in range(5):
            assert httpx.post(address + path, json=small, timeout=300).status_code == 200
        assert not any(answer.done() for answer in slow)
        turns.close()
        assert [answer.result(timeout=300).status_code for answer in slow] == [200] * 20


# --- The end --------------------------------------------------------------------------------------------------------


def test_a_server_that_is_about_to_stop_says_so_and_answers(held: Any) -> None:
    pond = held()
    app = create_app(pond.models)
    with serving(app) as server, ThreadPoolExecutor(1) as threads:
        address = address_of(server)
        before = httpx.get(address + "/ready", timeout=300)
        assert (before.status_code, before.headers.get("connection")) == (200, None)
        under_way = threads.submit(httpx.post, address + PATH, json={"input": "a"}, timeout=300)
        until(lambda: pond.waiting == 1)
        app.state.drain.begin()
        after = httpx.get(address + "/ready", timeout=300)
        assert (after.status_code, after.headers["connection"]) == (503, "close")
        assert after.json()["error"]["type"] == "ServiceUnavailableError"
        assert httpx.get(address + "/health", timeout=300).status_code == 200  # a restart would not help
        server.should_exit = True
        pond.release()
        response = under_way.result(timeout=300)
        assert (response.status_code, response.headers["connection"]) == (200, "close")
    assert pond.engine.closed
    with pytest.raises(httpx.ConnectError):
        httpx.get(address + "/health", timeout=300)


def test_a_closed_model_is_unhealthy(embedder: Path) -> None:
    models = ServedModels.load([ModelConfig(model=str(embedder))])
    app = create_app(models)

    assert asyncio.run(ask(app, "GET", "/health")).status_code == 200
    models.close()
    for method, path, options in (
        ("GET", "/health", {}),
        ("HEAD", "/health", {}),
        ("GET", "/ready", {}),
        ("POST", "/ping", {}),
        ("POST", PATH, {"json": {"input": "a"}}),
    ):
        response = asyncio.run(ask(app, method, path, **options))
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
