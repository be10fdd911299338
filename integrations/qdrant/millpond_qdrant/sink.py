"""QdrantSink: a collection of Qdrant, with one named vector for each Matryoshka width."""

from __future__ import annotations

import logging
import math
import os
import re
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np
from qdrant_client import QdrantClient, models
from qdrant_client.http.models import QueryResponse

from millpond.errors import InvalidRequestError
from millpond.ingest.record import point_id
from millpond.ingest.sinks.batch import WriteBatch
from millpond.ingest.sinks.collection import CollectionSink
from millpond.ingest.sinks.manifest import MANIFEST_KEY, CollectionManifest
from millpond.ingest.sinks.payload import FieldLayout
from millpond.ingest.sinks.protocol import StoredRow, vector_name
from millpond.ingest.sinks.search import Hit, SearchPlan
from millpond_qdrant.alias import aliased, point_alias
from millpond_qdrant.collection import QdrantCollection
from millpond_qdrant.filters import has_condition, to_filter
from millpond_qdrant.local import is_folder, is_local, stored_points
from millpond_qdrant.payload_indexes import check_indexes, missing_indexes
from millpond_qdrant.points import IDENTITY, identity_of, payload_of, record_fields
from millpond_qdrant.probe import PartialPoints, Probe
from millpond_qdrant.queries import SPARSE, fused_query_of, queries_of, sparse_vector
from millpond_qdrant.vector_storage import StoredVectors, VectorStorage

logger = logging.getLogger(__name__)

_NUMBER = re.compile(r"0|[1-9][0-9]{0,19}")
# Points of one page of a scan.
_SCANNED = 1000
# Points beyond which local mode, which compares the question with each of them in Python, is slow.
_MANY_POINTS = 20_000
# Seconds after which a search reads the manifest again, since an alias may name another collection by then.
_TRUSTED = 60.0


