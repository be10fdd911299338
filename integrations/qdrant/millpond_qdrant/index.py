"""QdrantIndex: token matrices in a collection of Qdrant, one multivector for each document."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from qdrant_client import QdrantClient, models

from millpond.errors import InvalidRequestError
from millpond.ingest.record import point_id
from millpond.ingest.sinks.index_manifest import IndexManifest
from millpond.ingest.sinks.late_interaction import CollectionIndex, Found, IndexDriver, IndexQuery, IndexRow
from millpond.ingest.sinks.manifest import MANIFEST_KEY
from millpond.late_interaction.index.arguments import TokenEngine
from millpond.late_interaction.index.documents import Hit, IndexStats
from millpond.support.filters import Condition, matches_filter
from millpond_qdrant.connection import QdrantConnection
from millpond_qdrant.payload import is_exact, to_filter

Codec = Literal["float32", "float16"]

TOKENS = "tokens"
"""The name of the multivector, and of the payload's number of its rows."""

# Of a multivector. The server refuses more: it stores one in a single block of 4 MiB.
_MAX_FLOATS = 1 << 20
# The server's limit, without 1 MiB for what is around a point.
_MAX_REQUEST = 31 << 20
_PAYLOAD = ["id", "text", "metadata", "added"]
_PAGE = 1000  # points of a scroll
_BYTES = {"float32": 4, "float16": 2}


class QdrantIndex(CollectionIndex):
    """A late-interaction index in one collection of Qdrant (1.16 or newer), scored by Qdrant itself.

    A document is one point: its token rows are a multivector compared by MaxSim, without a graph (HNSW), which would be
    a graph of tokens. A search first finds candidates by a single vector, then Qdrant scores those, in one request.
    Filters and ids hold in both stages. A document's point id is :func:`millpond.ingest.point_id` of the caller's id,
    and its payload is the plain one of :class:`~millpond_qdrant.QdrantSink`.

    The first ``add`` creates the collection; its metadata holds the model's fingerprint, width, pooling and encodings.
    A call of ``add`` is several requests, so a reader may see a part of it. A point holds at most 1,048,576 floats:
    8,192 tokens at 128 columns. Indexes and sinks of a process share a folder, and any thread may use them.

    Args:
        location: ``":memory:"``, an http(s) URL, a folder for a database inside this process, or a ``QdrantClient``
            (which :meth:`close` leaves open). A URL's key comes from ``QDRANT_API_KEY``.
        collection: Name of the collection.
        engine: An engine that serves ``token_embed``; ``None`` for an index that is given embeddings only.
        prefetch: The vector by which candidates are found: ``"muvera"``, encodings of 2,560 dimensions whose dot
            product approximates MaxSim; ``"dense"``, the mean of the token rows; ``None``, every document is scored.
        codec: How a server stores token rows. Local mode keeps float32.
        dimensions: Columns to keep of every row; ``None`` keeps all, or those that the collection has.
        pool_factor: Mean tokens of a document that become one row; ``None`` is the collection's factor, and 1 for a
            new one.
        timeout: Seconds a server has for a whole request, from connecting to the last byte of its answer.

    Raises:
        TypeError: ``engine`` is not an engine.
        InvalidRequestError: A location, name or option that is not valid, or not that of the collection.
        FingerprintMismatchError: Another model built the collection, or it is no index.
        SinkError: The database does not answer, refuses, or its folder is in use by another process.
    """

    def __init__(
        self,
        location: str | os.PathLike[str] | QdrantClient,
        collection: str,
        engine: TokenEngine | None,
        *,
        prefetch: Literal["muvera", "dense"] | None = "muvera",
        codec: Codec = "float16",
        dimensions: int | None = None,
        pool_factor: int | None = None,
        timeout: float = 60,
    ) -> None:
        driver = QdrantIndexDriver(QdrantConnection(location, collection, kind="index", timeout=timeout))
        super().__init__(driver, engine, codec=codec, prefetch=prefetch, dimensions=dimensions, pool_factor=pool_factor)


