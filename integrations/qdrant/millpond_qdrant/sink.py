"""QdrantSink: a collection of Qdrant, with one named vector for each Matryoshka width."""

from __future__ import annotations

import os
import re
import sqlite3
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from qdrant_client import QdrantClient, models

from millpond.ingest.batch import WriteBatch
from millpond.ingest.collection import CollectionSink
from millpond.ingest.manifest import MANIFEST_KEY, CollectionManifest
from millpond.ingest.payload import Payload
from millpond.ingest.record import point_id
from millpond.ingest.search import Hit, SearchPlan
from millpond.ingest.sink import vector_name
from millpond_qdrant.client import connect, describe_error
from millpond_qdrant.filters import has_condition, to_filter
from millpond_qdrant.folder import FolderLease, settle, use_write_ahead_log
from millpond_qdrant.local import lacked, serialized
from millpond_qdrant.points import payload_of, record_fields
from millpond_qdrant.queries import queries_of


class QdrantSink(CollectionSink[models.Filter]):
    """Writes to one collection of Qdrant, and searches it.

    The first write creates the collection: a vector ``d{width}`` for every width, cosine distance, and the model's
    fingerprint in the collection's metadata (Qdrant 1.16 or newer). A search is one request; it finds the points that a
    framework wrote with one of the vectors, too. The sinks of a process share a folder, and any thread may use them.

    Args:
        location: ``":memory:"``, an http(s) URL, a folder for a database inside this process, or a ``QdrantClient``
            (which :meth:`close` leaves open). A URL's key comes from ``QDRANT_API_KEY``. A folder whose name looks like
            the address of a server begins with ``./``.
        collection: Name of the collection.
        dimensions: The widths to store and search; by default the width that ``embed`` returns (full, for nearly every
            model). A search without them uses every width that the collection has.
        payload: ``plain`` (``id``, ``text``, ``metadata``), ``langchain`` (``page_content``, ``metadata``, and ``id``)
            or ``llama_index`` (the fields of LlamaIndex's store). Each also has a ``content_hash``.
        timeout: Seconds a server may take to answer.

    Raises:
        InvalidRequestError: A location, name or option that is not valid.
        SinkError: The folder is in use by another process, damaged, or cannot be created.
    """

    database = "Qdrant"
    row = "point"
    name_pattern = re.compile(r'(?!\.\.?\Z)[^<>:"/\\|?*\x00-\x1f]{1,255}')
    name_rule = '1 to 255 characters without < > : " / \\ | ? *'
    # The server takes requests of 32 MB by default; a float costs it up to 20 bytes of JSON.
    max_rows = 256
    max_bytes = 16 << 20
    float_bytes = 20

    _client: QdrantClient

    def __init__(
        self,
        location: str | os.PathLike[str] | QdrantClient,
        collection: str,
        *,
        dimensions: Sequence[int] | None = None,
        payload: str = "plain",
        timeout: int = 60,
    ) -> None:
        client = location if isinstance(location, QdrantClient) else None
        path = None if isinstance(location, QdrantClient) else location
        super().__init__(path, collection, dimensions=dimensions, payload=payload, owned=client is None)
        opened = connect(self._where, timeout) if client is None else client
        self._lease = opened if isinstance(opened, FolderLease) else None  # of a folder that this sink opened
        self._client = opened.client if isinstance(opened, FolderLease) else opened
        self._log: sqlite3.Connection | None = None  # of a folder, once it is prepared

    def _exists(self) -> bool:
        return self._client.collection_exists(self._collection)

    def _create(self, manifest: CollectionManifest) -> None:
        vectors = {
            vector_name(width): models.VectorParams(size=width, distance=models.Distance.COSINE)
            for width in manifest.dimensions
        }
        self._client.create_collection(
            self._collection, vectors_config=vectors, metadata={MANIFEST_KEY: manifest.to_dict()}
        )

    def _read_manifest(self) -> object:
        metadata = self._client.get_collection(self._collection).config.metadata
        return (metadata or {}).get(MANIFEST_KEY)

    def _prepare(self, manifest: CollectionManifest) -> None:
        if self._lease is not None:
            with self._request("opening the write-ahead log"):
                self._log = use_write_ahead_log(self._client, self._collection)

    def _encode(self, batch: WriteBatch) -> models.Batch:
        return models.Batch(
            ids=list(batch.ids),
            vectors={vector_name(width): rows.tolist() for width, rows in batch.vectors.items()},
            payloads=[
                payload_of(record, point, self._payload) for record, point in zip(batch.records, batch.ids, strict=True)
            ],
        )

    def _upsert(self, rows: models.Batch) -> None:
        self._client.upsert(self._collection, points=rows, wait=True)

    def _flush(self) -> None:
        if self._log is not None:
            with self._request("a checkpoint"):
                settle(self._log)

    def _query(self, plan: SearchPlan, native: models.Filter | None, payload: Payload) -> list[models.ScoredPoint]:
        names = [vector_name(width) for width in plan.vectors]
        queries = queries_of(plan, native, lacked=lacked(self._client, self._collection, names))
        if len(queries) == 1:
            (query,) = queries
            return self._client.query_points(
                self._collection,
                prefetch=query.prefetch,
                query=query.query,
                using=query.using,
                query_filter=query.filter,
                limit=plan.k,
                with_payload=True,
            ).points
        answers = self._client.query_batch_points(self._collection, queries)
        points = [point for answer in answers for point in answer.points]
        return sorted(points, key=lambda point: point.score, reverse=True)[: plan.k]

    def _decode(self, row: models.ScoredPoint, payload: Payload) -> Hit:
        with self._reading(str(row.id), payload):
            record_id, text, metadata = record_fields(row.payload or {}, str(row.id), payload)
        return Hit(id=record_id, score=row.score, text=text, metadata=metadata)

    def _delete(self, which: Sequence[str] | models.Filter, payload: Payload) -> None:
        selector = which if isinstance(which, models.Filter) else models.PointIdsList(points=list(which))
        self._client.delete(self._collection, points_selector=selector, wait=True)

    def _row_ids(self, record_id: str) -> list[models.ExtendedPointId]:
        return [point_id(record_id), *_own_id(record_id)]

    def _count(self) -> int:
        return self._client.count(self._collection, exact=True).count

    def _to_native(self, filter: Mapping[str, object] | models.Filter | None, payload: Payload) -> models.Filter | None:
        return to_filter(filter, payload)

    def _has_condition(self, native: models.Filter) -> bool:
        return has_condition(native)

    def _describe_error(self, error: Exception, request: str) -> str | None:
        return describe_error(error, request)

    def _release(self) -> None:
        if self._lease is not None:
            self._lease.close()
        else:
            with serialized(self._client):
                self._client.close()

    @contextmanager
    def _request(self, request: str) -> Iterator[None]:
        with serialized(self._client), super()._request(request):
            yield


def _own_id(hit_id: str) -> list[models.ExtendedPointId]:
    """The id of a point that a framework wrote, which its hit shows as a str: a UUID, or an int of 64 bits."""
    if re.fullmatch(r"0|[1-9][0-9]{0,19}", hit_id) and int(hit_id) < 1 << 64:
        return [int(hit_id)]
    try:
        return [str(uuid.UUID(hit_id))]
    except ValueError:
        return []
