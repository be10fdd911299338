"""The vectors and requests of QdrantIndex, answered by Qdrant's real engine, since local mode is written in Python."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from qdrant_client import QdrantClient, models

from millpond.ingest import point_id
from millpond.testing.matrices import matrices, maxsim, names, ragged
from millpond_qdrant import QdrantIndex

pytestmark = pytest.mark.contract

edge = pytest.importorskip("qdrant_edge")


class Shard:
    """A shard of the real engine with the vectors that an index made, and what it sent to its client."""

    def __init__(self, folder: Path, client: QdrantClient, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.shard: Any = None
        create, upsert, query = client.create_collection, client.upsert, client.query_batch_points
        self.requests: list[models.QueryRequest] = []

        def created(collection: str, *, vectors_config: dict[str, models.VectorParams], **options: Any) -> Any:
            vectors = {name: self._vector(params) for name, params in vectors_config.items()}
            self.shard = edge.EdgeShard.create(str(self.folder), edge.EdgeConfig(vectors=vectors))
            return create(collection, vectors_config=vectors_config, **options)

        def upserted(collection: str, points: list[models.PointStruct], **options: Any) -> Any:
            sent = [edge.Point(id=point.id, vector=point.vector, payload=point.payload) for point in points]
            self.shard.update(edge.UpdateOperation.upsert_points(sent))
            return upsert(collection, points, **options)

        def queried(collection: str, requests: list[models.QueryRequest], **options: Any) -> Any:
            self.requests += requests
            return query(collection, requests, **options)

        monkeypatch.setattr(client, "create_collection", created)
        monkeypatch.setattr(client, "upsert", upserted)
        monkeypatch.setattr(client, "query_batch_points", queried)

    def answer(self, request: models.QueryRequest) -> list[tuple[str, float]]:
        """Ids and scores by the engine."""
        among = None
        if request.filter is not None:
            (condition,) = request.filter.must  # type: ignore[misc]
            among = edge.Filter(must=[edge.HasIdCondition(set(condition.has_id))])  # type: ignore[union-attr]
        prefetches = []
        if request.prefetch is not None:
            prefetch: Any = request.prefetch
            nearest = edge.Query.Nearest(prefetch.query, using=prefetch.using)
            prefetches = [edge.Prefetch(query=nearest, limit=prefetch.limit, filter=among)]
        points = self.shard.query(
            edge.QueryRequest(
                prefetches=prefetches,
                query=edge.Query.Nearest(request.query, using=request.using),
                filter=among,
                limit=request.limit,
                with_payload=True,
            )
        )
        return [(point.payload["id"], point.score) for point in points]

    @staticmethod
    def _vector(params: models.VectorParams) -> Any:
        quantization = multi = None
        if params.multivector_config is not None:
            multi = edge.MultiVectorConfig(edge.MultiVectorComparator.MaxSim)
        if params.quantization_config is not None:
            quantization = edge.ScalarQuantizationConfig(edge.ScalarType.Int8, always_ram=True)
        return edge.EdgeVectorParams(
            size=params.size,
            distance=edge.Distance.Dot,
            multivector_config=multi,
            datatype=edge.VectorStorageDatatype.Float32
            if params.datatype == models.Datatype.FLOAT32
            else edge.VectorStorageDatatype.Float16,
            on_disk=params.on_disk,
            quantization_config=quantization,
        )


@pytest.fixture
def client() -> Iterator[QdrantClient]:
    client = QdrantClient(":memory:")
    yield client
    client.close()


@pytest.mark.parametrize("prefetch", ["muvera", "dense", None])
@pytest.mark.parametrize("codec", ["float16", "float32"])
def test_the_real_engine_answers_with_the_same_hits(
    client: QdrantClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefetch: Any, codec: Any
) -> None:
    (tmp_path / "shard").mkdir()
    shard = Shard(tmp_path / "shard", client, monkeypatch)
    values = matrices(300, tokens=[1 + n % 9 for n in range(300)])
    index = QdrantIndex(client, "docs", None, prefetch=prefetch, codec=codec)
    index.add_embeddings(names(300), ragged(values))
    queries = matrices(4, tokens=[1, 4, 8, 40], seed=1)
    for options in ({}, {"exact": True}, {"ids": names(40)}):
        shard.requests.clear()
        results = index.search_embeddings(ragged(queries), k=5, **options)
        if options:
            assert all(request.prefetch is None for request in shard.requests)
        else:
            assert all((request.prefetch is None) == (prefetch is None) for request in shard.requests)
        for query, hits, request in zip(queries, results, shard.requests, strict=True):
            answer = shard.answer(request)
            by_numpy = {id: maxsim(query, values[int(id.removeprefix("doc-"))]) for id, _ in answer}
            for id, score in answer:
                assert score == pytest.approx(by_numpy[id], abs=1e-3 if codec == "float16" else 1e-5)
            if prefetch is None or options:  # else the engine's candidates come from int8
                assert [id for id, _ in answer][:5] == [hit.id for hit in hits]
            assert len(answer) == 6
    shard.shard.close()


def test_candidates_from_int8_are_those_from_floats(
    client: QdrantClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shard").mkdir()
    shard = Shard(tmp_path / "shard", client, monkeypatch)
    random = np.random.default_rng(0)
    topics = matrices(20, tokens=12, width=64)

    def about(topic: int) -> npt.NDArray[np.float32]:
        rows = topics[topic] + 0.1 * random.standard_normal((12, 64))
        return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)

    values = [about(n % 20) for n in range(400)]
    index = QdrantIndex(client, "docs", None)
    index.add_embeddings(names(400), ragged(values, 64))
    shard.shard.optimize()
    queries = [about(topic)[:6] for topic in range(20)]
    results = index.search_embeddings(ragged(queries, 64), k=10, candidates=40)
    found = 0
    for topic, (hits, request) in enumerate(zip(results, shard.requests, strict=True)):
        assert {int(hit.id.removeprefix("doc-")) % 20 for hit in hits} == {topic}
        answer = [id for id, _ in shard.answer(request)][:10]
        found += len(set(answer) & {hit.id for hit in hits})
    assert found >= 190  # of 200


def test_a_point_without_rows_has_no_vectors(
    client: QdrantClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shard").mkdir()
    shard = Shard(tmp_path / "shard", client, monkeypatch)
    index = QdrantIndex(client, "docs", None)
    values = matrices(3, tokens=[2, 0, 4])
    index.add_embeddings(names(3), ragged(values))
    index.search_embeddings(ragged(values[2:]))
    assert [id for id, _ in shard.answer(shard.requests[-1])] == ["doc-2", "doc-0"]
    assert len(shard.shard.retrieve([point_id("doc-1")], with_payload=False, with_vector=False)) == 1
    shard.shard.close()
