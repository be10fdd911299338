"""QdrantDriver: the requests that a sink makes of a collection of Qdrant."""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
from qdrant_client import models
from qdrant_client.http.models import QueryResponse

from millpond.errors import InvalidRequestError
from millpond.ingest.record import point_id
from millpond.ingest.sinks.batch import WriteBatch
from millpond.ingest.sinks.driver import CollectionDriver
from millpond.ingest.sinks.fields import FieldLayout
from millpond.ingest.sinks.manifest import MANIFEST_KEY, CollectionManifest
from millpond.ingest.sinks.protocol import StoredRow, vector_name
from millpond.ingest.sinks.raw_rows import RawPage, VectorField
from millpond.ingest.sinks.search import Hit, SearchPlan
from millpond.support.filters import Condition
from millpond_qdrant.connection import QdrantConnection
from millpond_qdrant.payload import (
    IDENTITY,
    content_of,
    has_condition,
    identity_of,
    is_exact,
    payload_of,
    payload_path,
    record_fields,
    to_filter,
)
from millpond_qdrant.probe import PartialPoints, Probe
from millpond_qdrant.queries import SPARSE, fused_query_of, queries_of, sparse_vector
from millpond_qdrant.raw_rows import raw_fields, raw_pages
from millpond_qdrant.vector_storage import StoredVectors, VectorStorage, check_layout

logger = logging.getLogger(__name__)

_NUMBER = re.compile(r"0|[1-9][0-9]{0,19}")
# Points of one page of a scan.
_SCANNED = 1000


