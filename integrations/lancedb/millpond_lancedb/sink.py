"""LanceDBSink: a table of LanceDB, with one vector column for each Matryoshka width."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import lancedb
import numpy as np
import pyarrow as pa
from lancedb.index import BTree, HnswSq, IvfPq, LabelList

from millpond.errors import InvalidRequestError, SinkError, SinkUnavailableError
from millpond.ingest.sinks.batch import FloatArray, WriteBatch
from millpond.ingest.sinks.location import is_address
from millpond.ingest.sinks.manifest import MANIFEST_KEY, CollectionManifest
from millpond.ingest.sinks.payload import FieldLayout
from millpond.ingest.sinks.protocol import vector_name
from millpond.ingest.sinks.search import SearchPlan
from millpond.ingest.sinks.table import TableSink
from millpond_lancedb.filters import labels, quoted, to_condition

_PASSING = re.compile(r"no space left|too large \(os error|too many|conflict|timed? ?out", re.IGNORECASE)
_WRITES = 256  # after as many, fragments are merged: a write takes the longer, the more of them there are
_KEPT = timedelta(minutes=10)  # old versions, which other processes may be reading


class LanceDBSink(TableSink[str]):
    """Writes to one table of LanceDB, and searches it.

    A write is a version of the table, which exists whole or not at all: after one that failed, the next one is safe.

    Args:
        uri: A folder, or an open connection.
        table: Name of the table.
        dimensions: The widths to store and search, each in a column ``d{width}``; by default the width that ``embed``
            returns. A search without them uses every width that the table has.
        fields: ``plain``: columns ``pk``, ``id``, ``text``, ``metadata``, ``content_hash``, ``labels``.
        datatype: Of the stored vectors: ``float32`` or ``float16``.
        index: ``IVF_PQ`` or ``IVF_HNSW_SQ``, built by :meth:`close` after a run. By default a search is exact.

    Raises:
        InvalidRequestError: A location, name or option that is not valid.
    """

    database = "LanceDB"
    name_pattern = re.compile(r"\w[\w.-]{0,127}", re.ASCII)
    name_rule = "letters, digits, '_', '-' and '.', a letter, digit or '_' first, at most 128"
    max_rows, max_bytes, float_bytes = 4096, 64 << 20, 4
    datatypes: ClassVar[Mapping[str, Any]] = {"float32": pa.float32(), "float16": pa.float16()}
    indexes = ("IVF_PQ", "IVF_HNSW_SQ")

    def __init__(
        self,
        uri: str | os.PathLike[str] | lancedb.DBConnection,
        table: str,
        *,
        dimensions: Sequence[int] | None = None,
        fields: str = "plain",
        datatype: str = "float32",
        index: str | None = None,
    ) -> None:
        path = None if isinstance(uri, lancedb.DBConnection) else uri
        owned = not isinstance(uri, lancedb.DBConnection)
        super().__init__(path, table, dimensions=dimensions, fields=fields, owned=owned)
        self._set_options(datatype=datatype, index=index)
        if owned and (not self._where or "://" in self._where or is_address(self._where)):
            raise InvalidRequestError(
                "the uri is no folder; write './NAME' for one, or pass lancedb.connect(...) for any other place"
            )
        with self._request("the connection"):
            self._client = lancedb.connect(self._where) if owned else uri

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

    def _create(self, manifest: CollectionManifest) -> None:
        kinds = dict.fromkeys(("pk", "id", "text", "content_hash"), pa.string())
        kinds |= {"metadata": pa.json_(), "labels": pa.list_(pa.string())}
        kinds |= {vector_name(d): pa.list_(self.datatypes[self._datatype], d) for d in manifest.dimensions}
        schema = pa.schema(kinds.items(), metadata={MANIFEST_KEY: json.dumps(manifest.to_dict())})
        self._client.create_table(self._collection, schema=schema)

    def _read_comment(self) -> str | None:
        comment = (self._table().schema.metadata or {}).get(MANIFEST_KEY.encode())
        return None if comment is None else str(comment, "utf-8", "replace")

    def _stored_datatype(self, manifest: CollectionManifest) -> str:
        stored = self._table().schema.field(vector_name(manifest.dimensions[0])).type.value_type
        return next(name for name, kind in self.datatypes.items() if kind == stored)

    def _encode(self, batch: WriteBatch) -> pa.Table:
        columns = super()._encode(batch)
        columns["metadata"] = pa.ExtensionArray.from_storage(pa.json_(), pa.array(columns["metadata"], pa.string()))
        found = [labels(record.metadata) for record in batch.records]
        return pa.table({**columns, "labels": pa.array(found, pa.list_(pa.string()))})

    def _pack(self, rows: FloatArray) -> pa.Array:
        return pa.FixedSizeListArray.from_arrays(pa.array(rows.astype(self._datatype).ravel()), rows.shape[1])

    def _upsert(self, rows: pa.Table) -> None:
        self._table().merge_insert("pk").when_matched_update_all().when_not_matched_insert_all().execute(rows)

    def _flush(self) -> None:
        super()._flush()
        if self._writes % _WRITES == 0:
            self._tidy()

    def _tidy(self) -> None:
        with self._request("a merge of its files"):
            self._table().optimize(cleanup_older_than=_KEPT)
            self._index_columns({"pk": BTree()})  # else every write reads every id

    def _build_index(self, width: int, index: str) -> None:
        kind = IvfPq if index == "IVF_PQ" else HnswSq
        self._index_columns({vector_name(width): kind(distance_type="cosine"), "labels": LabelList()})

    def _index_columns(self, kinds: Mapping[str, Any]) -> None:
        table = self._table()
        indexed = {name for each in table.list_indices() for name in each.columns}
        for column in kinds.keys() - indexed:
            table.create_index(column, config=kinds[column])

    def _query(self, plan: SearchPlan, native: str | None, fields: FieldLayout) -> list[Sequence[Any]]:
        width, limit = (plan.full, plan.k) if plan.coarse is None else (plan.coarse, plan.candidates)
        search = self._table().search(plan.vectors[width], vector_column_name=vector_name(width))
        search = search.distance_type("cosine").limit(limit).refine_factor(10)
        search = search.where(native, prefilter=True) if native else search
        found = search.select(["pk", "id", "text", "metadata", vector_name(plan.full), "_distance"]).to_arrow()
        flat = found.column(vector_name(plan.full)).combine_chunks().flatten().to_numpy(zero_copy_only=False)
        vectors = flat.astype(np.float32).reshape(-1, plan.full)  # [candidates, width]
        scores = vectors @ plan.vectors[plan.full] / np.linalg.norm(vectors, axis=1)
        best = np.argsort(-scores, kind="stable")[: plan.k]
        columns = [found.column(n).take(best).to_pylist() for n in range(4)]
        return list(zip(*columns, scores[best], strict=True))

    def _delete(self, which: Sequence[str] | str, fields: FieldLayout) -> None:
        self._table().delete(which if isinstance(which, str) else f"pk IN ({quoted(which)})")

    def _count(self) -> int:
        return int(self._table().count_rows())

    def _select(self, row_ids: Sequence[str], widths: Sequence[int]) -> Iterable[Sequence[Any]]:
        names = ["pk", "id", "content_hash", *map(vector_name, widths)]
        search = self._table().search().where(f"pk IN ({quoted(row_ids)})").select(names).limit(len(row_ids))
        return [[row[name] for name in names] for row in search.to_arrow().to_pylist()]

    def _scan(self, fields: FieldLayout) -> Iterator[list[tuple[str, str]]]:
        for batch in self._table().search().select(["pk", "id"]).to_batches(self.max_rows):
            yield list(zip(batch["pk"].to_pylist(), batch["id"].to_pylist(), strict=True))

    def _to_native(self, filter: Mapping[str, object] | str | None, fields: FieldLayout) -> str:
        return to_condition(filter)

    def _describe_error(self, error: Exception, request: str) -> str | None:
        return f"refused {request}: " + re.split(r", /|\n", str(error))[0]  # without a line of Lance's source

    def _classify(self, error: Exception) -> type[SinkError]:
        return SinkUnavailableError if _PASSING.search(str(error)) else SinkError
