"""QdrantIndex: token matrices in a collection of Qdrant, one multivector for each document."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from qdrant_client import QdrantClient, models
from qdrant_client.local.qdrant_local import QdrantLocal

from millpond.errors import InvalidRequestError
from millpond.ingest.record import point_id
from millpond.ingest.sinks.index_manifest import IndexManifest, Prefetch
from millpond.ingest.sinks.late_interaction import CollectionIndex, Found, IndexQuery, IndexRow
from millpond.ingest.sinks.manifest import MANIFEST_KEY
from millpond.late_interaction.index.arguments import TokenEngine
from millpond.late_interaction.index.documents import Hit, IndexStats
from millpond.metadata import Scalar
from millpond_qdrant.collection import QdrantCollection
from millpond_qdrant.filters import to_filter

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


class QdrantIndex(QdrantCollection, CollectionIndex):
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

    float_bytes = 22  # of JSON: most have 17 digits and a sign
    codecs: ClassVar[tuple[str, ...]] = ("float32", "float16")
    prefetches: ClassVar[tuple[Prefetch | None, ...]] = ("muvera", "dense", None)
    # Of 99,000 passages the 1,000 best by MUVERA hold .974 of the exact ten, the 200 best .850.
    least_candidates = 1000

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
        client = location if isinstance(location, QdrantClient) else None
        CollectionIndex.__init__(
            self,
            None if isinstance(location, QdrantClient) else location,
            collection,
            engine,
            codec=codec,
            prefetch=prefetch,
            dimensions=dimensions,
            pool_factor=pool_factor,
            owned=client is None,
        )
        self._connect(client, timeout)
        try:
            self._opened()
        except BaseException:
            self.close()
            raise

    def stats(self) -> IndexStats:
        """The size of the index; ``bytes`` is computed from the number of rows, of a server's vectors."""
        self._check_open()
        manifest = self._manifest
        if manifest is None:
            return IndexStats(documents=0, tokens=0, dimensions=0, codec=self._codec, bytes=0)
        with self._request("a count"):
            documents = self._count()
            counts = self._client.facet(self._collection, TOKENS, limit=_MAX_FLOATS, exact=True).hits
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

    def check(self) -> list[str]:
        """What is wrong with the stored data: vectors that the collection or a point lacks, ids that do not fit."""
        self._check_open()
        manifest = self._manifest
        if manifest is None:
            return []
        with self._request("a check"):
            problems = self._check_vectors(manifest)
            for name in _vectors(manifest) if not problems else ():
                lacking = models.Filter(
                    must=[models.FieldCondition(key=TOKENS, range=models.Range(gt=0))],
                    must_not=[models.HasVectorCondition(has_vector=name)],
                )
                if count := self._client.count(self._collection, count_filter=lacking, exact=True).count:
                    problems.append(
                        f"collection {self._collection!r}: {count} points lack the vector {name!r}, and no search "
                        "finds them; add them again"
                    )
            for point in self._points(["id", TOKENS]):
                id = (point.payload or {}).get("id")
                if not isinstance(id, str) or point_id(id) != str(point.id):
                    problems.append(
                        f"collection {self._collection!r}: the point {point.id} was not written by an index (its "
                        f"payload's id is {id!r}); delete it in Qdrant"
                    )
        return problems

    # ------------------------------------------------------------------------------------------------- requests

    def _create(self, manifest: IndexManifest) -> None:
        self._client.create_collection(
            self._collection,
            vectors_config=_vectors(manifest),
            metadata={MANIFEST_KEY: manifest.to_dict()},
            on_disk_payload=True,
        )

    def _prepare(self, manifest: IndexManifest) -> None:
        self._open_log()
        if isinstance(getattr(self._client, "_client", None), QdrantLocal):
            return
        # A server needs it to add up the tokens for stats(); a creation that was interrupted may lack it.
        with self._request("a look at the payload's indexes"):
            if TOKENS not in self._client.get_collection(self._collection).payload_schema:
                index = models.IntegerIndexParams(type=models.IntegerIndexType.INTEGER, lookup=True, range=True)
                self._client.create_payload_index(self._collection, TOKENS, index)

    def _existing(self, points: Sequence[str]) -> int:
        return len(self._client.retrieve(self._collection, list(points), with_payload=False, with_vectors=False))

    def _write(self, rows: Sequence[IndexRow], manifest: IndexManifest) -> None:
        self._check_folder()
        points = [
            models.PointStruct(id=row.point, vector=_vector(row, manifest), payload=dict(row.fields)) for row in rows
        ]
        self._finished(self._client.upsert(self._collection, points, wait=True))

    def _remove(self, points: Sequence[str]) -> None:
        self._check_folder()
        self._finished(self._client.delete(self._collection, models.PointIdsList(points=list(points)), wait=True))

    def _delete_matching(self, conditions: Mapping[str, Sequence[Scalar]]) -> int:
        native = to_filter(conditions, "plain")
        if self._manifest is None or native is None:
            return 0
        with self._request("a delete by filter"):
            count = self._client.count(self._collection, count_filter=native, exact=True).count
            self._finished(self._client.delete(self._collection, models.FilterSelector(filter=native), wait=True))
        self._flush()
        return count

    def _count(self) -> int:
        return self._client.count(self._collection, exact=True).count

    def _listed(self) -> list[tuple[int, str]]:
        payloads = [point.payload or {} for point in self._points(["id", "added"])]
        return [(int(payload["added"]), str(payload["id"])) for payload in payloads]

    def _stored(self, id: str) -> tuple[str, Mapping[str, Any]] | None:
        if self._manifest is None:
            return None
        with self._request("a look for a document"):
            points = self._client.retrieve(self._collection, [point_id(id)], with_payload=["text", "metadata"])
        payload = points[0].payload if points else None
        return None if payload is None else (str(payload["text"]), dict(payload["metadata"]))

    def _query(self, queries: Sequence[IndexQuery], manifest: IndexManifest) -> list[list[Found]]:
        # One more than wanted shows whether the last hits are of equal score.
        limits = [query.k + 1 for query in queries]
        answers: list[list[Found]] = [[] for _ in queries]
        open_queries = list(range(len(queries)))
        while open_queries:
            requests = [_request_of(queries[index], manifest, limits[index]) for index in open_queries]
            responses = self._client.query_batch_points(self._collection, requests)
            cut = []
            for index, response in zip(open_queries, responses, strict=True):
                answers[index] = [_found(point) for point in response.points]
                scores = [point.score for point in response.points]
                if len(scores) == limits[index] and scores[queries[index].k - 1] == scores[-1]:
                    limits[index] *= 2
                    cut.append(index)
            open_queries = cut
        return answers

    def _points(self, payload: list[str]) -> list[models.Record]:
        """Every point, with these fields of the payload and without vectors."""
        points: list[models.Record] = []
        offset = None
        while True:
            page, offset = self._client.scroll(
                self._collection, limit=_PAGE, offset=offset, with_payload=payload, with_vectors=False
            )
            points += page
            if offset is None:
                return points

    def _check_vectors(self, manifest: IndexManifest) -> list[str]:
        stored = self._client.get_collection(self._collection).config.params.vectors
        named = stored if isinstance(stored, dict) else {}
        problems = []
        for name, wanted in _vectors(manifest).items():
            actual = named.get(name)
            multi = (
                None if actual is None or actual.multivector_config is None else actual.multivector_config.comparator
            )
            wanted_multi = wanted.multivector_config and wanted.multivector_config.comparator
            if actual is None or (actual.size, actual.distance, multi) != (wanted.size, wanted.distance, wanted_multi):
                problems.append(
                    f"collection {self._collection!r}: its vector {name!r} is not one of {wanted.size} columns, "
                    "compared by dot product, as its manifest says; build another collection"
                )
        return problems

    def _check_document(self, fields: Mapping[str, Any], matrix: npt.NDArray[np.float32], size: int) -> None:
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
    if query.candidates is not None:
        prefetch = models.Prefetch(
            query=query.prefetch.tolist(),
            using=manifest.prefetch,
            filter=native,
            limit=query.candidates,
        )
    return models.QueryRequest(
        query=query.matrix.tolist(),
        using=TOKENS,
        prefetch=prefetch,
        filter=native,
        limit=limit,
        with_payload=_PAYLOAD,
    )


def _found(point: models.ScoredPoint) -> Found:
    payload = point.payload or {}
    hit = Hit(
        id=str(payload["id"]),
        score=float(point.score),
        exact=True,
        text=str(payload["text"]),
        metadata=dict(payload["metadata"]),
    )
    return Found(hit, int(payload["added"]))