class QdrantIndexDriver(IndexDriver):
    """A point for each document, with its token rows as a multivector."""

    float_bytes = 22  # of JSON: most have 17 digits and a sign
    codecs = ("float32", "float16")
    prefetches = ("muvera", "dense", None)
    # Of 99,000 passages the 1,000 best by MUVERA hold .974 of the exact ten, the 200 best .850.
    least_candidates = 1000

    def __init__(self, connection: QdrantConnection) -> None:
        self.connection: QdrantConnection = connection
        self._name = connection.collection

    def stats(self, manifest: IndexManifest) -> IndexStats:
        """The size of the index, of a server's vectors."""
        documents = self.count()
        counts = self.connection.client.facet(self._name, TOKENS, limit=_MAX_FLOATS, exact=True).hits
        tokens = sum(int(hit.value) * hit.count for hit in counts)
        width = manifest.settings.width
        rows = tokens * width * _BYTES[manifest.codec]
        return IndexStats(
            documents=documents,
            tokens=tokens,
            dimensions=width if documents else 0,
            codec=manifest.codec,
            bytes=rows + documents * manifest.prefetch_width * 3,  # float16 and int8
            details={"prefetch": manifest.prefetch, "prefetch_width": manifest.prefetch_width},
        )

    def check(self, manifest: IndexManifest) -> list[str]:
        """Vectors that the collection or a point lacks, ids that do not fit."""
        problems = self._check_vectors(manifest)
        for name in _vectors(manifest) if not problems else ():
            lacking = models.Filter(
                must=[models.FieldCondition(key=TOKENS, range=models.Range(gt=0))],
                must_not=[models.HasVectorCondition(has_vector=name)],
            )
            if count := self.connection.count(lacking):
                problems.append(
                    f"collection {self._name!r}: {count} points lack the vector {name!r}, and no search finds them; "
                    "add them again"
                )
        for point in self._points(["id", TOKENS]):
            id = (point.payload or {}).get("id")
            if not isinstance(id, str) or point_id(id) != str(point.id):
                problems.append(
                    f"collection {self._name!r}: the point {point.id} was not written by an index (its payload's id is "
                    f"{id!r}); delete it in Qdrant"
                )
        return problems

    def create(self, manifest: IndexManifest) -> None:
        """Create the collection."""
        self.connection.client.create_collection(
            self._name,
            vectors_config=_vectors(manifest),
            metadata={MANIFEST_KEY: manifest.to_dict()},
            on_disk_payload=True,
        )

    def prepare(self, manifest: IndexManifest) -> None:
        """Index the number of tokens, which a server needs to add them up; an interrupted creation may lack it."""
        self.connection.open_log()
        info = self.connection.info
        if not self.connection.local and info is not None and TOKENS not in info.payload_schema:
            index = models.IntegerIndexParams(type=models.IntegerIndexType.INTEGER, lookup=True, range=True)
            client = self.connection.client
            self.connection.request("an index", lambda: client.create_payload_index(self._name, TOKENS, index))

    def flush(self) -> None:
        """Make acknowledged changes durable."""
        self.connection.flush()

    def existing(self, points: Sequence[str]) -> int:
        """How many points have one of these ids."""
        return len(self.connection.client.retrieve(self._name, list(points), with_payload=False, with_vectors=False))

    def write(self, rows: Sequence[IndexRow], manifest: IndexManifest) -> None:
        """Store points."""
        self.connection.upsert(
            [models.PointStruct(id=row.point, vector=_vector(row, manifest), payload=dict(row.fields)) for row in rows]
        )

    def remove(self, points: Sequence[str]) -> None:
        """Delete points by id."""
        self.connection.delete(list(points))

    def delete_matching(self, conditions: Mapping[str, Condition]) -> int:
        """Delete points by metadata."""
        native = to_filter(conditions, "plain")
        if native is None:
            return 0
        if not is_exact(conditions):
            points = self._matching(conditions)
            if points:
                self.connection.delete(points)
            return len(points)
        count = self.connection.count(native)
        self.connection.delete(native)
        return count

    def count(self) -> int:
        """How many points there are."""
        return self.connection.count()

    def listed(self) -> list[tuple[int, str]]:
        """``added`` and ``id`` of every point."""
        payloads = [point.payload or {} for point in self._points(["id", "added"])]
        return [(int(payload["added"]), str(payload["id"])) for payload in payloads]

    def stored(self, point: str) -> tuple[str, Mapping[str, Any]] | None:
        """Text and metadata of a point."""
        points = self.connection.client.retrieve(self._name, [point], with_payload=["text", "metadata"])
        payload = points[0].payload if points else None
        return None if payload is None else (str(payload["text"]), dict(payload["metadata"]))

    def query(self, queries: Sequence[IndexQuery], manifest: IndexManifest) -> list[list[Found]]:
        """The best documents of each query."""
        if not is_exact(queries[0].conditions):  # all of a call have the same filter
            points, among = self._matching(queries[0].conditions), queries[0].points
            points = points if among is None else list(set(points) & set(among))
            queries = [replace(query, points=points) for query in queries]
        # One more than wanted shows whether the last hits are of equal score.
        limits = [query.k + 1 for query in queries]
        answers: list[list[Found]] = [[] for _ in queries]
        open_queries = list(range(len(queries)))
        while open_queries:
            requests = [_request_of(queries[index], manifest, limits[index]) for index in open_queries]
            responses = self.connection.client.query_batch_points(self._name, requests)
            cut = []
            for index, response in zip(open_queries, responses, strict=True):
                answers[index] = [_found(point) for point in response.points]
                scores = [point.score for point in response.points]
                if len(scores) == limits[index] and scores[queries[index].k - 1] == scores[-1]:
                    limits[index] *= 2
                    cut.append(index)
            open_queries = cut
        return answers

    def _matching(self, conditions: Mapping[str, Condition]) -> list[str]:
        """The ids of the points that meet conditions which a filter of Qdrant's approximates."""
        points = self._points(["metadata"], to_filter(conditions, "plain"))
        return [str(point.id) for point in points if matches_filter((point.payload or {})["metadata"], conditions)]

    def _points(self, payload: list[str], native: models.Filter | None = None) -> list[models.Record]:
        """Every point that a filter matches, with these fields of the payload and without vectors."""
        points: list[models.Record] = []
        offset = None
        while True:
            page, offset = self.connection.client.scroll(
                self._name, native, limit=_PAGE, offset=offset, with_payload=payload, with_vectors=False
            )
            points += page
            if offset is None:
                return points

    def _check_vectors(self, manifest: IndexManifest) -> list[str]:
        stored = self.connection.client.get_collection(self._name).config.params.vectors
        named = stored if isinstance(stored, dict) else {}

        def kind(vector: models.VectorParams | None) -> object:
            multi = vector and vector.multivector_config
            return vector and (vector.size, vector.distance, multi and multi.comparator)

        return [
            f"collection {self._name!r}: its vector {name!r} is not one of {wanted.size} columns, compared by dot "
            "product, as its manifest says; build another collection"
            for name, wanted in _vectors(manifest).items()
            if kind(named.get(name)) != kind(wanted)
        ]

    def check_document(self, fields: Mapping[str, Any], matrix: npt.NDArray[np.float32], size: int) -> None:
        """Raise InvalidRequestError for a document that no point can hold."""
        id = fields["id"]
        if matrix.size > _MAX_FLOATS:
            tokens, width = matrix.shape
            raise InvalidRequestError(
                f"document {id!r} has {tokens} token rows of {width} columns, {tokens * width} floats; Qdrant "
                f"stores at most {_MAX_FLOATS} of a document, {_MAX_FLOATS // width} rows; split the text, or build "
                "the index with fewer dimensions or a larger pool_factor"
            )
        if size > _MAX_REQUEST:
            raise InvalidRequestError(
                f"document {id!r} takes {size} bytes in a request, and Qdrant at most {_MAX_REQUEST}; split the "
                "text, or store less metadata"
            )


