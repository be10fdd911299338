"""Datatypes, quantization and hybrid search of a sink, stored and answered by Qdrant's real engine (qdrant-edge-py)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from qdrant_client import QdrantClient, models
from qdrant_client.http.models import QueryResponse
from tests.tiny.heads import write_splade

from millpond import Engine
from millpond.ingest import Record, ingest, point_id
from millpond_qdrant import QdrantSink

pytestmark = pytest.mark.contract

edge = pytest.importorskip("qdrant_edge")

WORDS = ["river", "zip", "bread", "socket", "heart", "search", "glacier", "violin", "memory", "tide", "mill", "copper"]
RECORDS = [
    Record(f"{one} {two} {three}", f"{one} of a {two} and {three}", {"n": n % 4})
    for n, (one, two, three) in enumerate((a, b, c) for a in WORDS for b in WORDS for c in WORDS[:6] if a < b)
]
QUESTIONS = [
    "boats on a river",
    "an orchestra",
    "where do files go?",
    "what conducts electricity?",
    "yeast",
    "the moon",
]


class RealEngine(QdrantClient):
    """A client whose points are in a shard of the real engine; the collection's configuration is in local mode."""

    def __init__(self, folder: Path) -> None:
        super().__init__(":memory:")
        folder.mkdir()
        self.folder = folder
        self.shard: Any = None

    def create_collection(self, collection_name: str, **options: Any) -> bool:
        vectors = {name: _vector(params) for name, params in options["vectors_config"].items()}
        sparse = {name: edge.EdgeSparseVectorParams() for name in options.get("sparse_vectors_config") or {}}
        optimizers = edge.EdgeOptimizersConfig(indexing_threshold=1, default_segment_number=1)
        config = edge.EdgeConfig(vectors=vectors, sparse_vectors=sparse or None, optimizers=optimizers)
        self.shard = edge.EdgeShard.create(str(self.folder), config)
        return super().create_collection(collection_name, **options)

    def upsert(self, collection_name: str, points: Any, **options: Any) -> models.UpdateResult:
        if isinstance(points, models.Batch):
            rows = [
                (id, {name: values[row] for name, values in points.vectors.items()}, points.payloads[row])  # type: ignore[union-attr, index]
                for row, id in enumerate(points.ids)
            ]
        else:
            rows = [(point.id, point.vector, point.payload) for point in points]
        self.shard.update(
            edge.UpdateOperation.upsert_points(
                [
                    edge.Point(id=id, vector={name: _value(value) for name, value in vectors.items()}, payload=payload)
                    for id, vectors, payload in rows
                ]
            )
        )
        return models.UpdateResult(operation_id=0, status=models.UpdateStatus.COMPLETED)

    def query_points(self, collection_name: str, **options: Any) -> QueryResponse:
        request = models.QueryRequest(
            prefetch=options["prefetch"],
            query=options["query"],
            using=options["using"],
            filter=options["query_filter"],
            params=options["search_params"],
            limit=options["limit"],
        )
        found = self.shard.query(
            edge.QueryRequest(
                limit=request.limit,
                query=_query(request),
                prefetches=[_prefetch(each) for each in _listed(request.prefetch)],
                filter=_filter(request.filter),
                params=_params(request.params),
                with_payload=True,
            )
        )
        points = [
            models.ScoredPoint(id=str(point.id), version=0, score=point.score, payload=point.payload) for point in found
        ]
        return QueryResponse(points=points)

    def retrieve(self, collection_name: str, ids: Any, **options: Any) -> list[models.Record]:
        names = options["with_vectors"] or False
        found = self.shard.retrieve(list(ids), with_payload=True, with_vector=names)
        return [models.Record(id=str(point.id), payload=point.payload, vector=point.vector) for point in found]


def _vector(params: models.VectorParams) -> Any:
    quantization: Any = None
    match params.quantization_config:
        case models.ScalarQuantization(scalar=scalar):
            quantization = edge.ScalarQuantizationConfig(
                edge.ScalarType.Int8, quantile=scalar.quantile, always_ram=True
            )
        case models.ProductQuantization():
            quantization = edge.ProductQuantizationConfig(edge.CompressionRatio.X16, always_ram=True)
        case models.BinaryQuantization():
            quantization = edge.BinaryQuantizationConfig(always_ram=True)
    names = {"float32": "Float32", "float16": "Float16", "uint8": "Uint8"}
    datatype = names[params.datatype.value if params.datatype else "float32"]
    return edge.EdgeVectorParams(
        size=params.size,
        distance={"Cosine": edge.Distance.Cosine, "Euclid": edge.Distance.Euclid}[params.distance.value],
        datatype=getattr(edge.VectorStorageDatatype, datatype),
        quantization_config=quantization,
    )


def _value(value: Any) -> Any:
    return edge.SparseVector(value.indices, value.values) if isinstance(value, models.SparseVector) else value


def _query(request: Any) -> Any:
    if isinstance(request.query, models.RrfQuery):
        return edge.Fusion.Rrf(k=request.query.rrf.k)
    return edge.Query.Nearest(_value(request.query), using=request.using)


