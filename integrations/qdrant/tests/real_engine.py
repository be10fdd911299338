"""A client of Qdrant whose points are in Qdrant's real engine, since local mode is a re-implementation in Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from qdrant_client import QdrantClient, models
from qdrant_client.http.models import QueryResponse

edge = pytest.importorskip("qdrant_edge")


class RealEngine(QdrantClient):
    """A client whose points are in a shard of the real engine; the collection's configuration is in local mode."""

    def __init__(self, folder: Path) -> None:
        super().__init__(":memory:")
        folder.mkdir()
        self.folder = folder
        self.shard: Any = None
        self.requests: list[models.QueryRequest] = []

    def create_collection(self, collection_name: str, **options: Any) -> bool:
        vectors = {name: vector_of(params) for name, params in options["vectors_config"].items()}
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
        return self.query_batch_points(collection_name, [request])[0]

    def query_batch_points(self, collection_name: str, requests: Any, **options: Any) -> list[QueryResponse]:
        self.requests += requests
        return [QueryResponse(points=self._answer(request)) for request in requests]

    def _answer(self, request: models.QueryRequest) -> list[models.ScoredPoint]:
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
        return [
            models.ScoredPoint(id=str(point.id), version=0, score=point.score, payload=point.payload) for point in found
        ]

    def retrieve(self, collection_name: str, ids: Any, **options: Any) -> list[models.Record]:
        names = options.get("with_vectors") or False
        found = self.shard.retrieve(list(ids), with_payload=True, with_vector=names)
        return [models.Record(id=str(point.id), payload=point.payload, vector=point.vector) for point in found]


def vector_of(params: models.VectorParams) -> Any:
    quantization: Any = None
    multi = None
    if params.multivector_config is not None:
        multi = edge.MultiVectorConfig(edge.MultiVectorComparator.MaxSim)
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
        distance=getattr(edge.Distance, params.distance.value),
        multivector_config=multi,
        on_disk=params.on_disk,
        datatype=getattr(edge.VectorStorageDatatype, datatype),
        quantization_config=quantization,
    )


def _value(value: Any) -> Any:
    return edge.SparseVector(value.indices, value.values) if isinstance(value, models.SparseVector) else value


def _query(request: Any) -> Any:
    if isinstance(request.query, models.RrfQuery):
        return edge.Fusion.Rrf(k=request.query.rrf.k)
    query = request.query.nearest if isinstance(request.query, models.NearestQuery) else request.query
    return edge.Query.Nearest(_value(query), using=request.using)


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
    """The filters of the tests: ids, one number, or one str."""
    if native is None:
        return None
    (alternatives,) = native.must  # type: ignore[misc]
    if isinstance(alternatives, models.HasIdCondition):
        return edge.Filter(must=[edge.HasIdCondition(set(alternatives.has_id))])
    (condition,) = alternatives.should  # type: ignore[union-attr]
    if condition.match is not None:
        return edge.Filter(must=[edge.FieldCondition(condition.key, match=edge.MatchValue(condition.match.value))])
    value = condition.range.gte
    return edge.Filter(must=[edge.FieldCondition(condition.key, range=edge.RangeFloat(gte=value, lte=value))])