class QdrantSink(QdrantCollection, CollectionSink[models.Filter]):
    """Writes to one collection of Qdrant, and searches it.

    The first write creates the collection: a vector ``d{width}`` for every width, cosine distance, and the model's
    fingerprint in the collection's metadata (Qdrant 1.16 or newer). A search is one request. It finds the points that a
    framework wrote with one of the vectors, too; a sink that has searched a server may miss new ones for up to a
    minute. The sinks of a process share a folder, and any thread may use them.

    Args:
        location: ``":memory:"``, an http(s) URL, a folder for a database inside this process, or a ``QdrantClient``
            (which :meth:`close` leaves open). A URL's key comes from ``QDRANT_API_KEY``. A folder whose name looks like
            the address of a server begins with ``./``.
        collection: Name of the collection.
        dimensions: The widths to store and search; by default the width that ``embed`` returns (full, for nearly every
            model). A search without them uses every width that the collection has.
        payload: ``plain`` (``id``, ``text``, ``metadata``), ``langchain`` (``page_content``, ``metadata``, and ``id``)
            or ``llama_index`` (the fields of LlamaIndex's store). Each also has a ``content_hash``.
        timeout: Seconds a server has for a whole request, from connecting to the last byte of its answer.
        hybrid: Store sparse vectors too, named ``sparse``, and search by both.
        datatype: ``float32``, ``float16`` or ``uint8`` of the stored vectors (a server's). ``None`` is the
            collection's, and float32 in a new one. uint8 is for ``plain`` payloads: vectors are scaled to 0..255 and
            compared by Euclidean distance, of which scores are turned into cosine.
        index_quantization: ``scalar`` (a byte for each number), ``product`` (a byte for four) or ``binary`` (a bit for
            each): a copy in memory by which a server searches. ``None`` is the collection's, and none in a new one.
        rescore: Whether the hits of a quantized search are scored by the vectors themselves.
        oversampling: How many times ``k`` hits are scored then: by default 2 of scalar, 4 of product and 8 of binary
            quantization.
        on_disk: Whether a new collection's vectors are read from the disk.
        hnsw: ``m`` and ``ef_construct`` of a new collection's graph, ``ef`` of searches.
        indexes: Metadata keys to index on a server, with the type: ``keyword``, ``integer``, ``float``, ``bool``,
            ``datetime``, ``uuid``, ``text`` or ``geo``.
        prefer_grpc: Whether to talk gRPC to a server: less than a quarter of the bytes.
        grpc_port: The server's port for gRPC.
        batch: Most points of one request.

    Raises:
        InvalidRequestError: A location, name or option that is not valid.
        SinkError: The folder is in use by another process, damaged, or cannot be created.
    """

    hybrids: ClassVar[bool] = True

    def __init__(
        self,
        location: str | os.PathLike[str] | QdrantClient,
        collection: str,
        *,
        dimensions: Sequence[int] | None = None,
        fields: str = "plain",
        timeout: float = 60,
        hybrid: bool = False,
        datatype: str | None = None,
        index_quantization: str | None = None,
        rescore: bool = True,
        oversampling: float | None = None,
        on_disk: bool | None = None,
        hnsw: Mapping[str, int] | None = None,
        indexes: Mapping[str, str] | None = None,
        prefer_grpc: bool = False,
        grpc_port: int = 6334,
        batch: int | None = None,
    ) -> None:
        client = location if isinstance(location, QdrantClient) else None
        path = None if isinstance(location, QdrantClient) else location
        super().__init__(path, collection, dimensions=dimensions, fields=fields, owned=client is None, hybrid=hybrid)
        self._storage = VectorStorage.of(
            fields=self._fields,
            datatype=datatype,
            index_quantization=index_quantization,
            rescore=rescore,
            oversampling=oversampling,
            on_disk=on_disk,
            hnsw=hnsw,
        )
        self._indexes = check_indexes(indexes, self._fields)
        if batch is not None:
            if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
                raise InvalidRequestError(f"batch={batch!r} must be an int from 1: the most points of one request")
            self.max_rows = batch  # type: ignore[misc]
        self._connect(client, timeout, prefer_grpc=prefer_grpc, grpc_port=grpc_port)
        self._partial_points = PartialPoints()
        self._stored_vectors = StoredVectors()
        self._schema: Mapping[str, models.PayloadIndexInfo] = {}  # the payload's indexes
        self._read = -math.inf  # when the manifest was, on the clock's seconds
        self._warned: set[str] = set()

    @property
    def embedded(self) -> bool:
        """Whether the database is a folder that this process writes."""
        return is_folder(self._client)

    def swap_alias(self, alias: str, *, delete_former: bool = False) -> str | None:
        """Let an alias name this collection, in one step: readers by that name see the former one, or this.

        Sinks that read by the alias follow, and check the model again within a minute.

        Args:
            alias: The name. Sinks take it as they take a collection's.
            delete_former: Delete the collection that it named.

        Returns:
            The collection that it named.

        Raises:
            InvalidRequestError: No such collection; a name that is not valid, or a collection's; or a former collection
                that is not millpond's or has more aliases, and is to be deleted.
            FingerprintMismatchError: millpond did not create the collection.
            SinkError: The database does not answer, or refuses.
        """
        if not isinstance(alias, str) or not self.name_pattern.fullmatch(alias):
            raise InvalidRequestError(f"alias={alias!r} is no name for {self.database}; use {self.name_rule}")
        self._opened()
        with self._request("an alias swap"):
            own = aliased(self._client, self._collection)
            if own is not None:
                raise InvalidRequestError(
                    f"{self._collection!r} is an alias itself, of {own!r}; open the sink of that collection"
                )
            former = aliased(self._client, alias)
            if former is None and self._client.collection_exists(alias):
                raise InvalidRequestError(
                    f"alias={alias!r} is the name of a collection, which no alias can take; choose another, or delete "
                    "that collection first"
                )
            doomed = former if delete_former and former != self._collection else None
            if doomed is not None:
                self._check_deletable(doomed, alias)
            point_alias(self._client, alias, self._collection)
            if doomed is not None:
                self._client.delete_collection(doomed)
        return former

    # ----------------------------------------------------------------------------------------------------------

    def _check_deletable(self, collection: str, alias: str) -> None:
        """Raise InvalidRequestError for a collection that is somebody else's, or that more aliases name."""
        keep = "pass delete_former=False to keep it"
        metadata = self._client.get_collection(collection).config.metadata or {}
        if MANIFEST_KEY not in metadata:
            raise InvalidRequestError(f"alias={alias!r} names {collection!r}, which was not made by millpond; {keep}")
        names = {known.alias_name for known in self._client.get_collection_aliases(collection).aliases}
        if others := sorted(names - {alias}):
            raise InvalidRequestError(f"collection {collection!r} has the aliases {others} too; {keep}")

    def _create(self, manifest: CollectionManifest) -> None:
        sparse = None
        if manifest.sparse is not None:
            index = models.SparseIndexParams(on_disk=self._storage.on_disk)
            sparse = {SPARSE: models.SparseVectorParams(index=index)}
        self._client.create_collection(
            self._collection,
            vectors_config={vector_name(width): self._storage.params(width) for width in manifest.dimensions},
            sparse_vectors_config=sparse,
            metadata={MANIFEST_KEY: manifest.to_dict()},
        )

    def _read_manifest(self) -> object:
        info = self._client.get_collection(self._collection)
        self._stored_vectors = StoredVectors.of(info.config)
        self._schema = info.payload_schema or {}
        self._read = time.monotonic()
        return (info.config.metadata or {}).get(MANIFEST_KEY)

    def _prepare(self, manifest: CollectionManifest) -> None:
        self._check_folder()
        self._storage.check_stored(self._stored_vectors, collection=self._collection)
        self._open_log()
        if not is_local(self._client):
            for path, kind in missing_indexes(self._indexes, self._schema, collection=self._collection).items():
                with self._request(f"an index of {path}"):
                    self._finished(self._client.create_payload_index(self._collection, path, kind, wait=True))
            return
        ignored = self._storage.only_on_servers | ({"indexes": dict(self._indexes)} if self._indexes else {})
        if ignored:
            words = ", ".join(f"{name}={value!r}" for name, value in ignored.items())
            self._warn(
                "ignored",
                f"Qdrant's local mode keeps float32 and searches exactly: {words} take effect on a server only "
                f"({self._server_url})",
            )

    def _load(self) -> None:
        self._warn_of_many()

    def _opened(self) -> CollectionManifest:
        if self._manifest is not None and time.monotonic() - self._read > _TRUSTED:
            self._manifest = self._stored_manifest()  # an alias may name another collection by now
        return super()._opened()

    @property
    def _server_url(self) -> str:
        return f"qdrant+http://localhost:6333#{self._collection}"

    def _warn_of_many(self) -> None:
        count = stored_points(self._client, self._collection)
        if count > _MANY_POINTS:
            self._warn(
                "many",
                f"collection {self._collection!r} holds {count:,} points, and Qdrant's local mode, meant for up to "
                f"{_MANY_POINTS:,}, compares a question with each of them in Python; move to a server: docker run -p "
                f"6333:6333 -v ./qdrant:/qdrant/storage qdrant/qdrant, and ingest again with --to {self._server_url} "
                "(with the same --cache nothing is computed again)",
            )

    def _warn(self, name: str, message: str) -> None:
        """Log a warning, once."""
        if name not in self._warned:
            self._warned.add(name)
            logger.warning("%s", message)

    def _encode(self, batch: WriteBatch) -> models.Batch | list[models.PointStruct]:
        vectors: dict[str, list[Any]] = {
            vector_name(width): self._stored_vectors.encode(rows).tolist() for width, rows in batch.vectors.items()
        }
        payloads = [
            payload_of(record, point, self._fields) for record, point in zip(batch.records, batch.ids, strict=True)
        ]
        if batch.sparse is None:
            return models.Batch(ids=list(batch.ids), vectors=vectors, payloads=payloads)
        return [
            models.PointStruct(
                id=point,
                # A text without a token of weight has no sparse vector.
                vector={name: rows[row] for name, rows in vectors.items()}
                | ({SPARSE: sparse_vector(batch.sparse[row])} if batch.sparse[row] else {}),
                payload=payloads[row],
            )
            for row, point in enumerate(batch.ids)
        ]

    def _upsert(self, rows: models.Batch | list[models.PointStruct]) -> None:
        self._check_folder()
        self._finished(self._client.upsert(self._collection, points=rows, wait=True))
        self._warn_of_many()

    def _query(self, plan: SearchPlan, native: models.Filter | None, fields: FieldLayout) -> list[models.ScoredPoint]:
        names = [vector_name(width) for width in sorted(plan.vectors)]
        probe = self._partial_points.begin(self._client, self._collection, names)
        stored = self._stored_vectors
        plan = replace(plan, vectors={width: stored.encode(row[np.newaxis])[0] for width, row in plan.vectors.items()})

        def params(stage: Literal["coarse", "full", "only"]) -> models.SearchParams | None:
            return self._storage.search(stored, stage=stage)

        hybrid = plan.sparse is not None
        queries = (
            [fused_query_of(plan, native, lacked=probe.lacked, params=params)]
            if hybrid
            else queries_of(plan, native, lacked=probe.lacked, params=params)
        )
        points = []
        for query, answer in zip(queries, self._answers(probe, queries), strict=True):
            width = int((query.using or "d0")[1:])
            for point in answer.points:
                points.append(
                    point if hybrid else point.model_copy(update={"score": stored.cosine(point.score, width)})
                )
        return sorted(points, key=lambda point: point.score, reverse=True)[: plan.k]

    def _answers(self, probe: Probe, queries: Sequence[models.QueryRequest]) -> list[QueryResponse]:
        """The answers to the requests of a search, in one round trip with those of a probe."""
        if len(queries) == 1 and not probe.asked:
            (query,) = queries
            answer = self._client.query_points(
                self._collection,
                prefetch=query.prefetch,
                query=query.query,
                using=query.using,
                query_filter=query.filter,
                search_params=query.params,
                limit=query.limit or 0,
                with_payload=True,
            )
            return [answer]
        answers = self._client.query_batch_points(self._collection, [*probe.requests, *queries])
        asked = len(probe.asked)
        if len(answers) != asked + len(queries):
            raise ValueError(f"{len(answers)} answers to {asked + len(queries)} searches")
        self._partial_points.end(probe, answers[:asked])
        return answers[asked:]

    def _decode(self, row: models.ScoredPoint, fields: FieldLayout) -> Hit:
        with self._reading(str(row.id), fields):
            record_id, text, metadata = record_fields(row.payload or {}, str(row.id), fields)
        return Hit(id=record_id, score=row.score, text=text, metadata=metadata)

    def _delete(self, which: Sequence[Any] | models.Filter, fields: FieldLayout) -> None:
        self._check_folder()
        selector = (
            which
            if isinstance(which, models.Filter)
            else models.PointIdsList(points=[_native_id(row_id) for row_id in which])
        )
        self._finished(self._client.delete(self._collection, points_selector=selector, wait=True))

    def _fetch(self, row_ids: Sequence[str], widths: Sequence[int], fields: FieldLayout) -> dict[str, StoredRow]:
        points = self._client.retrieve(
            self._collection,
            [_native_id(row_id) for row_id in row_ids],
            with_payload=IDENTITY,
            with_vectors=[vector_name(width) for width in widths] or False,
        )
        return {str(point.id): self._stored_row(point, widths) for point in points}

    def _stored_row(self, point: models.Record, widths: Sequence[int]) -> StoredRow:
        record_id, hashed = identity_of(point.payload or {}, str(point.id))
        vectors = point.vector if isinstance(point.vector, dict) else {}
        return StoredRow(
            record_id=record_id,
            content_hash=hashed,
            vectors={
                width: self._stored_vectors.decode(vectors[vector_name(width)], width)
                for width in widths
                if vector_name(width) in vectors
            },
        )

    def _scan(self, fields: FieldLayout) -> Iterator[list[tuple[str, str]]]:
        offset: models.ExtendedPointId | None = None
        while True:
            points, offset = self._client.scroll(
                self._collection, limit=_SCANNED, offset=offset, with_payload=IDENTITY, with_vectors=False
            )
            yield [(str(point.id), identity_of(point.payload or {}, str(point.id))[0]) for point in points]
            if offset is None:
                return

    def _row_ids(self, record_id: str) -> list[models.ExtendedPointId]:
        return [point_id(record_id), *_own_id(record_id)]

    def _count(self) -> int:
        return self._client.count(self._collection, exact=True).count

    def _to_native(
        self, filter: Mapping[str, object] | models.Filter | None, fields: FieldLayout
    ) -> models.Filter | None:
        return to_filter(filter, fields)

    def _has_condition(self, native: models.Filter) -> bool:
        return has_condition(native)


def _native_id(row_id: models.ExtendedPointId) -> models.ExtendedPointId:
    """The id of a point, which a scan shows as a str."""
    return int(row_id) if isinstance(row_id, str) and _NUMBER.fullmatch(row_id) else row_id


def _own_id(hit_id: str) -> list[models.ExtendedPointId]:
    """The id of a point that a framework wrote, which its hit shows as a str: a UUID, or an int of 64 bits."""
    if _NUMBER.fullmatch(hit_id) and int(hit_id) < 1 << 64:
        return [int(hit_id)]
    try:
        return [str(uuid.UUID(hit_id))]
    except ValueError:
        return []
