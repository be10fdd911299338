"""Vectors as base64 and as binary, in every type and byte order."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient
from tests.tiny import SENTENCES

from millpond.server import ServedModels

TEXTS = list(SENTENCES[:3])
TOLERANCES = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 1e-2, "fp8_e4m3": 0.1, "fp8_e5m2": 0.1}


@pytest.fixture(scope="module")
def ask(pool: tuple[ServedModels, TestClient]) -> Any:
    def ask(model: str = "embedder", path: str = "/v1/embeddings", **body: Any) -> Any:
        response = pool[1].post(path, json={"model": model, "input": TEXTS, **body})
        assert response.status_code == 200, response.text
        return response

    return ask


@pytest.fixture(scope="module")
def vectors(pool: tuple[ServedModels, TestClient]) -> Any:
    return lambda texts=TEXTS: pool[0].find("embedder", tasks=(), api="").engine.embed(texts).embeddings


@pytest.mark.torch
@pytest.mark.parametrize(
    ("dtype", "order"),
    [
        ("float32", "little"),
        ("float32", "big"),
        ("float16", "native"),
        ("bfloat16", "big"),
        ("fp8_e4m3", "big"),
        ("fp8_e5m2", "little"),
    ],
)
def test_base64(ask: Any, vectors: Any, dtype: str, order: str) -> None:
    import torch

    answer = ask(encoding_format="base64", embed_dtype=dtype, endianness=order).json()
    kind = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}.get(dtype) or getattr(torch, dtype)
    for item, row in zip(answer["data"], vectors(), strict=True):
        data = base64.b64decode(item["embedding"])
        if order == "big":
            data = np.frombuffer(data, dtype=f"u{kind.itemsize}").byteswap().tobytes()
        actual = torch.frombuffer(bytearray(data), dtype=kind).float().numpy()
        np.testing.assert_allclose(actual, row, atol=TOLERANCES[dtype])
        assert "shape" not in item


def test_base64_of_a_matrix_tells_its_shape(ask: Any, pool: tuple[ServedModels, TestClient]) -> None:
    expected = pool[0].find("colbert", tasks=(), api="").engine.token_embed(TEXTS).embeddings
    for path, field in (("/v1/embeddings", "embedding"), ("/pooling", "data")):
        items = ask("colbert", path, encoding_format="base64").json()["data"]
        for item, matrix in zip(items, expected, strict=True):
            actual = np.frombuffer(base64.b64decode(item[field]), dtype="<f4").reshape(item["shape"])
            np.testing.assert_allclose(actual, matrix, atol=1e-6)


@pytest.mark.parametrize("count", [3, 64])
def test_bytes_have_a_table_in_a_header(ask: Any, vectors: Any, count: int) -> None:
    """vLLM's clients read the table, also of a usual batch, whose header aiohttp accepts."""
    texts = [f"{i} ponds" for i in range(count)]
    response = ask(input=texts, encoding_format="bytes", embed_dtype="float16")
    metadata = json.loads(response.headers["metadata"])
    assert response.headers["content-type"] == "application/octet-stream" and len(response.headers["metadata"]) < 8190
    assert metadata["model"] == "embedder" and metadata["usage"]["prompt_tokens"] > 3
    number_format = {"embed_dtype": "float16", "endianness": "little"}
    assert metadata["data"][1] == {"index": 1, **number_format, "start": 96, "end": 192, "shape": [48]}
    rows = [np.frombuffer(response.content[item["start"] : item["end"]], dtype="<f2") for item in metadata["data"]]
    np.testing.assert_allclose(rows, vectors(texts), atol=1e-3)


def test_bytes_of_many_have_a_stride(ask: Any, vectors: Any) -> None:
    texts = [f"{i} ponds" for i in range(300)]
    response = ask(input=texts, encoding_format="bytes")
    metadata = json.loads(response.headers["metadata"])
    assert metadata["data"] is None and metadata["shape"] == [300, 48] and metadata["stride"] == 192
    np.testing.assert_allclose(np.frombuffer(response.content, "<f4").reshape(300, 48), vectors(texts), atol=1e-6)


@pytest.mark.parametrize("copies", [1, 30])
def test_bytes_of_matrices_have_a_table_that_may_follow_them(
    ask: Any, pool: tuple[ServedModels, TestClient], copies: int
) -> None:
    response = ask("colbert", "/pooling", input=TEXTS * copies, encoding_format="bytes")
    metadata = json.loads(response.headers["metadata"])
    table = metadata["data"]
    if copies > 1:
        assert table is None and metadata["table"]["end"] == len(response.content)
        table = json.loads(response.content[metadata["table"]["start"] : metadata["table"]["end"]])
    expected = pool[0].find("colbert", tasks=(), api="").engine.token_embed(TEXTS * copies).embeddings
    for item, matrix in zip(table, expected, strict=True):
        actual = np.frombuffer(response.content[item["start"] : item["end"]], dtype="<f4").reshape(item["shape"])
        np.testing.assert_allclose(actual, matrix, atol=1e-6)


def test_bytes_only(ask: Any, vectors: Any) -> None:
    response = ask(encoding_format="bytes_only", endianness="big")
    assert "metadata" not in response.headers
    np.testing.assert_allclose(np.frombuffer(response.content, ">f4").reshape(-1, 48), vectors(), atol=1e-6)


def test_coheres_types_are_of_the_same_vectors(pool: tuple[ServedModels, TestClient], vectors: Any) -> None:
    body = {"model": "embedder", "texts": TEXTS, "embedding_types": ["int8", "uint8", "base64"]}
    by_type = pool[1].post("/v2/embed", json=body).json()["embeddings"]
    decoded = [np.frombuffer(base64.b64decode(each), "<f4") for each in by_type["base64"]]
    np.testing.assert_allclose(decoded, vectors(), atol=1e-6)
    codes = np.array(by_type["int8"])
    assert np.abs(codes).max(axis=1).tolist() == [127] * 3
    np.testing.assert_array_equal(np.array(by_type["uint8"]), codes + 128)
    cosines = (codes * vectors()).sum(axis=1) / np.linalg.norm(codes, axis=1)
    assert (cosines > 0.999).all()
    alone = pool[1].post("/v2/embed", json={**body, "texts": TEXTS[1:2]}).json()["embeddings"]["int8"]
    np.testing.assert_allclose(alone[0], codes[1], atol=1)  # a rounding may fall either way
