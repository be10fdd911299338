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
from millpond.ingest.sinks.client import Connection, Fault, is_address
from millpond.ingest.sinks.manifest import MANIFEST_KEY, CollectionManifest
from millpond.ingest.sinks.protocol import vector_name
from millpond.ingest.sinks.raw_rows import RawPage, VectorField
from millpond.ingest.sinks.search import Hit, SearchPlan
from millpond.ingest.sinks.table import TableDriver, TableSink, manifest_of
from millpond.support.filters import Condition
from millpond_lancedb.filters import is_exact, labels, quoted, to_condition
from millpond_lancedb.raw_rows import raw_fields, raw_pages

_PASSING = re.compile(r"no space left|too large \(os error|too many|conflict|timed? ?out", re.IGNORECASE)
_RUN, _RUNS, _SUCCESSION = (f"{MANIFEST_KEY}.{name}" for name in ("run", "runs", "succession"))
_WRITES = 256  # after as many, fragments are merged: a write takes the longer, the more of them there are
_KEPT = timedelta(minutes=10)  # old versions, which other processes may be reading


class LanceDBSink(TableSink[str]):
    """Writes to one table of LanceDB, and searches it.

    A write is a version of the table, which exists whole or not at all: after one that failed, the next one is safe.

    Args:
        uri: A folder, or an open connection.
        table: Name of the table.
        dimensions: The widths to store and search, each in a column ``d{width}``; by default those of the table, and
            in a new one the width that ``embed`` returns.
        fields: ``plain``: columns ``pk``, ``id``, ``text``, ``metadata``, ``content_hash``, ``labels``.
        datatype: Of the stored vectors: ``float32`` or ``float16``; by default that of the table.
        index: ``IVF_PQ`` or ``IVF_HNSW_SQ``, built by :meth:`close` after a run. By default a search is exact.

    Raises:
        InvalidRequestError: A location, name or option that is not valid.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str] | lancedb.DBConnection,
        table: str,
        *,
        dimensions: Sequence[int] | None = None,
        fields: str | None = None,
        datatype: str | None = None,
        index: str | None = None,
    ) -> None:
        driver = LanceDBDriver(LanceDBConnection(uri, table), fields=fields, datatype=datatype, index=index)
        super().__init__(driver, dimensions=dimensions, fields=fields)
        self.options = {"datatype": datatype, "index": index}
        driver.connection.open()


class LanceDBConnection(Connection):
    """A table of a folder, or of a connection that was passed in."""

    database = "LanceDB"
    name_pattern = re.compile(r"\w[\w.-]{0,127}", re.ASCII)
    name_rule = "letters, digits, '_', '-' and '.', a letter, digit or '_' first, at most 128"
    max_rows, max_bytes = 4096, 64 << 20

    def __init__(self, uri: str | os.PathLike[str] | lancedb.DBConnection, table: str) -> None:
        passed = uri if isinstance(uri, lancedb.DBConnection) else None
        super().__init__(None if isinstance(uri, lancedb.DBConnection) else uri, table, client=passed)

    def open(self) -> None:
        """Open the folder."""
        if not self.owned:
            return
        if not self.where or "://" in self.where or is_address(self.where):
            raise InvalidRequestError(
                "the uri is no folder; write './NAME' for one, or pass lancedb.connect(...) for any other place"
            )
        if os.path.isfile(self.where):
            raise InvalidRequestError(f"uri={self.where!r} is a file; LanceDB keeps its tables in a folder")
        self.client = self.request("the connection", lambda: lancedb.connect(self.where))

    def table(self) -> Any:
        """The newest version of the table, by whomever it was written."""
        return self.client.open_table(self.collection)

    def exists(self) -> bool:
        """Whether there is such a table."""
        try:
            return self.table() is not None
        except ValueError as error:
            if "was not found" in str(error):
                return False
            raise

    def names(self) -> Iterator[str]:
        """Names of the tables."""
        token = None
        while True:
            page = self.client.list_tables(page_token=token)
            yield from page.tables
            token = page.page_token
            if not token:
                return

    def read_manifest(self) -> object:
        """The manifest in the schema's metadata, with what changes, which is in that of the ids."""
        schema = self.table().schema
        comment = (schema.metadata or {}).get(MANIFEST_KEY.encode())
        manifest = manifest_of(None if comment is None else str(comment, "utf-8", "replace"))
        noted = (schema.field("pk").metadata or {}) if "pk" in schema.names else {}
        if isinstance(manifest, dict):
            for key, read in ((_RUN, str), (_RUNS, json.loads), (_SUCCESSION, manifest_of)):
                if text := noted.get(key.encode()):
                    manifest[key.rpartition(".")[2]] = read(text.decode())
        return manifest

    def fault(self, error: Exception, request: str) -> Fault:
        """What an error of Lance means, without a line of its source."""
        kind = SinkUnavailableError if _PASSING.search(str(error)) else SinkError
        return Fault(words=f"refused {request}: " + re.split(r", /|\n", str(error))[0], kind=kind)

    def release(self) -> None:
        """A folder is not held open."""
        self.client = None


