"""Encoding of responses: arrays in JSON and in binary."""

from __future__ import annotations

import asyncio
import json
import threading

import numpy as np
import pytest

from millpond.server.responses import encoding
from millpond.server.responses.encoding import Base64

ROWS = np.arange(12, dtype=np.float32).reshape(3, 4) / 8


def answered(content, **options):
    return asyncio.run(encoding.json_response(content, **options))


class TestJson:
    @pytest.mark.parametrize(
        "array",
        [
            ROWS,
            ROWS[0],
            ROWS[:, 1],
            ROWS.T,
            ROWS[0, :0],
            ROWS.astype(np.float16),
            np.arange(3),
            np.float32(0.1),
            np.bool_(1),
        ],
    )
    def test_arrays(self, array):
        actual = json.loads(encoding.to_json({"a": [array]}))["a"][0]
        assert np.shape(actual) == np.shape(array)
        np.testing.assert_array_equal(np.array(actual, dtype=array.dtype).reshape(np.shape(array)), array)

    def test_every_float32_survives(self):
        numbers = np.random.default_rng(0).integers(0, 1 << 32, 4096, dtype=np.uint32).view(np.float32)
        numbers = numbers[np.isfinite(numbers)]
        actual = np.array(json.loads(encoding.to_json(numbers)), dtype=np.float32)
        np.testing.assert_array_equal(actual.view(np.uint32), numbers.view(np.uint32))

    def test_what_is_not_finite_is_null(self):
        assert encoding.to_json(np.array([np.nan, np.inf, 1], dtype=np.float32)) == b"[null,null,1.0]"

    def test_anything_else(self):
        with pytest.raises(TypeError, match="set"):
            encoding.to_json({"a": {1}})

    def test_the_response(self):
        response = answered({"a": ROWS}, status=418, headers={"X-A": "b"})
        assert response.status_code == 418 and response.headers["x-a"] == "b"
        assert response.headers["content-type"] == "application/json"
        assert json.loads(response.body) == {"a": ROWS.tolist()}

    @pytest.mark.parametrize(("height", "here"), [(8, True), (2048, False)])
    @pytest.mark.parametrize(
        "wrap", [lambda rows: rows, lambda rows: {"b": list(rows)}, lambda rows: Base64(rows=rows)]
    )
    def test_large_answers_leave_the_event_loop_alone(self, monkeypatch, height, here, wrap):
        seen = []
        monkeypatch.setattr(encoding, "to_json", lambda _: seen.append(threading.current_thread()) or b"{}")
        answered({"a": wrap(np.zeros((height, 64), dtype=np.float32))})
        assert (seen == [threading.main_thread()]) is here


class TestBinary:
    @pytest.mark.parametrize("rows", [ROWS, ROWS.T, ROWS[1], ROWS[:, ::2]])
    def test_rows_lie_behind_each_other(self, rows):
        actual = np.frombuffer(encoding.to_bytes(rows), dtype="<f4")
        np.testing.assert_array_equal(actual, rows.flatten())

    def test_in_json(self):
        actual = json.loads(encoding.to_json({"a": Base64(rows=ROWS, dtype="float16", order="big")}))
        assert actual == {"a": encoding.to_base64(ROWS, "float16", "big")}

    @pytest.mark.parametrize("dtype", ["bfloat16", "fp8_e4m3"])
    def test_read_only_rows(self, dtype):
        rows = ROWS.copy()
        rows.flags.writeable = False
        assert encoding.to_bytes(rows, dtype) == encoding.to_bytes(ROWS, dtype)