def _prefetch(prefetch: models.Prefetch) -> Any:
    return edge.Prefetch(
        limit=prefetch.limit,
        query=_query(prefetch),
        prefetches=[_prefetch(each) for each in _listed(prefetch.prefetch)],
        params=_params(prefetch.params),
        filter=_filter(prefetch.filter),
    )


def _listed(prefetch: Any) -> list[models.Prefetch]:
    return [] if prefetch is None else prefetch if isinstance(prefetch, list) else [prefetch]


def _params(params: models.SearchParams | None) -> Any:
    if params is None:
        return None
    quantization: Any = None
    if (asked := params.quantization) is not None:
        quantization = edge.QuantizationSearchParams(
            ignore=bool(asked.ignore), rescore=asked.rescore, oversampling=asked.oversampling
        )
    return edge.SearchParams(hnsw_ef=params.hnsw_ef, quantization=quantization)


def _filter(native: models.Filter | None) -> Any:
    """The filters of this file: one number, or one str."""
    if native is None:
        return None
    (alternatives,) = native.must  # type: ignore[misc]
    (condition,) = alternatives.should  # type: ignore[union-attr]
    if condition.match is not None:
        return edge.Filter(must=[edge.FieldCondition(condition.key, match=edge.MatchValue(condition.match.value))])
    value = condition.range.gte
    return edge.Filter(must=[edge.FieldCondition(condition.key, range=edge.RangeFloat(gte=value, lte=value))])


@pytest.fixture
def client(tmp_path: Path) -> Iterator[RealEngine]:
    client = RealEngine(tmp_path / "shard")
    yield client
    if client.shard is not None:
        client.shard.close()


@pytest.fixture(scope="module")
def exact(engine: Engine) -> npt.NDArray[np.float32]:
    """Cosines ``[questions, records]``."""
    documents = engine.embed([record.text for record in RECORDS], role="document", normalize=True).embeddings
    questions = engine.embed(QUESTIONS, role="query", normalize=True).embeddings
    return np.asarray(questions @ documents.T)


def recall(engine: Engine, sink: QdrantSink, exact: npt.NDArray[np.float32], **options: Any) -> float:
    """Of the ten nearest, those found."""
    found = 0
    for question, scores in zip(QUESTIONS, exact, strict=True):
        ids = {hit.id for hit in sink.search(engine, question, k=10, **options)}
        found += len(ids & {RECORDS[row].id for row in np.argsort(-scores)[:10]})
    return found / (10 * len(QUESTIONS))


def test_a_coarse_to_fine_search_has_the_hits_of_local_mode(engine: Engine, client: RealEngine) -> None:
    sinks = [QdrantSink(place, "docs", dimensions=[16, 384]) for place in (client, ":memory:")]
    for sink in sinks:
        ingest(RECORDS, engine=engine, sink=sink, show_progress=False)
    differing = 0
    for question in QUESTIONS:
        real, local = (sink.search(engine, question, k=8, candidates=15) for sink in sinks)
        assert [hit.score for hit in real] == pytest.approx([hit.score for hit in local], abs=1e-5)
        assert {hit.id for hit in real[:7]} <= {hit.id for hit in local}  # of equal scores the last may be another
        straight = sinks[0].search(engine, question, k=8, coarse_to_fine=False)
        differing += [hit.id for hit in straight] != [hit.id for hit in real]
    assert differing  # otherwise the funnel could not be told from a plain search


# Not a quote or a backslash, which the sink refuses.
KEYS = [
    "",
    " ",
    "a b",
    "a.b",
    "a[0]",
    "[]",
    "1",
    "-1",
    "1.5",
    "a-b",
    "a/b",
    "*",
    "$x",
    "é",
    "漢字",
    "😀",
    "a\nb",
    "a'b",
]


@pytest.mark.parametrize("form", ["plain", "langchain", "llama_index"])
def test_the_path_of_every_key_is_that_key(engine: Engine, client: RealEngine, form: str) -> None:
    sink = QdrantSink(client, "docs", dimensions=[384], fields=form)
    rows = [Record(str(n), "text", {key: "its value"}) for n, key in enumerate(KEYS)]
    ingest(rows, engine=engine, sink=sink, show_progress=False)
    for n, key in enumerate(KEYS):
        assert [hit.id for hit in sink.search(engine, "text", k=99, filter={key: "its value"})] == [str(n)]


