"""Parts of the server that no request shows: what is encoded where, rates, threads, and the room for connections."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading

import numpy as np
import pytest

from millpond.errors import EngineOverloadedError
from millpond.server.launch.sockets import allowed_connections
from millpond.server.requests import prepare_executor
from millpond.server.requests.prepare_executor import THREADS, PrepareExecutor
from millpond.server.responses import encoding
from millpond.server.responses.encoding import Base64, NumberFormat
from millpond.server.telemetry import throughput
from millpond.server.telemetry.logs import Formatter
from millpond.server.telemetry.throughput import WINDOW, Throughput

ROWS = np.arange(12, dtype=np.float32).reshape(3, 4) / 8


@pytest.mark.parametrize("array", [ROWS, ROWS[:, 1], ROWS.T, ROWS[0, :0], np.arange(3), np.float32(0.1)])
def test_arrays_are_json_whatever_their_layout(array):
    actual = json.loads(encoding.to_json({"a": [array]}))["a"][0]
    np.testing.assert_array_equal(np.array(actual, dtype=array.dtype).reshape(np.shape(array)), array)
    if array.ndim:
        form = NumberFormat()
        np.testing.assert_array_equal(np.frombuffer(form.to_bytes(array), "<f4"), array.astype("<f4").flatten())


def test_what_is_not_finite_is_null_and_read_only_rows_are_read():
    assert encoding.to_json(np.array([np.nan, np.inf, 1], dtype=np.float32)) == b"[null,null,1.0]"
    rows = ROWS.copy()
    rows.flags.writeable = False
    assert NumberFormat(dtype="bfloat16").to_bytes(rows) == NumberFormat(dtype="bfloat16").to_bytes(ROWS)


@pytest.mark.parametrize(("height", "here"), [(8, True), (2048, False)])
@pytest.mark.parametrize("wrap", [lambda rows: {"b": list(rows)}, lambda rows: Base64(rows=rows)])
def test_large_answers_leave_the_event_loop_alone(monkeypatch, height, here, wrap):
    seen = []
    monkeypatch.setattr(encoding, "to_json", lambda _: seen.append(threading.current_thread()) or b"{}")
    asyncio.run(encoding.json_response({"a": wrap(np.zeros((height, 64), dtype=np.float32))}))
    assert (seen == [threading.main_thread()]) is here


def test_a_traceback_is_part_of_its_line_in_json():
    try:
        raise KeyError("lost")
    except KeyError as error:
        information = (KeyError, error, error.__traceback__)
    line = Formatter("json").format(logging.LogRecord("millpond", logging.ERROR, "", 0, "failed", (), information))
    assert "\n" not in line and "KeyError: 'lost'" in json.loads(line)["traceback"]


class Hands:
    """A clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(throughput.time, "monotonic", lambda: self.now)


def test_a_steady_stream_has_its_rate(monkeypatch):
    hands, done = Hands(monkeypatch), Throughput()
    assert done.rate("texts") == 0
    for _ in range(400):
        hands.now += 0.1
        done.add(texts=3, tokens=12)
    assert done.rate("texts") == pytest.approx(30, rel=0.05)
    assert done.rate("tokens") == pytest.approx(120, rel=0.05)
    assert done.uptime == pytest.approx(40)
    hands.now += WINDOW + 1  # what is long ago is forgotten
    assert done.rate("texts") == 0


@pytest.mark.parametrize(("seconds", "rate"), [(2, 10), (0.001, 20)])
def test_a_server_that_has_just_begun_is_not_called_slow(monkeypatch, seconds, rate):
    hands, done = Hands(monkeypatch), Throughput()
    hands.now += seconds
    done.add(texts=20)
    assert done.rate("texts") == rate


def test_the_prepare_executor_refuses_calls_above_its_limit(monkeypatch):
    monkeypatch.setattr(prepare_executor, "_MAX_PREPARING", 2)
    executor, go = PrepareExecutor(), threading.Event()
    kept = [executor.submit(lambda: go.wait(timeout=300)) for _ in range(2)]
    with pytest.raises(EngineOverloadedError) as caught:
        executor.submit(lambda: True)
    assert caught.value.retry_after > 0
    go.set()
    assert all(future.result(timeout=300) for future in kept)
    executor.close()


def test_small_requests_have_a_thread_while_large_ones_fill_theirs():
    executor, go = PrepareExecutor(), threading.Event()
    large = [executor.submit(lambda: go.wait(timeout=300), body_bytes=1_000_000) for _ in range(3 * THREADS)]
    assert executor.submit(lambda: True, body_bytes=1_000).result(timeout=300)
    assert not any(future.done() for future in large)
    go.set()
    assert all(future.result(timeout=300) for future in large)
    executor.close()


def test_the_default_cap_leaves_room_for_files(monkeypatch, caplog):
    resource = pytest.importorskip("resource")

    def limited(count: int) -> None:
        monkeypatch.setattr(resource, "getrlimit", lambda _: (count, count))

    opened = len(os.listdir("/dev/fd"))
    limited(opened + 1000)
    assert opened + 800 < allowed_connections(None) + opened < opened + 1000
    assert allowed_connections(10) == 10 and caplog.records == []
    with caplog.at_level(logging.WARNING):
        assert allowed_connections(5000) == allowed_connections(None)
    assert "--max-connections=5000 is more than" in caplog.text
    limited(resource.RLIM_INFINITY)
    assert (allowed_connections(None), allowed_connections(100_000)) == (16384, 100_000)
    limited(1)
    assert allowed_connections(None) == 1
