"""QdrantSink: a collection of Qdrant, with one named vector for each Matryoshka width."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from qdrant_client import QdrantClient, models

from millpond.ingest.batch import WriteBatch
from millpond.ingest.collection import CollectionSink
from millpond.ingest.manifest import MANIFEST_KEY, CollectionManifest
from millpond.ingest.payload import Payload
from millpond.ingest.record import point_id
from millpond.ingest.search import Hit, SearchPlan
from millpond.ingest.sink import StoredRow, vector_name
from millpond_qdrant.collection import QdrantCollection
from millpond_qdrant.filters import has_condition, to_filter
from millpond_qdrant.points import payload_of, record_fields
from millpond_qdrant.probe import PartialPoints
from millpond_qdrant.queries import queries_of

# Points of one page of a scan.
_SCANNED = 1000


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
        timeout: Seconds a server may take to answer.

    Raises:
        InvalidRequestError: A location, name or option that is not valid.
        SinkError: The folder is in use by another process, damaged, or cannot be created.
    """

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
        self._connect(client, timeout)
        self._partial_points = PartialPoints()

    def _create(self, manifest: CollectionManifest) -> None:
        vectors = {
            vector_name(width): models.VectorParams(size=width, distance=models.Distance.COSINE)
            for width in manifest.dimensions
        }
        self._client.create_collection(
            self._collection, vectors_config=vectors, metadata={MANIFEST_KEY: manifest.to_dict()}
        )

    def _prepare(self, manifest: CollectionManifest) -> None:
        self._open_log()

    def _encode(self, batch: WriteBatch) -> models.Batch:
        return models.Batch(
            ids=list(batch.ids),
            vectors={vector_name(width): rows.tolist() for width, rows in batch.vectors.items()},
            payloads=[
                payload_of(record, point, self._payload) for record, point in zip(batch.records, batch.ids, strict=True)
            ],
        )

    def _upsert(self, rows: models.Batch) -> None:
        self._finished(self._client.upsert(self._collection, points=rows, wait=True))

    def _query(self, plan: SearchPlan, native: models.Filter | None, payload: Payload) -> list[models.ScoredPoint]:
        names = [vector_name(width) for width in sorted(plan.vectors)]
        probe = self._partial_points.begin(self._client, self._collection, names)
        queries = [*probe.requests, *queries_of(plan, native, lacked=probe.lacked)]
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
        asked = len(probe.asked)
        self._partial_points.end(probe, answers[:asked])
        points = [point for answer in answers[asked:] for point in answer.points]
        return sorted(points, key=lambda point: point.score, reverse=True)[: plan.k]

    def _decode(self, row: models.ScoredPoint, payload: Payload) -> Hit:
        with self._reading(str(row.id), payload):
            record_id, text, metadata = record_fields(row.payload or {}, str(row.id), payload)
        return Hit(id=record_id, score=row.score, text=text, metadata=metadata)

    def _delete(self, which: Sequence[str] | models.Filter, payload: Payload) -> None:
        selector = which if isinstance(which, models.Filter) else models.PointIdsList(points=list(which))
        self._finished(self._client.delete(self._collection, points_selector=selector, wait=True))

    def _fetch(self, row_ids: Sequence[str], widths: Sequence[int], payload: Payload) -> dict[str, StoredRow]:
        points = self._client.retrieve(
            self._collection,
            list(row_ids),
            with_payload=True,
            with_vectors=[vector_name(width) for width in widths],
        )
        return {str(point.id): self._stored(point, widths, payload) for point in points}

    def _stored(self, point: models.Record, widths: Sequence[int], payload: Payload) -> StoredRow:
        fields, row_id = point.payload or {}, str(point.id)
        with self._reading(row_id, payload):
            record_id, _, _ = record_fields(fields, row_id, payload)
        vectors = point.vector if isinstance(point.vector, dict) else {}
        return StoredRow(
            record_id=record_id,
            content_hash=str(fields.get("content_hash", "")),
            vectors={
                width: np.asarray(vectors[vector_name(width)], dtype=np.float32)
                for width in widths
                if vector_name(width) in vectors
            },
        )

    def _scan(self, payload: Payload) -> Iterator[list[tuple[str, str]]]:
        offset: models.ExtendedPointId | None = None
        while True:
            points, offset = self._client.scroll(
                self._collection, limit=_SCANNED, offset=offset, with_payload=True, with_vectors=False
            )
            yield [(str(point.id), self._stored(point, (), payload).record_id) for point in points]
            if offset is None:
                return

    def _row_ids(self, record_id: str) -> list[models.ExtendedPointId]:
        return [point_id(record_id), *_own_id(record_id)]

    def _count(self) -> int:
        return self._client.count(self._collection, exact=True).count

    def _to_native(self, filter: Mapping[str, object] | models.Filter | None, payload: Payload) -> models.Filter | None:
        return to_filter(filter, payload)

    def _has_condition(self, native: models.Filter) -> bool:
        return has_condition(native)


def _own_id(hit_id: str) -> list[models.ExtendedPointId]:
    """The id of a point that a framework wrote, which its hit shows as a str: a UUID, or an int of 64 bits."""
    if re.fullmatch(r"0|[1-9][0-9]{0,19}", hit_id) and int(hit_id) < 1 << 64:
        return [int(hit_id)]
    try:
        return [str(uuid.UUID(hit_id))]
    except ValueError:
        return []