class LanceDBDriver(TableDriver[str]):
    """The requests of a sink."""

    datatypes: ClassVar[Mapping[str, Any]] = {"float32": pa.float32(), "float16": pa.float16()}
    indexes = ("IVF_PQ", "IVF_HNSW_SQ")

    def __init__(
        self, connection: LanceDBConnection, *, fields: str | None, datatype: str | None, index: str | None
    ) -> None:
        self.connection: LanceDBConnection = connection
        super().__init__(fields=fields, datatype=datatype, index=index)

    def create(self, manifest: CollectionManifest) -> None:
        """Create the table."""
        kinds = dict.fromkeys(("pk", "id", "text", "content_hash"), pa.string())
        kinds |= {"metadata": pa.json_(), "labels": pa.list_(pa.string())}
        kinds |= {vector_name(d): pa.list_(self.datatypes[self.datatype], d) for d in manifest.dimensions}
        schema = pa.schema(kinds.items(), metadata={MANIFEST_KEY: json.dumps(manifest.to_dict())})
        self.connection.client.create_table(self.connection.collection, schema=schema)

    def store_manifest(self, manifest: CollectionManifest) -> None:
        """Note the runs and the succession: metadata of a column can be changed, and that of a table cannot."""
        runs = json.dumps([note.to_json() for note in manifest.runs])
        succession = "" if manifest.succession is None else json.dumps(manifest.succession.to_dict())
        noted = {_RUN: manifest.run, _RUNS: runs, _SUCCESSION: succession}
        self.connection.table().update_field_metadata({"path": "pk", "metadata": noted})

    def drop(self) -> None:
        """Delete the table."""
        self.connection.client.drop_table(self.connection.collection)

    def stored_datatype(self, manifest: CollectionManifest) -> str:
        """The datatype of its vectors."""
        stored = self.connection.table().schema.field(vector_name(manifest.dimensions[0])).type.value_type
        return next(name for name, kind in self.datatypes.items() if kind == stored)

    def pack(self, rows: FloatArray) -> pa.Array:
        """A column of lists of one size."""
        return pa.FixedSizeListArray.from_arrays(pa.array(rows.astype(self.datatype).ravel()), rows.shape[1])

    def upsert(self, batch: WriteBatch) -> None:
        """Write a version of the table."""
        columns = self.columns(batch)
        columns["metadata"] = pa.ExtensionArray.from_storage(pa.json_(), pa.array(columns["metadata"], pa.string()))
        found = [labels(record.metadata) for record in batch.records]
        rows = pa.table({**columns, "labels": pa.array(found, pa.list_(pa.string()))})
        merge = self.connection.table().merge_insert("pk")
        merge.when_matched_update_all().when_not_matched_insert_all().execute(rows)

    def flush(self) -> None:
        """Count a write, and merge the fragments of many."""
        super().flush()
        if self.writes % _WRITES == 0:
            self.connection.request("a merge of its files", self.tidy)

    def tidy(self) -> None:
        """Merge fragments, and index the ids: else every write reads every id."""
        self.connection.table().optimize(cleanup_older_than=_KEPT)
        self._index_columns({"pk": BTree()})

    def build_index(self, width: int, index: str) -> None:
        """Index the vectors of a width, and the labels."""
        kind = IvfPq if index == "IVF_PQ" else HnswSq
        self._index_columns({vector_name(width): kind(distance_type="cosine"), "labels": LabelList()})

    def query(self, plan: SearchPlan, condition: str | None, manifest: CollectionManifest) -> list[Hit]:
        """The hits of a search."""
        width, limit = (plan.full, plan.k) if plan.coarse is None else (plan.coarse, plan.candidates)
        search = self.connection.table().search(plan.vectors[width], vector_column_name=vector_name(width))
        search = search.distance_type("cosine").limit(limit).refine_factor(10)
        search = search.where(condition, prefilter=True) if condition else search
        found = search.select(["pk", "id", "text", "metadata", vector_name(plan.full), "_distance"]).to_arrow()
        flat = found.column(vector_name(plan.full)).combine_chunks().flatten().to_numpy(zero_copy_only=False)
        vectors = flat.astype(np.float32).reshape(-1, plan.full)  # [candidates, width]
        scores = vectors @ plan.vectors[plan.full] / np.linalg.norm(vectors, axis=1)
        best = np.argsort(-scores, kind="stable")[: plan.k]
        columns = [found.column(n).take(best).to_pylist() for n in range(4)]
        return self.hits(zip(*columns, scores[best], strict=True), manifest)

    def delete(self, which: Sequence[str] | str, manifest: CollectionManifest) -> None:
        """Delete rows."""
        self.connection.table().delete(which if isinstance(which, str) else f"pk IN ({quoted(which)})")

    def count(self) -> int:
        """How many rows there are."""
        return int(self.connection.table().count_rows())

    def select(self, row_ids: Sequence[str], columns: Sequence[str], widths: Sequence[int]) -> Iterable[Sequence[Any]]:
        """These columns of these rows, and then their vectors."""
        names = [*columns, *map(vector_name, widths)]
        search = self.connection.table().search().where(f"pk IN ({quoted(row_ids)})").select(names).limit(len(row_ids))
        return [[row[name] for name in names] for row in search.to_arrow().to_pylist()]

    def scan(self, manifest: CollectionManifest) -> Iterator[list[tuple[str, str]]]:
        """Pages of row ids and record ids."""
        for batch in self.connection.table().search().select(["pk", "id"]).to_batches(self.connection.max_rows):
            yield list(zip(batch["pk"].to_pylist(), batch["id"].to_pylist(), strict=True))

    def raw_fields(self) -> list[VectorField]:
        """The dense vectors of any table."""
        return raw_fields(self.connection.table())

    def raw_pages(self, field: VectorField) -> Iterator[RawPage]:
        """Rows of any table."""
        return raw_pages(self.connection.table(), field)

    def condition(self, filter: Mapping[str, object] | str | None, manifest: CollectionManifest) -> str:
        """A condition in SQL."""
        return to_condition(filter)

    def is_exact(self, conditions: Mapping[str, Condition]) -> bool:
        """Whether the condition in SQL matches no other rows."""
        return all(is_exact(key, condition) for key, condition in conditions.items())

    def matching(self, condition: str, manifest: CollectionManifest) -> Iterator[list[tuple[str, Any]]]:
        """Pages of row ids and metadata."""
        search = self.connection.table().search().where(condition).select(["pk", "metadata"])
        for batch in search.to_batches(self.connection.max_rows):
            rows = zip(batch["pk"].to_pylist(), batch["metadata"].to_pylist(), strict=True)
            yield [(row_id, json.loads(metadata)) for row_id, metadata in rows]

    def _index_columns(self, kinds: Mapping[str, Any]) -> None:
        table = self.connection.table()
        indexed = {name for each in table.list_indices() for name in each.columns}
        for column in kinds.keys() - indexed:
            table.create_index(column, config=kinds[column])
