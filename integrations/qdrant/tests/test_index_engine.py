"""The vectors and requests of QdrantIndex, answered by Qdrant's real engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from integrations.qdrant.tests.real_engine import RealEngine

from millpond.ingest import point_id
from millpond.testing.matrices import matrices, maxsim, names, ragged
from millpond_qdrant import QdrantIndex

pytestmark = pytest.mark.contract


@pytest.fixture
def client(tmp_path: Path) -> Iterator[RealEngine]:
    client = RealEngine(tmp_path / "shard")
    yield client
    client.shard.close()
    client.close()


@pytest.mark.parametrize(
    ("prefetch", "codec"), [("muvera", "float16"), ("dense", "float32"), (None, "float16"), (None, "float32")]
)
def test_the_real_engine_answers_with_the_same_hits(client: RealEngine, prefetch: Any, codec: Any) -> None:
    values = matrices(300, tokens=[1 + n % 9 for n in range(300)])
    index, local = (QdrantIndex(place, "docs", None, prefetch=prefetch, codec=codec) for place in (client, ":memory:"))
    for each in (index, local):
        each.add_embeddings(names(300), ragged(values))
    queries = matrices(4, tokens=[1, 4, 8, 40], seed=1)
    for options in ({}, {"exact": True}, {"ids": names(40)}):
        client.requests.clear()
        results = index.search_embeddings(ragged(queries), k=5, **options)
        staged = prefetch is not None and not options
        assert all((request.prefetch is not None) == staged for request in client.requests)
        for query, hits in zip(queries, results, strict=True):
            for hit in hits:
                exact = maxsim(query, values[int(hit.id.removeprefix("doc-"))])
                assert hit.score == pytest.approx(exact, abs=1e-3 if codec == "float16" else 1e-5)
        if not staged:  # else the engine's candidates come from int8
            expected = local.search_embeddings(ragged(queries), k=5, **options)
            assert [[hit.id for hit in hits] for hits in results] == [[hit.id for hit in hits] for hits in expected]


def test_candidates_from_int8_are_those_from_floats(client: RealEngine) -> None:
    random = np.random.default_rng(0)
    topics = matrices(20, tokens=12, width=64)

    def about(topic: int) -> npt.NDArray[np.float32]:
        rows = topics[topic] + 0.1 * random.standard_normal((12, 64))
        return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)

    values = [about(n % 20) for n in range(400)]
    index, local = (QdrantIndex(place, "docs", None) for place in (client, ":memory:"))
    for each in (index, local):
        each.add_embeddings(names(400), ragged(values, 64))
    client.shard.optimize()
    queries = ragged([about(topic)[:6] for topic in range(20)], 64)
    found = 0
    for topic, (hits, expected) in enumerate(
        zip(*(each.search_embeddings(queries, k=10, candidates=40) for each in (index, local)), strict=True)
    ):
        assert {int(hit.id.removeprefix("doc-")) % 20 for hit in hits} == {topic}
        found += len({hit.id for hit in hits} & {hit.id for hit in expected})
    assert found >= 190  # of 200


def test_a_point_without_rows_has_no_vectors(client: RealEngine) -> None:
    index = QdrantIndex(client, "docs", None)
    values = matrices(3, tokens=[2, 0, 4])
    index.add_embeddings(names(3), ragged(values))
    assert [hit.id for hit in index.search_embeddings(ragged(values[2:]))[0]] == ["doc-2", "doc-0"]
    assert len(client.shard.retrieve([point_id("doc-1")], with_payload=False, with_vector=False)) == 1