@pytest.mark.parametrize(
    ("datatype", "tolerance", "least"), [("float32", 1e-5, 1.0), ("float16", 1e-3, 0.98), ("uint8", 1e-2, 0.9)]
)
def test_scores_and_vectors_of_each_datatype(
    engine: Engine, client: RealEngine, exact: npt.NDArray[np.float32], datatype: str, tolerance: float, least: float
) -> None:
    sink = QdrantSink(client, "docs", dimensions=[64, 384], datatype=datatype)
    ingest(RECORDS, engine=engine, sink=sink, show_progress=False)
    assert client.shard.count(edge.CountRequest()) == len(RECORDS)
    reading = QdrantSink(client, "docs")  # knows the datatype from the collection
    ids = [record.id for record in RECORDS]
    errors = []
    for question, scores in zip(QUESTIONS, exact, strict=True):
        for coarse_to_fine in (True, False):
            hits = reading.search(engine, question, k=10, coarse_to_fine=coarse_to_fine)
            assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
            errors += [abs(hit.score - scores[ids.index(hit.id)]) for hit in hits]
    assert max(errors) < tolerance
    assert (max(errors) > 1e-6) == (datatype != "float32")  # else the engine did not store that datatype
    assert recall(engine, reading, exact, coarse_to_fine=False) >= least
    texts = [record.text for record in RECORDS[:5]]
    wanted = engine.embed(texts, role="document", dimensions=64, normalize=True).embeddings
    rows = reading.fetch([point_id(record.id) for record in RECORDS[:5]], widths=[64])
    stored = np.stack([rows[point_id(record.id)].vectors[64] for record in RECORDS[:5]])
    assert np.abs(stored - wanted).max() < {"float32": 1e-5, "float16": 1e-3, "uint8": 6e-3}[datatype]
    assert np.linalg.norm(stored, axis=1) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize(("quantization", "least"), [("scalar", 0.98), ("product", 0.9), ("binary", 0.7)])
def test_quantized_searches_are_rescored(
    engine: Engine, client: RealEngine, exact: npt.NDArray[np.float32], quantization: str, least: float
) -> None:
    sink = QdrantSink(client, "docs", dimensions=[64, 384], index_quantization=quantization)
    ingest(RECORDS, engine=engine, sink=sink, show_progress=False)
    client.shard.optimize()
    ids = [record.id for record in RECORDS]
    raw = QdrantSink(client, "docs", rescore=False)
    over = QdrantSink(client, "docs")
    hits = {sink: sink.search(engine, QUESTIONS[0], k=10, coarse_to_fine=False) for sink in (raw, over)}
    errors = {of: [abs(hit.score - exact[0][ids.index(hit.id)]) for hit in found] for of, found in hits.items()}
    assert max(errors[over]) < 1e-5 and max(errors[raw]) > 1e-4  # else nothing is quantized
    assert recall(engine, over, exact, coarse_to_fine=False) >= least
    if quantization != "scalar":  # of which the copy alone finds nearly all
        assert (
            recall(engine, over, exact, coarse_to_fine=False) > recall(engine, raw, exact, coarse_to_fine=False) + 0.05
        )
    # The second stage of a funnel scores every candidate by the vectors themselves.
    funnel = QdrantSink(client, "docs").search(engine, QUESTIONS[0], k=10, candidates=200)
    assert [hit.score for hit in funnel] == pytest.approx([exact[0][ids.index(hit.id)] for hit in funnel], abs=1e-5)


@pytest.fixture(scope="module")
def sparse_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = write_splade(tmp_path_factory.mktemp("sparse") / "splade")
    with Engine(str(folder), dtype="float32", device="cpu") as engine:
        yield engine


def fused(*rankings: list[str]) -> dict[str, float]:
    scores: dict[str, float] = {}
    for ranking in rankings:
        for rank, id in enumerate(ranking, start=1):
            scores[id] = scores.get(id, 0.0) + 1 / (60 + rank)
    return scores


@pytest.mark.parametrize("number", [None, 2])
def test_hybrid_searches_fuse_the_two_rankings(
    engine: Engine,
    sparse_engine: Engine,
    client: RealEngine,
    exact: npt.NDArray[np.float32],
    number: int | None,
) -> None:
    sink = QdrantSink(client, "docs", dimensions=[384], hybrid=True)
    ingest(RECORDS, engine=engine, sink=sink, sparse_engine=sparse_engine, show_progress=False)
    documents = sparse_engine.sparse_embed([record.text for record in RECORDS], role="document").embeddings
    kept = [row for row, record in enumerate(RECORDS) if number is None or record.metadata["n"] == number]
    condition = None if number is None else {"n": number}
    for question, scores in zip(QUESTIONS, exact, strict=True):
        (query,) = sparse_engine.sparse_embed([question], role="query").embeddings
        dots = {row: sum(query[t] * w for t, w in documents[row].items() if t in query) for row in kept}
        dense = [RECORDS[row].id for row in sorted(kept, key=lambda row: -scores[row])[:50]]
        sparse = [RECORDS[row].id for row in sorted(dots, key=lambda row: -dots[row])[:50] if dots[row]]
        wanted = fused(dense, sparse)
        hits = sink.search(
            engine, question, k=10, candidates=50, filter=condition, hybrid=True, sparse_engine=sparse_engine
        )
        best = sorted(wanted.values(), reverse=True)[:10]
        assert [hit.score for hit in hits] == pytest.approx(best, abs=2e-4)  # two documents may be equally similar
        assert all(hit.score == pytest.approx(wanted[hit.id], abs=4e-4) for hit in hits)
        assert sparse and dense[:10] != [hit.id for hit in hits]
