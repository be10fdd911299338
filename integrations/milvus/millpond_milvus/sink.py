"""MilvusSink: a collection of Milvus, with one vector field for each Matryoshka width."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
from pymilvus import DataType, MilvusClient

from millpond.ingest.batch import WriteBatch
from millpond.ingest.collection import CollectionSink
from millpond.ingest.location import is_url
from millpond.ingest.manifest import MANIFEST_KEY, CollectionManifest
from millpond.ingest.payload import Payload
from millpond.ingest.record import Record, point_id
from millpond.ingest.search import Hit, SearchPlan
from millpond.ingest.sink import StoredRow, vector_name
from millpond.spec import ModelSpec
from millpond_milvus.client import URL_SCHEMES
from millpond_milvus.collection import MilvusCollection
from millpond_milvus.filters import one_of, to_expression
from millpond_milvus.lite import lite_lock
from millpond_milvus.schema import MAX_VARCHAR, SCHEMAS

# Rows of one page of a scan.
_SCANNED = 1000


class MilvusSink(MilvusCollection, CollectionSink[str]):
    """Writes to one collection of Milvus, and searches it.

    The first write creates the collection: a vector field ``d{width}`` for every width, the metric COSINE (an exact
    index in Milvus Lite, AUTOINDEX on a server), and the model's fingerprint in its properties. A search is two
    requests; it returns at most 16,384 hits out of as many candidates. Milvus Lite cannot tell ``True`` from 1, or
    ``False`` from 0, in a filter.

    Args:
        uri: A ``*.db`` file (Milvus Lite, inside this process), a server's URL, or a ``MilvusClient`` (which
            :meth:`close` leaves open). A server's token comes from ``MILVUS_TOKEN``.
        collection: Name of the collection: letters, digits and underscores.
        dimensions: The widths to store and search; by default the width that ``embed`` returns (full, for nearly every
            model). A search without them uses every width that the collection has.
        payload: ``plain`` (fields ``pk``, ``id``, ``text``, ``metadata``, ``content_hash``), ``langchain`` (``pk``,
            ``text``, the metadata's keys, ``record_id``, ``content_hash``) or ``llama_index`` (the fields of
            LlamaIndex's store).
        timeout: Seconds any request may take; without a limit the client would retry for minutes.

    Raises:
        InvalidRequestError: A location, name or option that is not valid.
        MissingExtraError: The uri is a file, and milvus-lite is not installed.
        SinkError: The server does not answer, or another process has the file open.
    """

    max_results = 16_384

    def __init__(
        self,
        uri: str | os.PathLike[str] | MilvusClient,
        collection: str,
        *,
        dimensions: Sequence[int] | None = None,
        payload: str = "plain",
        timeout: float = 60,
    ) -> None:
        client = uri if isinstance(uri, MilvusClient) else None
        path = None if isinstance(uri, MilvusClient) else uri
        super().__init__(path, collection, dimensions=dimensions, payload=payload, owned=client is None)
        self._schema = SCHEMAS[self._payload]
        self._connect(client, timeout)

    def prepare(self, spec: ModelSpec, *, sparse: ModelSpec | None = None, chunked: bool = False) -> None:
        """Create the collection and its indexes, or check that they fit: see :meth:`CollectionSink.prepare`."""
        with nullcontext() if is_url(self._where, URL_SCHEMES) else lite_lock:
            super().prepare(spec, sparse=sparse, chunked=chunked)

    @property
    def embedded(self) -> bool:
        """Whether this is Milvus Lite."""
        return self._lite

    def check(self, record: Record) -> None:
        """Raise InvalidRequestError for a record that Milvus cannot store, such as a text of over 65,535 bytes."""
        widths = self._manifest.dimensions if self._manifest is not None else self._dimensions or ()
        self._schema.row(record, point_id(record.id), vectors=frozenset(map(vector_name, widths)))

    def _create(self, manifest: CollectionManifest) -> None:
        schema = self._client.create_schema(auto_id=False, enable_dynamic_field=self._schema.json is None)
        schema.add_field(self._schema.primary, DataType.VARCHAR, is_primary=True, max_length=MAX_VARCHAR)
        for name in self._schema.strings:
            schema.add_field(name, DataType.VARCHAR, max_length=MAX_VARCHAR)
        if self._schema.json is not None:
            schema.add_field(self._schema.json, DataType.JSON)
        for width in manifest.dimensions:
            schema.add_field(vector_name(width), DataType.FLOAT_VECTOR, dim=width)
        self._call(
            "create_collection",
            self._collection,
            schema=schema,
            properties={MANIFEST_KEY: json.dumps(manifest.to_dict())},
            consistency_level="Session",  # a search sees what this client wrote
        )

    def _prepare(self, manifest: CollectionManifest) -> None:
        # Fields without an index: those of a new collection, or of one whose creation was interrupted.
        with self._request("indexing the collection"):
            indexed = self._call("list_indexes", self._collection)
            # Lite's AUTOINDEX is a graph that may lose candidates under the funnel's filter; its collections are
            # small enough for an exact search.
            kind = "FLAT" if self._lite else "AUTOINDEX"
            for name in sorted(set(map(vector_name, manifest.dimensions)) - set(indexed)):
                index = self._client.prepare_index_params()
                index.add_index(name, index_name=name, index_type=kind, metric_type="COSINE")
                # sync would poll twice a second, and a collection without rows has nothing to wait for.
                self._call("create_index", self._collection, index, sync=False)

    def _load(self) -> None:
        self._load_collection()

    def _encode(self, batch: WriteBatch) -> list[dict[str, Any]]:
        names = frozenset(map(vector_name, batch.vectors))
        rows = [
            self._schema.row(record, point, vectors=names)
            for record, point in zip(batch.records, batch.ids, strict=True)
        ]
        for width, values in batch.vectors.items():
            for row, vector in zip(rows, values, strict=True):
                row[vector_name(width)] = vector
        return rows

    def _upsert(self, rows: list[dict[str, Any]]) -> None:
        # A server's upsert replaces a row, and its insert may duplicate it; Lite's insert replaces a row, and its
        # upsert merges the old metadata into the new.
        send = self._client.insert if self._lite else self._client.upsert
        send(self._collection, rows, timeout=self._timeout)

    def _query(self, plan: SearchPlan, native: str | None, payload: Payload) -> list[Any]:
        schema = SCHEMAS[payload]
        if plan.coarse is not None:
            candidates = self._nearest(
                plan, plan.coarse, min(plan.candidates, self.max_results), native, [schema.primary]
            )
            if not candidates:
                return []
            native = one_of(schema.primary, [str(row[schema.primary]) for row in candidates])
        return self._nearest(plan, plan.full, plan.k, native, schema.output_fields())

    def _decode(self, row: Mapping[str, Any], payload: Payload) -> Hit:
        schema = SCHEMAS[payload]
        point = str(row[schema.primary])
        with self._reading(point, payload):
            record_id, text, metadata = schema.record_fields(row["entity"], point)
        return Hit(id=record_id, score=float(row["distance"]), text=text, metadata=metadata)

    def _nearest(
        self, plan: SearchPlan, width: int, limit: int, expression: str | None, fields: list[str]
    ) -> list[Any]:
        results = self._client.search(
            self._collection,
            data=[plan.vectors[width].tolist()],
            anns_field=vector_name(width),
            limit=limit,
            filter=expression or "",
            output_fields=fields,
            timeout=self._timeout,
        )
        return list(results[0])

    def _delete(self, which: Sequence[str] | str, payload: Payload) -> None:
        expression = which if isinstance(which, str) else one_of(SCHEMAS[payload].primary, which)
        self._client.delete(self._collection, filter=expression, timeout=self._timeout)

    def _fetch(self, row_ids: Sequence[str], widths: Sequence[int], payload: Payload) -> dict[str, StoredRow]:
        schema = SCHEMAS[payload]
        rows = self._client.query(
            self._collection,
            filter=one_of(schema.primary, list(row_ids)),
            output_fields=[*schema.output_fields(), *map(vector_name, widths)],
            timeout=self._timeout,
        )
        return {str(row[schema.primary]): self._stored(row, widths, payload) for row in rows}

    def _stored(self, row: Mapping[str, Any], widths: Sequence[int], payload: Payload) -> StoredRow:
        schema = SCHEMAS[payload]
        point = str(row[schema.primary])
        with self._reading(point, payload):
            record_id, _, _ = schema.record_fields(row, point)
        return StoredRow(
            record_id=record_id,
            content_hash=str(row.get("content_hash", "")),
            vectors={width: np.asarray(row[vector_name(width)], dtype=np.float32) for width in widths},
        )

    def _scan(self, payload: Payload) -> Iterator[list[tuple[str, str]]]:
        schema = SCHEMAS[payload]
        pages = self._client.query_iterator(
            self._collection,
            batch_size=_SCANNED,
            output_fields=[schema.primary, *schema.output_fields()],
            timeout=self._timeout,
        )
        try:
            while page := pages.next():
                yield [(str(row[schema.primary]), self._stored(row, (), payload).record_id) for row in page]
        finally:
            pages.close()

    def _row_ids(self, record_id: str) -> list[str]:
        written = [point_id(record_id)]
        # A row that a framework wrote has its own id, which its hit shows.
        return written if self._manifest is None or self._manifest.payload == "plain" else [*written, record_id]

    def _to_native(self, filter: Mapping[str, object] | str | None, payload: Payload) -> str:
        widths = () if self._manifest is None else self._manifest.dimensions
        return to_expression(filter, SCHEMAS[payload], vectors=frozenset(map(vector_name, widths)))