def _vectors(manifest: IndexManifest) -> dict[str, models.VectorParams]:
    """The vectors of a collection."""
    vectors = {
        TOKENS: models.VectorParams(
            size=manifest.settings.width,
            distance=models.Distance.DOT,
            multivector_config=models.MultiVectorConfig(comparator=models.MultiVectorComparator.MAX_SIM),
            hnsw_config=models.HnswConfigDiff(m=0),
            datatype=models.Datatype(manifest.codec),
            on_disk=True,
        )
    }
    if manifest.prefetch is not None:
        vectors[manifest.prefetch] = models.VectorParams(
            size=manifest.prefetch_width,
            distance=models.Distance.DOT,
            datatype=models.Datatype.FLOAT16,
            on_disk=True,
            quantization_config=models.ScalarQuantization(
                scalar=models.ScalarQuantizationConfig(type=models.ScalarType.INT8, always_ram=True)
            ),
        )
    return vectors


def _vector(row: IndexRow, manifest: IndexManifest) -> dict[str, Any]:
    """The vectors of a point: none without tokens, so that no search finds it."""
    if not len(row.matrix):
        return {}
    vectors = {TOKENS: row.matrix.tolist()}
    return vectors if manifest.prefetch is None else {**vectors, manifest.prefetch: row.prefetch.tolist()}


def _request_of(query: IndexQuery, manifest: IndexManifest, limit: int) -> models.QueryRequest:
    native = to_filter(query.conditions, "plain")
    if query.points is not None:
        among = models.HasIdCondition(has_id=list(query.points))
        native = models.Filter(must=[among] if native is None else [among, native])
    prefetch = None
    if (most := query.candidates) is not None:
        near = query.prefetch.tolist()
        prefetch = models.Prefetch(query=near, using=manifest.prefetch, filter=native, limit=most)
    matrix = query.matrix.tolist()
    return models.QueryRequest(
        query=matrix, using=TOKENS, prefetch=prefetch, filter=native, limit=limit, with_payload=_PAYLOAD
    )


def _found(point: models.ScoredPoint) -> Found:
    payload = point.payload or {}
    id, text, metadata = str(payload["id"]), str(payload["text"]), dict(payload["metadata"])
    return Found(Hit(id=id, score=float(point.score), exact=True, text=text, metadata=metadata), int(payload["added"]))
