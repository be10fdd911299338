"""LanceDBSink: a table of LanceDB, with one vector column for each Matryoshka width."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import lancedb
import numpy as np
import pyarrow as pa

from millpond.errors import InvalidRequestError, SinkError, SinkUnavailableError
from millpond.ingest.batch import WriteBatch
from millpond.ingest.collection import CollectionSink
from millpond.ingest.location import is_address
from millpond.ingest.manifest import MANIFEST_KEY, CollectionManifest
from millpond.ingest.payload import Payload
from millpond.ingest.record import content_hash
from millpond.ingest.search import Hit, SearchPlan
from millpond.ingest.sink import StoredRow, vector_name
from millpond_lancedb.filters import labels, one_of, to_condition

logger = logging.getLogger(__name__)

_TYPES = {"float32": pa.float32(), "float16": pa.float16()}
_BUSY = re.compile(r"no space left|too large \(os error|too many|conflict|timed? ?out", re.IGNORECASE)
_WRITES = 256  # after as many, fragments are merged: a write takes the longer, the more of them there are
_KEPT = timedelta(hours=1)  # old versions, which other processes may be reading


class LanceDBSink(CollectionSink[str]):
    """Writes to one table of LanceDB, and searches it.

    Every write is a version of the table of its own, which exists whole or not at all: one that fails leaves the table
    as it was, and a later one is safe.

    Args:
        uri: A folder, or an open connection.
        table: Name of the table.
        dimensions: The widths to store and search, each in a column ``d{width}``; by default the width that ``embed``
            returns. A search without them uses every width that the table has.
        payload: ``plain``, the only form: columns ``pk``, ``id``, ``text``, ``metadata``, ``content_hash``, ``labels``.
        datatype: Of the stored vectors: ``float32`` or ``float16``.
        index: ``IVF_PQ`` or ``IVF_HNSW_SQ``: :meth:`close` builds it after a run. By default a search is exact.

    Raises:
        InvalidRequestError: A location, name or option that is not valid.
    """

    database = "LanceDB"
    name_pattern = re.compile(r"\w[\w.-]{0,127}", re.ASCII)
    name_rule = "letters, digits, '_', '-' and '.', a letter or digit first, at most 128"
    max_rows, max_bytes, float_bytes = 4096, 64 << 20, 4

    def __init__(
        self,
        uri: str | os.PathLike[str] | lancedb.DBConnection,
        table: str,
        *,
        dimensions: Sequence[int] | None = None,
        payload: str = "plain",
        datatype: str = "float32",
        index: str | None = None,
    ) -> None:
        client = uri if isinstance(uri, lancedb.DBConnection) else None
        path = None if isinstance(uri, lancedb.DBConnection) else uri
        super().__init__(path, table, dimensions=dimensions, payload=payload, owned=client is None)
        for name, value, known in (
            ("payload", self._payload, ["plain"]),  # whose columns the stores of frameworks take by name
            ("datatype", datatype, list(_TYPES)),
            ("index", index, [None, "IVF_PQ", "IVF_HNSW_SQ"]),
        ):
            if value not in known:
                raise InvalidRequestError(f"{name}={value!r} is none that LanceDB's sink has; choose one of {known}")
        self._datatype, self._index, self._writes = datatype, index, 0
        if client is None and (not self._where or "://" in self._where or is_address(self._where)):
            raise InvalidRequestError(
                "the uri is no folder; write './NAME' for one, or pass lancedb.connect(...) for any other place"
            )
        with self._request("the connection"):
            self._client = lancedb.connect(self._where) if client is None else client

    def close(self) -> None:
        """Merge the files of what was written, build the index, and close the connection unless it was passed in."""
        if self._writes and not self._closed:
            self._writes = 0
            try:
                self._optimize()
                if self._index is not None:
                    self.create_index(self._index)
            except SinkError as error:  # every row is stored all the same
                logger.warning("%s; its rows are stored, and only searches are slower", error)
        super().close()

    def create_index(self, index: str = "IVF_PQ") -> None:
        """Index the smallest width, and the metadata by which dicts filter, unless that is done; it takes 256 rows.

        Raises:
            InvalidRequestError: No such table.
            SinkError: LanceDB refuses.
        """
        column = vector_name(self._opened().dimensions[0])
        with self._request("an index"):
            table = self._table()
            indexed = {name for each in table.list_indices() for name in each.columns}
            if column not in indexed:
                table.create_index("cosine", vector_column_name=column, index_type=index)
            if "labels" not in indexed:
                table.create_scalar_index("labels", index_type="LABEL_LIST")

    def _optimize(self) -> None:
        with self._request("a merge of its files"):
            self._table().optimize(cleanup_older_than=_KEPT)

    def _release(self) -> None:
        self._client = None  # a folder is not held open

    def _table(self) -> Any:
        return self._client.open_table(self._collection)  # the newest version, by whomever it was written

    def _exists(self) -> bool:
        try:
            return self._table() is not None
        except ValueError as error:
            if "was not found" in str(error):
                return False
            raise

    def _read_manifest(self) -> object:
        text = (self._table().schema.metadata or {}).get(MANIFEST_KEY.encode())
        return None if text is None else json.loads(text)

    def _create(self, manifest: CollectionManifest) -> None:
        fields = [pa.field(name, pa.string()) for name in ("pk", "id", "text", "content_hash")]
        fields += [pa.field("metadata", pa.json_()), pa.field("labels", pa.list_(pa.string()))]
        fields += [pa.field(vector_name(d), pa.list_(_TYPES[self._datatype], d)) for d in manifest.dimensions]
        schema = pa.schema(fields, metadata={MANIFEST_KEY: json.dumps(manifest.to_dict())})
        self._client.create_table(self._collection, schema=schema)

    def _prepare(self, manifest: CollectionManifest) -> None:
        with self._request("a look at its columns"):
            stored = self._table().schema.field(vector_name(manifest.dimensions[0])).type.value_type
        if stored != _TYPES[self._datatype]:
            (name,) = (name for name, kind in _TYPES.items() if kind == stored)
            raise InvalidRequestError(f"table {self._collection!r} holds {name} vectors; pass datatype={name!r}")

    def _encode(self, batch: WriteBatch) -> pa.Table:
        records = batch.records
        metadata = pa.array([json.dumps(dict(record.metadata)) for record in records], pa.string())
        columns = {
            "pk": batch.ids,
            "id": [record.id for record in records],
            "text": [record.text for record in records],
            "content_hash": [content_hash(record.text) for record in records],
            "metadata": pa.ExtensionArray.from_storage(pa.json_(), metadata),
            "labels": pa.array([labels(record.metadata) for record in records], pa.list_(pa.string())),
        }
        for width, values in batch.vectors.items():
            flat = pa.array(values.astype(self._datatype).ravel())
            columns[vector_name(width)] = pa.FixedSizeListArray.from_arrays(flat, width)
        return pa.table(columns)

    def _upsert(self, rows: pa.Table) -> None:
        self._table().merge_insert("pk").when_matched_update_all().when_not_matched_insert_all().execute(rows)

    def _flush(self) -> None:
        self._writes += 1
        if self._writes % _WRITES == 0:
            self._optimize()

    def _query(self, plan: SearchPlan, native: str | None, payload: Payload) -> list[dict[str, Any]]:
        width, limit = (plan.full, plan.k) if plan.coarse is None else (plan.coarse, plan.candidates)
        search = self._table().search(plan.vectors[width], vector_column_name=vector_name(width))
        search = search.distance_type("cosine").limit(limit).refine_factor(10)
        columns = ["pk", "id", "text", "metadata", "_distance", vector_name(plan.full)]
        found = (search.where(native, prefilter=True) if native else search).select(columns).to_arrow()
        vectors = _matrix(found.column(vector_name(plan.full)), plan.full)
        scores = vectors @ plan.vectors[plan.full] / np.linalg.norm(vectors, axis=1)
        best = np.argsort(-scores, kind="stable")[: plan.k]
        rows = found.select(["pk", "id", "text", "metadata"]).take(best).to_pylist()
        return [{**row, "score": float(score)} for row, score in zip(rows, scores[best], strict=True)]

    def _decode(self, row: Mapping[str, Any], payload: Payload) -> Hit:
        with self._reading(row["pk"], payload):
            return Hit(id=row["id"], score=row["score"], text=row["text"], metadata=json.loads(row["metadata"]))

    def _delete(self, which: Sequence[str] | str, payload: Payload) -> None:
        self._table().delete(which if isinstance(which, str) else one_of("pk", which))

    def _count(self) -> int:
        return int(self._table().count_rows())

    def _fetch(self, row_ids: Sequence[str], widths: Sequence[int], payload: Payload) -> dict[str, StoredRow]:
        names = ["pk", "id", "content_hash", *map(vector_name, widths)]
        found = self._table().search().where(one_of("pk", row_ids)).select(names).limit(len(row_ids)).to_arrow()
        vectors = {width: _matrix(found.column(vector_name(width)), width) for width in widths}
        return {
            row["pk"]: StoredRow(
                record_id=row["id"],
                content_hash=row["content_hash"],
                vectors={width: rows[n] for width, rows in vectors.items()},
            )
            for n, row in enumerate(found.select(names[:3]).to_pylist())
        }

    def _scan(self, payload: Payload) -> Iterator[list[tuple[str, str]]]:
        for batch in self._table().search().select(["pk", "id"]).to_batches(self.max_rows):
            yield list(zip(batch["pk"].to_pylist(), batch["id"].to_pylist(), strict=True))

    def _to_native(self, filter: Mapping[str, object] | str | None, payload: Payload) -> str:
        return to_condition(filter)

    def _describe_error(self, error: Exception, request: str) -> str | None:
        return f"refused {request}: " + re.split(r", /|\n", str(error))[0]  # without a line of Lance's source

    def _classify(self, error: Exception) -> type[SinkError]:
        return SinkUnavailableError if _BUSY.search(str(error)) else SinkError


def _matrix(column: pa.ChunkedArray, width: int) -> Any:
    """The vectors of a column, ``[n, width]`` float32."""
    return column.combine_chunks().flatten().to_numpy(zero_copy_only=False).reshape(-1, width).astype(np.float32)


def sink_from_url(
    scheme: str,
    location: str,
    collection: str,
    *,
    dimensions: Sequence[int] | None = None,
    payload: str = "plain",
    datatype: str = "float32",
    index: str | None = None,
) -> LanceDBSink:
    """Open ``lancedb+path:DIR#docs``."""
    if scheme != "path" or not location:
        raise InvalidRequestError(f"'lancedb+{scheme}:' does not name a LanceDB; write lancedb+path:DIR#docs")
    return LanceDBSink(location, collection, dimensions=dimensions, payload=payload, datatype=datatype, index=index)
