"""MilvusSink: a collection of Milvus, with one vector field for each Matryoshka width."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

from pymilvus import AnnSearchRequest, MilvusClient, RRFRanker

from millpond.errors import InvalidRequestError, SinkError
from millpond.ingest.record import Record, point_id
from millpond.ingest.sinks.batch import WriteBatch
from millpond.ingest.sinks.collection import CollectionSink
from millpond.ingest.sinks.database import check_options
from millpond.ingest.sinks.driver import CollectionDriver
from millpond.ingest.sinks.fields import check_fields
from millpond.ingest.sinks.manifest import MANIFEST_KEY, CollectionManifest
from millpond.ingest.sinks.protocol import StoredRow, vector_name
from millpond.ingest.sinks.raw_rows import RawPage, VectorField
from millpond.ingest.sinks.search import Hit, SearchPlan
from millpond.support.filters import Condition, check_filter
from millpond_milvus.connection import MilvusConnection
from millpond_milvus.filters import is_exact, one_of, to_expression
from millpond_milvus.layout import SCHEMAS, RowLayout, key_of, token_weights, weights_of
from millpond_milvus.options import OPTIONS_KEY, PARTITION, SPARSE, VectorOptions
from millpond_milvus.raw_rows import raw_fields, raw_pages
from millpond_milvus.url import MilvusOptions

logger = logging.getLogger(__name__)

# Rows of one page of a scan, which has no texts.
_SCANNED = 10_000
# Rows of one request that reads texts and metadata, of at most 64 KiB each.
_READ_ROWS = 200
# More rows than this are too many for Milvus Lite, which looks at each of them.
_LITE_ROWS = 200_000
# The k of reciprocal rank fusion.
_RRF = 60


class MilvusSink(CollectionSink[str]):
    """Writes to one collection of Milvus, and searches it.

    The first write creates the collection: a vector field ``d{width}`` for every width, the metric COSINE (an exact
    index in Milvus Lite, AUTOINDEX on a server), and the model's fingerprint in its properties. A search is two
    requests; it returns at most 16,384 hits out of as many candidates. Milvus Lite cannot tell ``True`` from 1, or
    ``False`` from 0, in a filter. After a write to a file of Milvus Lite that failed, no sink and no index of this
    process writes to it until it is opened again.

    Args:
        uri: A ``*.db`` file (Milvus Lite, inside this process), a server's URL, or a ``MilvusClient`` (which
            :meth:`close` leaves open). A server's token comes from ``MILVUS_TOKEN``; the URL's path names the database.
        collection: Name of the collection: letters, digits and underscores.
        options: See :class:`~millpond_milvus.url.MilvusOptions`.

    Raises:
        InvalidRequestError: A location, name or option that is not valid, or one that Milvus Lite does not have.
        MissingExtraError: The uri is a file and milvus-lite is not installed, or a data type needs ml_dtypes.
        SinkError: The server does not answer, or another process has the file open.
    """

    def __init__(
        self, uri: str | os.PathLike[str] | MilvusClient, collection: str, **options: Unpack[MilvusOptions]
    ) -> None:
        check_options("MilvusSink", options, MilvusOptions.__annotations__)
        fields = options.get("fields")
        connection = MilvusConnection(uri, collection, timeout=options.get("timeout", 60))
        layout = RowLayout.of(check_fields(fields or "plain"), options)
        super().__init__(
            MilvusDriver(connection, layout),
            dimensions=options.get("dimensions"),
            fields=fields,
            hybrid=layout.hybrid,
        )
        self.options = {**options}
        connection.open()
        try:
            if connection.embedded:
                layout.options.check_lite()
        except InvalidRequestError:
            self.close()
            raise


class MilvusDriver(CollectionDriver[str]):
    """A row for each record, with a vector field for each width."""

    hybrids = True
    max_results = 16_384

    def __init__(self, connection: MilvusConnection, layout: RowLayout) -> None:
        self.connection: MilvusConnection = connection
        self._name = connection.collection
        self._layout = layout
        self._stored_options: VectorOptions | None = None
        self._rows: int | None = None  # of a file of Milvus Lite, and those written since they were counted

    def check(self, record: Record, widths: Sequence[int]) -> None:
        """Raise InvalidRequestError for a record that Milvus cannot store, such as a text of over 65,535 bytes."""
        self._layout.fields(record, point_id(record.id, record.chunk), widths)

    def create(self, manifest: CollectionManifest) -> None:
        """Create the collection, where the server has what its options need."""
        self._layout = replace(self._layout, schema=SCHEMAS[manifest.fields])
        self.connection.check_needs(self._layout.needs(manifest.dimensions))
        options = self._layout.options.to_property()
        self.connection.call(
            "create_collection",
            self._name,
            schema=self._layout.collection_schema(manifest.dimensions),
            properties={
                MANIFEST_KEY: json.dumps(manifest.to_dict()),
                **({} if options is None else {OPTIONS_KEY: options}),
            },
            consistency_level="Session",  # a search sees what this client wrote
            **({} if self._layout.options.partitions is None else {"num_partitions": self._layout.options.partitions}),
        )

    def prepare(self, manifest: CollectionManifest) -> None:
        """Take the field layout, check the options, and index what a new collection, or an interrupted one, lacks."""
        self._layout = replace(self._layout, schema=SCHEMAS[manifest.fields])
        self.connection.request("a look at the collection", self._read_options)
        self._layout.options.check_write(self._read_options(), collection=self._name)
        self.connection.request("indexing the collection", lambda: self._index(manifest))

    @property
    def exhaustive(self) -> bool:
        """Milvus Lite compares every row, and looks for candidates among their keys besides."""
        return self.connection.embedded

    def load(self) -> None:
        """Make the collection ready to be read."""
        self.connection.load()

    def upsert(self, batch: WriteBatch) -> None:
        """Store rows.

        A server's upsert replaces a row, and its insert may duplicate it; Lite's insert replaces a row, and its upsert
        merges the old metadata into the new.
        """
        rows = self._layout.rows(batch)
        method = "insert" if self.connection.embedded else "upsert"
        with self.connection.changing():
            answer = self.connection.call(method, self._name, rows, retry_on_rate_limit=False)
            count = answer.get(f"{method}_count")
            if count != len(rows):
                raise SinkError(
                    f"Milvus at {self.connection.where} acknowledged {count} of {len(rows)} rows of an upsert, and "
                    "does not say which; write them again"
                )
        if self.connection.embedded:
            self._warn_of_size(len(rows))

    def delete(self, which: Sequence[str] | str, manifest: CollectionManifest) -> None:
        """Delete rows."""
        expression = which if isinstance(which, str) else one_of(SCHEMAS[manifest.fields].primary, which)
        with self.connection.changing():
            self.connection.call("delete", self._name, filter=expression)

    def count(self) -> int:
        """How many rows there are."""
        return self.connection.count()

    def size(self) -> int:
        """How many rows the server has counted, of a collection that need not be loaded."""
        return int(self.connection.call("get_collection_stats", self._name)["row_count"])

    def datatype_of(self, manifest: CollectionManifest) -> str:
        """The data type of the vectors."""
        return self._read_options().datatype

    def query(self, plan: SearchPlan, condition: str | None, manifest: CollectionManifest) -> list[Hit]:
        """The hits of a search, in one request for each stage."""
        self.connection.seal()
        schema = SCHEMAS[manifest.fields]
        within = condition
        if plan.coarse is not None:
            candidates = self._nearest(
                plan, plan.coarse, min(plan.candidates, self.max_results), condition, [schema.primary]
            )
            if not candidates and not plan.hybrid:
                return []
            within = one_of(schema.primary, [key_of(row, schema.primary) for row in candidates])
        fields = schema.output_fields()
        rows = (
            self._fused(plan, within, condition, fields)
            if plan.hybrid
            else self._nearest(plan, plan.full, plan.k, within, fields)
        )
        return [self._hit(row, manifest) for row in rows]

    def fetch(
        self, row_ids: Sequence[str], widths: Sequence[int], manifest: CollectionManifest
    ) -> dict[str, StoredRow]:
        """Those of these rows that exist."""
        schema, options = SCHEMAS[manifest.fields], self._read_options()
        rows: dict[str, StoredRow] = {}
        names = [*schema.identity_fields(), *_sparse_field(widths, manifest)]
        for row in self._query(row_ids, widths, names, self.connection.max_rows):
            point = str(row[schema.primary])
            with self.reading(point, manifest):
                record_id, content_hash = schema.identity(row)
                rows[point] = StoredRow(
                    record_id=record_id,
                    content_hash=content_hash,
                    vectors=_vectors(row, widths, options),
                    sparse=weights_of(row[SPARSE]) if SPARSE in names else None,
                )
        return rows

    def read(self, row_ids: Sequence[str], widths: Sequence[int], manifest: CollectionManifest) -> dict[str, StoredRow]:
        """The same with texts and metadata; of a row that cannot be read both are empty."""
        schema, options = SCHEMAS[manifest.fields], self._read_options()
        layout = RowLayout(schema=schema, options=options, hybrid=manifest.sparse is not None)
        added = layout.added_fields(manifest.dimensions)
        fields = [*schema.identity_fields(), *schema.output_fields(), *_sparse_field(widths, manifest)]
        fields = list(dict.fromkeys(fields))
        rows: dict[str, StoredRow] = {}
        for row in self._query(row_ids, widths, fields, _READ_ROWS):
            point = str(row[schema.primary])
            text, metadata = schema.content(row, added)
            with self.reading(point, manifest):
                record_id, content_hash = schema.identity(row)
                rows[point] = StoredRow(
                    record_id=record_id,
                    content_hash=content_hash,
                    vectors=_vectors(row, widths, options),
                    text=text,
                    metadata=metadata,
                    sparse=weights_of(row[SPARSE]) if SPARSE in fields else None,
                )
        return rows

    def store_manifest(self, manifest: CollectionManifest) -> None:
        """Replace the manifest in the collection's properties."""
        properties = {MANIFEST_KEY: json.dumps(manifest.to_dict())}
        with self.connection.changing():
            self.connection.call("alter_collection_properties", self._name, properties=properties)
        self.connection.seal()  # a run stores it after its last write: then no search waits for that

    def drop(self) -> None:
        """Delete the collection."""
        with self.connection.changing():
            self.connection.call("drop_collection", self._name)

    def move_aliases(self, to: str, *, but: str) -> None:
        """Let the aliases of the collection name another one, each in one step."""
        for alias in self.connection.call("list_aliases", self._name)["aliases"]:
            if alias != but:
                self.connection.call("alter_alias", to, alias)

    def _query(
        self, row_ids: Sequence[str], widths: Sequence[int], fields: list[str], most: int
    ) -> Iterator[Mapping[str, Any]]:
        """These fields and vectors of these rows, at most so many rows at a time."""
        primary = SCHEMAS[self._layout.schema.form].primary
        vector_bytes = self.connection.float_bytes * max(1, sum(widths))
        size = max(1, min(most, self.connection.max_bytes // vector_bytes))
        for start in range(0, len(row_ids), size):
            part = list(row_ids[start : start + size])
            names = [*fields, *map(vector_name, widths)]
            yield from self.connection.call("query", self._name, filter=one_of(primary, part), output_fields=names)

    def scan(self, manifest: CollectionManifest) -> Iterator[list[tuple[str, str]]]:
        """Pages of row ids and record ids."""
        schema = SCHEMAS[manifest.fields]
        for page in self.connection.pages("", schema.identity_fields(), size=_SCANNED):
            ids = []
            for row in page:
                point = str(row[schema.primary])
                with self.reading(point, manifest):
                    ids.append((point, schema.identity(row)[0]))
            yield ids

    def matching(self, condition: str, manifest: CollectionManifest) -> Iterator[list[tuple[str, dict[str, Any]]]]:
        """Pages of row ids and metadata."""
        schema = SCHEMAS[manifest.fields]
        for page in self.connection.pages(condition, [schema.primary, *schema.output_fields()], size=_SCANNED):
            found = []
            for row in page:
                point = str(row[schema.primary])
                with self.reading(point, manifest):
                    found.append((point, schema.record_fields(row, point)[2]))
            yield found

    def is_exact(self, conditions: Mapping[str, Condition]) -> bool:
        """Whether an expression matches no other rows."""
        return is_exact(conditions, lite=self.connection.embedded)

    def row_ids(self, record_id: str, manifest: CollectionManifest) -> list[str]:
        """The ids of the rows that a record may have: one that a framework wrote has its own, which its hit shows."""
        written = [point_id(record_id)]
        return written if manifest.fields == "plain" else [*written, record_id]

    def ranks_texts(self) -> bool:
        """Whether Milvus makes sparse vectors of the texts (BM25)."""
        return self._options().lexical

    def condition(self, filter: Mapping[str, object] | str | None, manifest: CollectionManifest) -> str:
        """An expression of Milvus."""
        options = self._options()
        layout = RowLayout(schema=SCHEMAS[manifest.fields], options=options, hybrid=manifest.sparse is not None)
        expression = to_expression(filter, layout.schema, vectors=layout.added_fields(manifest.dimensions))
        if isinstance(filter, Mapping) and options.partition_key is not None and options.partition_key in filter:
            values = check_filter(filter)[options.partition_key]
            # Milvus then reads their partitions only.
            if isinstance(values, tuple) and all(isinstance(value, str) for value in values):
                return f"{one_of(PARTITION, [str(value) for value in values])} and {expression}"
        return expression

    def raw_fields(self) -> list[VectorField]:
        """The dense vectors of any collection."""
        return raw_fields(self.connection)

    def raw_pages(self, field: VectorField) -> Iterator[RawPage]:
        """Rows of any collection."""
        self.load()
        return raw_pages(self.connection, field)

    # ----------------------------------------------------------------------------------------------------------

    def _index(self, manifest: CollectionManifest) -> None:
        options = self._layout.options
        indexed = self.connection.call("list_indexes", self._name)
        lite = self.connection.embedded
        wanted = {vector_name(width): options.index(width, lite=lite) for width in manifest.dimensions}
        if self._layout.sparse:
            metric = "BM25" if options.lexical else "IP"
            wanted[SPARSE] = {"index_type": "SPARSE_INVERTED_INDEX", "metric_type": metric}
        for name in sorted(wanted.keys() - set(indexed)):
            index = MilvusClient.prepare_index_params()
            index.add_index(name, index_name=name, **wanted[name])
            # sync would poll twice a second, and a collection without rows has nothing to wait for.
            self.connection.call("create_index", self._name, index, sync=False)

    def _options(self) -> VectorOptions:
        """What the collection was created with, as a request."""
        return self._stored_options or self.connection.request("a look at the collection", self._read_options)

    def _read_options(self) -> VectorOptions:
        if self._stored_options is None:
            properties = self.connection.call("describe_collection", self._name).get("properties") or {}
            self._stored_options = VectorOptions.from_property(properties.get(OPTIONS_KEY), collection=self._name)
        return self._stored_options

    def _fused(self, plan: SearchPlan, dense: str | None, sparse: str | None, fields: list[str]) -> list[Any]:
        """The rows of two rankings, by vectors and by tokens, each of an expression, fused by reciprocal rank."""
        limit = min(plan.candidates, self.max_results)
        lexical = self._read_options().lexical
        question: Any = plan.question if lexical else token_weights(plan.sparse or {})
        if not question:  # a question without tokens has no ranking by them
            rows = self._nearest(plan, plan.full, plan.k, dense, fields)
            for rank, row in enumerate(rows, start=1):
                row["distance"] = 1 / (_RRF + rank)
            return rows
        requests = [
            AnnSearchRequest(
                data=[self._read_options().encode_query(plan.vectors[plan.full])],
                anns_field=vector_name(plan.full),
                param=self._read_options().search_params(limit, lite=self.connection.embedded),
                limit=limit,
                expr=dense or None,
            ),
            AnnSearchRequest(
                data=[question],
                anns_field=SPARSE,
                param={"metric_type": "BM25" if lexical else "IP"},
                limit=limit,
                expr=sparse or None,
            ),
        ]
        results = self.connection.call(
            "hybrid_search", self._name, requests, RRFRanker(_RRF), limit=plan.k, output_fields=fields
        )
        return list(results[0])

    def _nearest(
        self, plan: SearchPlan, width: int, limit: int, expression: str | None, fields: list[str]
    ) -> list[Any]:
        options = self._read_options()
        results = self.connection.call(
            "search",
            self._name,
            data=[options.encode_query(plan.vectors[width])],
            anns_field=vector_name(width),
            limit=limit,
            filter=expression or "",
            search_params=options.search_params(limit, lite=self.connection.embedded),
            output_fields=fields,
        )
        return list(results[0])

    def _hit(self, row: Mapping[str, Any], manifest: CollectionManifest) -> Hit:
        schema = SCHEMAS[manifest.fields]
        point = key_of(row, schema.primary)
        with self.reading(point, manifest):
            record_id, text, metadata = schema.record_fields(row["entity"], point)
        return Hit(id=record_id, score=float(row["distance"]), text=text, metadata=metadata)

    def _warn_of_size(self, written: int) -> None:
        """Say once that a collection has outgrown Milvus Lite."""
        file = self.connection.file
        if file is None or self._name in file.warned:
            return
        # What was written since the last count may have replaced rows.
        if self._rows is None or (self._rows + written) > _LITE_ROWS:
            self._rows = self.count()
        else:
            self._rows += written
        if self._rows > _LITE_ROWS:
            file.warned.add(self._name)
            logger.warning(
                "collection %r of Milvus Lite at %s holds more than %d rows, and Milvus Lite compares a question with "
                "each; start a server and ingest there: --to milvus+http://localhost:19530#%s (with --cache nothing is "
                "embedded again)",
                self._name,
                self.connection.where,
                _LITE_ROWS,
                self._name,
            )


def _sparse_field(widths: Sequence[int], manifest: CollectionManifest) -> list[str]:
    """The field of the sparse vectors, where there are such and vectors are asked for."""
    return [SPARSE] if widths and manifest.sparse is not None else []


def _vectors(row: Mapping[str, Any], widths: Sequence[int], options: VectorOptions) -> dict[int, Any]:
    names = {width: vector_name(width) for width in widths}
    return {width: options.decode(row[name]) for width, name in names.items() if row.get(name) is not None}