class QdrantDriver(CollectionDriver[models.Filter]):
    """A point for each record, with one named vector for each width."""

    hybrids = True

    def __init__(
        self,
        connection: QdrantConnection,
        storage: VectorStorage,
        indexes: Mapping[str, str] | None,
        fields: FieldLayout,
    ) -> None:
        self.connection: QdrantConnection = connection
        self._name = connection.collection
        self._storage = storage
        self._wanted, self._indexes = indexes, check_indexes(indexes, fields)
        self._fields = fields
        self._partial_points = PartialPoints()
        self._ignored = False  # whether options without effect were named

    def create(self, manifest: CollectionManifest) -> None:
        """Create the collection."""
        check_layout(self._storage.datatype, manifest.fields)  # which may be that of a collection that is copied
        sparse = None
        if manifest.sparse is not None:
            index = models.SparseIndexParams(on_disk=self._storage.on_disk)
            sparse = {SPARSE: models.SparseVectorParams(index=index)}
        self.connection.client.create_collection(
            self._name,
            vectors_config={vector_name(width): self._storage.params(width) for width in manifest.dimensions},
            sparse_vectors_config=sparse,
            metadata={MANIFEST_KEY: manifest.to_dict()},
        )

    def prepare(self, manifest: CollectionManifest) -> None:
        """Check how vectors are stored, and make the indexes of the payload."""
        connection = self.connection
        connection.check_folder()
        self._fields, self._indexes = manifest.fields, check_indexes(self._wanted, manifest.fields)
        self._storage.check_stored(self._stored_vectors, collection=self._name)
        connection.open_log()
        if not connection.local:
            self._make_indexes({} if connection.info is None else connection.info.payload_schema or {})
            return
        ignored = self._storage.only_on_servers | ({"indexes": dict(self._indexes)} if self._indexes else {})
        if ignored and not self._ignored:
            words = ", ".join(f"{name}={value!r}" for name, value in ignored.items())
            self._ignored = True
            logger.warning(
                "Qdrant's local mode keeps float32 and searches exactly: %s take effect on a server only "
                "(qdrant+http://localhost:6333#%s)",
                words,
                self._name,
            )

    def upsert(self, batch: WriteBatch) -> None:
        """Store points."""
        self.connection.upsert(self._points(batch))

    @property
    def exhaustive(self) -> bool:
        """Local mode has no index, and looks for candidates among the ids of all points, one by one in Python."""
        return self.connection.local

    def flush(self) -> None:
        """Make acknowledged changes durable."""
        self.connection.flush()

    def delete(self, which: Sequence[Any] | models.Filter, manifest: CollectionManifest) -> None:
        """Delete points."""
        self.connection.delete(which if isinstance(which, models.Filter) else [_native_id(row_id) for row_id in which])

    def count(self) -> int:
        """How many points there are."""
        return self.connection.count()

    def datatype_of(self, manifest: CollectionManifest) -> str:
        """The data type of the vectors."""
        return self._stored_vectors.datatype

    def condition(
        self, filter: Mapping[str, object] | models.Filter | None, manifest: CollectionManifest
    ) -> models.Filter | None:
        """A filter of Qdrant's."""
        return to_filter(filter, manifest.fields)

    def is_exact(self, conditions: Mapping[str, Condition]) -> bool:
        """Whether the filter of Qdrant's matches no other points."""
        return is_exact(conditions)

    def matching(
        self, condition: models.Filter, manifest: CollectionManifest
    ) -> Iterator[list[tuple[models.ExtendedPointId, Mapping[str, Any]]]]:
        """Pages of point ids and metadata."""
        offset: models.ExtendedPointId | None = None
        while True:
            points, offset = self.connection.client.scroll(
                self._name, condition, limit=_SCANNED, offset=offset, with_payload=True, with_vectors=False
            )
            yield [(point.id, self._record(point, manifest)[2]) for point in points]
            if offset is None:
                return

    def has_condition(self, condition: models.Filter) -> bool:
        """Whether a filter has a condition."""
        return has_condition(condition)

    def row_ids(self, record_id: str, manifest: CollectionManifest) -> list[models.ExtendedPointId]:
        """The ids of the points that a record may have."""
        return [point_id(record_id), *_own_id(record_id)]

    def query(self, plan: SearchPlan, condition: models.Filter | None, manifest: CollectionManifest) -> list[Hit]:
        """The hits of a search, in one request."""
        names = [vector_name(width) for width in sorted(plan.vectors)]
        probe = self._partial_points.begin(self.connection.client, self._name, names)
        stored = self._stored_vectors
        plan = replace(plan, vectors={width: stored.encode(row[np.newaxis])[0] for width, row in plan.vectors.items()})

        def params(stage: Literal["coarse", "full", "only"]) -> models.SearchParams | None:
            return self._storage.search(stored, stage=stage)

        hybrid = plan.sparse is not None
        queries = (
            [fused_query_of(plan, condition, lacked=probe.lacked, params=params)]
            if hybrid
            else queries_of(plan, condition, lacked=probe.lacked, params=params)
        )
        points = []
        for query, answer in zip(queries, self._answers(probe, queries), strict=True):
            width = int((query.using or "d0")[1:])
            for point in answer.points:
                points.append(
                    point if hybrid else point.model_copy(update={"score": stored.cosine(point.score, width)})
                )
        best = sorted(points, key=lambda point: point.score, reverse=True)[: plan.k]
        return [self._hit(point, manifest) for point in best]

    def fetch(
        self, row_ids: Sequence[str], widths: Sequence[int], manifest: CollectionManifest
    ) -> dict[str, StoredRow]:
        """Those of these points that exist."""
        points = self._retrieve(row_ids, widths, manifest, payload=IDENTITY)
        return {str(point.id): self._stored_row(point, widths, manifest) for point in points}

    def read(self, row_ids: Sequence[str], widths: Sequence[int], manifest: CollectionManifest) -> dict[str, StoredRow]:
        """The same with texts and metadata; of a point that cannot be read both are empty."""
        rows = {}
        for point in self._retrieve(row_ids, widths, manifest, payload=True):
            text, metadata = content_of(point.payload or {}, str(point.id), manifest.fields)
            rows[str(point.id)] = replace(self._stored_row(point, widths, manifest), text=text, metadata=metadata)
        return rows

    def store_manifest(self, manifest: CollectionManifest) -> None:
        """Replace the manifest in the collection's metadata."""
        self.connection.check_folder()
        self.connection.client.update_collection(self._name, metadata={MANIFEST_KEY: manifest.to_dict()})

    def drop(self) -> None:
        """Delete the collection."""
        self.connection.check_folder()
        self.connection.client.delete_collection(self._name)

    def move_aliases(self, to: str, *, but: str) -> None:
        """Let the aliases of the collection name another one, all in one step."""
        client = self.connection.client
        changes: list[models.AliasOperations] = []
        for known in client.get_collection_aliases(self._name).aliases:
            if (alias := known.alias_name) != but:
                deleted = models.DeleteAlias(alias_name=alias)
                created = models.CreateAlias(alias_name=alias, collection_name=to)
                changes += [
                    models.DeleteAliasOperation(delete_alias=deleted),
                    models.CreateAliasOperation(create_alias=created),
                ]
        if changes:
            client.update_collection_aliases(changes)

    def _retrieve(
        self, row_ids: Sequence[str], widths: Sequence[int], manifest: CollectionManifest, *, payload: Any
    ) -> list[models.Record]:
        names = [vector_name(width) for width in widths]
        return self.connection.client.retrieve(
            self._name,
            [_native_id(row_id) for row_id in row_ids],
            with_payload=payload,
            with_vectors=[*names, SPARSE] if names and manifest.sparse is not None else names or False,
        )

    def scan(self, manifest: CollectionManifest) -> Iterator[list[tuple[str, str]]]:
        """Pages of point ids and record ids."""
        offset: models.ExtendedPointId | None = None
        while True:
            points, offset = self.connection.client.scroll(
                self._name, limit=_SCANNED, offset=offset, with_payload=IDENTITY, with_vectors=False
            )
            yield [(str(point.id), identity_of(point.payload or {}, str(point.id))[0]) for point in points]
            if offset is None:
                return

    def raw_fields(self) -> list[VectorField]:
        """The dense vectors of any collection."""
        return raw_fields(self.connection.client.get_collection(self._name))

    def raw_pages(self, field: VectorField) -> Iterator[RawPage]:
        """Points of any collection."""
        return raw_pages(self.connection.client, self._name, field)

    # ----------------------------------------------------------------------------------------------------------

    @property
    def _stored_vectors(self) -> StoredVectors:
        info = self.connection.info
        return StoredVectors() if info is None else StoredVectors.of(info.config)

    def _make_indexes(self, stored: Mapping[str, models.PayloadIndexInfo]) -> None:
        """Make the indexes that a server's collection lacks."""
        for path, kind in self._indexes.items():
            if path in stored and (has := stored[path].data_type) is not kind:
                raise InvalidRequestError(
                    f"collection {self._name!r} has an index of the type {has.value!r} on {path!r}, and this sink asks "
                    f"for {kind.value!r}; leave it out of indexes, or delete the other with "
                    f"client.delete_payload_index({self._name!r}, {path!r})"
                )
        for path in self._indexes:
            if path not in stored:
                self.connection.request(f"an index of {path}", partial(self._index, path))

    def _index(self, path: str) -> None:
        kind = self._indexes[path]
        self.connection.finish(self.connection.client.create_payload_index(self._name, path, kind, wait=True))

    def _points(self, batch: WriteBatch) -> models.Batch | list[models.PointStruct]:
        stored = self._stored_vectors
        vectors: dict[str, list[Any]] = {
            vector_name(width): stored.encode(rows).tolist() for width, rows in batch.vectors.items()
        }
        payloads = [
            payload_of(record, point, self._fields) for record, point in zip(batch.records, batch.ids, strict=True)
        ]
        if batch.sparse is None:
            return models.Batch(ids=[_native_id(point) for point in batch.ids], vectors=vectors, payloads=payloads)
        return [
            models.PointStruct(
                id=_native_id(point),
                # A text without a token of weight has no sparse vector.
                vector={name: rows[row] for name, rows in vectors.items()}
                | ({SPARSE: sparse_vector(batch.sparse[row])} if batch.sparse[row] else {}),
                payload=payloads[row],
            )
            for row, point in enumerate(batch.ids)
        ]

    def _answers(self, probe: Probe, queries: Sequence[models.QueryRequest]) -> list[QueryResponse]:
        """The answers to the requests of a search, in one round trip with those of a probe."""
        if len(queries) == 1 and not probe.asked:
            (query,) = queries
            answer = self.connection.client.query_points(
                self._name,
                prefetch=query.prefetch,
                query=query.query,
                using=query.using,
                query_filter=query.filter,
                search_params=query.params,
                limit=query.limit or 0,
                with_payload=True,
            )
            return [answer]
        answers = self.connection.client.query_batch_points(self._name, [*probe.requests, *queries])
        asked = len(probe.asked)
        if len(answers) != asked + len(queries):
            raise ValueError(f"{len(answers)} answers to {asked + len(queries)} searches")
        self._partial_points.end(probe, answers[:asked])
        return answers[asked:]

    def _record(
        self, row: models.ScoredPoint | models.Record, manifest: CollectionManifest
    ) -> tuple[str, str, dict[str, Any]]:
        with self.reading(str(row.id), manifest):
            return record_fields(row.payload or {}, str(row.id), manifest.fields)

    def _hit(self, row: models.ScoredPoint, manifest: CollectionManifest) -> Hit:
        record_id, text, metadata = self._record(row, manifest)
        return Hit(id=record_id, score=row.score, text=text, metadata=metadata)

    def _stored_row(self, point: models.Record, widths: Sequence[int], manifest: CollectionManifest) -> StoredRow:
        record_id, hashed = identity_of(point.payload or {}, str(point.id))
        stored = self._stored_vectors
        vectors = point.vector if isinstance(point.vector, dict) else {}
        sparse = vectors.get(SPARSE)
        weights = (
            dict(zip(sparse.indices, sparse.values, strict=True)) if isinstance(sparse, models.SparseVector) else {}
        )
        return StoredRow(
            sparse=weights if widths and manifest.sparse is not None else None,
            record_id=record_id,
            content_hash=hashed,
            vectors={
                width: stored.decode(vectors[name], width)
                for width in widths
                if (name := vector_name(width)) in vectors
            },
        )


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


def check_indexes(indexes: Mapping[str, str] | None, form: FieldLayout) -> dict[str, models.PayloadSchemaType]:
    """The payload's paths of metadata keys, and the types of their indexes."""
    if indexes is not None and not isinstance(indexes, Mapping):
        raise InvalidRequestError(f"indexes={indexes!r} must be a dict of metadata keys, like {{'year': 'integer'}}")
    known = {schema.value: schema for schema in models.PayloadSchemaType}
    wanted = {}
    for key, kind in (indexes or {}).items():
        if not isinstance(key, str) or kind not in known:
            raise InvalidRequestError(
                f"indexes: {key!r}: {kind!r} is no index of Qdrant; choose one of {', '.join(known)}"
            )
        wanted[payload_path(key, form, what="indexes")] = known[kind]
    return wanted
