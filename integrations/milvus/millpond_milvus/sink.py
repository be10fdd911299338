"""MilvusSink: a collection of Milvus, with one vector field for each Matryoshka width."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal

from pymilvus import AnnSearchRequest, MilvusClient, RRFRanker

from millpond.errors import InvalidRequestError, SinkError
from millpond.ingest.record import Record, point_id
from millpond.ingest.sinks.batch import WriteBatch
from millpond.ingest.sinks.collection import CollectionSink
from millpond.ingest.sinks.location import is_url
from millpond.ingest.sinks.manifest import MANIFEST_KEY, CollectionManifest
from millpond.ingest.sinks.payload import FieldLayout
from millpond.ingest.sinks.protocol import StoredRow, vector_name
from millpond.ingest.sinks.search import Hit, SearchPlan
from millpond.metadata import check_filter
from millpond.spec import ModelSpec
from millpond_milvus.client import URL_SCHEMES
from millpond_milvus.collection import MilvusCollection
from millpond_milvus.filters import one_of, to_expression
from millpond_milvus.layout import RowLayout, token_weights
from millpond_milvus.lite import lite_lock
from millpond_milvus.options import OPTIONS_KEY, PARTITION, SPARSE, VectorOptions
from millpond_milvus.schema import SCHEMAS

if TYPE_CHECKING:
    from millpond.engine.engine import Engine

logger = logging.getLogger(__name__)

# Rows of one page of a scan, which has no texts.
_SCANNED = 10_000
# More rows than this are too many for Milvus Lite, which looks at each of them.
_LITE_ROWS = 200_000
# The k of reciprocal rank fusion.
_RRF = 60


class MilvusSink(MilvusCollection, CollectionSink[str]):
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
        dimensions: The widths to store and search; by default the width that ``embed`` returns (full, for nearly every
            model). A search without them uses every width that the collection has.
        fields: ``plain`` (fields ``pk``, ``id``, ``text``, ``metadata``, ``content_hash``), ``langchain`` (``pk``,
            ``text``, the metadata's keys, ``record_id``, ``content_hash``) or ``llama_index`` (the fields of
            LlamaIndex's store).
        timeout: Seconds that any call of the client may take, with all that it sends and repeats.
        hybrid: ``True`` stores the sparse vectors of an engine in the field ``sparse``; ``"bm25"`` lets Milvus make
            them of the text, for which a search needs no sparse engine.
        datatype: How a server stores vectors: ``float32``, ``float16``, ``bfloat16`` (needs ml_dtypes) or ``int8``.
        index_type: A server's index: ``AUTOINDEX``, ``FLAT``, ``HNSW`` or ``IVF``.
        index_quantization: Of a server's index: ``scalar`` (HNSW_SQ, IVF_SQ8), ``product`` (HNSW_PQ, IVF_PQ) or
            ``binary`` (IVF_RABITQ).
        partition_key: A metadata key with str values, by which rows are put together; a filter on it reads only theirs.
        partitions: How many partitions there are for its values, 16 by default.

    Raises:
        InvalidRequestError: A location, name or option that is not valid, or one that Milvus Lite does not have.
        MissingExtraError: The uri is a file and milvus-lite is not installed, or a data type needs ml_dtypes.
        SinkError: The server does not answer, or another process has the file open.
    """

    max_results = 16_384
    hybrids = True

    def __init__(
        self,
        uri: str | os.PathLike[str] | MilvusClient,
        collection: str,
        *,
        dimensions: Sequence[int] | None = None,
        fields: str = "plain",
        timeout: float = 60,
        hybrid: bool | Literal["bm25"] = False,
        datatype: str = "float32",
        index_type: str | None = None,
        index_quantization: str | None = None,
        partition_key: str | None = None,
        partitions: int | None = None,
    ) -> None:
        client = uri if isinstance(uri, MilvusClient) else None
        path = None if isinstance(uri, MilvusClient) else uri
        if not isinstance(hybrid, bool) and hybrid != "bm25":
            raise InvalidRequestError(f"hybrid={hybrid!r} is unknown; choose one of False, True, 'bm25'")
        super().__init__(
            path, collection, dimensions=dimensions, fields=fields, owned=client is None, hybrid=hybrid is True
        )
        self._options = VectorOptions(
            datatype=datatype,
            index_type=index_type,
            index_quantization=index_quantization,
            partition_key=partition_key,
            partitions=partitions,
            lexical=hybrid == "bm25",
        )
        self._layout = RowLayout(schema=SCHEMAS[self._fields], options=self._options, hybrid=self._hybrid)
        self._stored_options: VectorOptions | None = None
        self._connect(client, timeout)
        try:
            if self._lite:
                self._options.check_lite()
        except InvalidRequestError:
            self.close()
            raise
        self._rows: int | None = None  # of a file of Milvus Lite, and those written since they were counted

    def prepare(self, spec: ModelSpec, *, sparse: ModelSpec | None = None, chunked: bool = False) -> None:
        """Create the collection and its indexes, or check that they fit: see :meth:`CollectionSink.prepare`."""
        with nullcontext() if is_url(self._where, URL_SCHEMES) else lite_lock:
            super().prepare(spec, sparse=sparse, chunked=chunked)

    @property
    def embedded(self) -> bool:
        """Whether this is Milvus Lite."""
        return self._lite

    @property
    def fusible(self) -> bool:
        """Whether the opened collection has sparse vectors, or Milvus makes them of the texts (BM25)."""
        return super().fusible or (self._manifest is not None and self._read_options().lexical)

    def check(self, record: Record) -> None:
        """Raise InvalidRequestError for a record that Milvus cannot store, such as a text of over 65,535 bytes."""
        widths = self._manifest.dimensions if self._manifest is not None else self._dimensions or ()
        self._layout.fields(record, point_id(record.id, record.chunk), widths)

    def _create(self, manifest: CollectionManifest) -> None:
        options = self._options.to_property()
        self._call(
            "create_collection",
            self._collection,
            schema=self._layout.collection_schema(manifest.dimensions),
            properties={
                MANIFEST_KEY: json.dumps(manifest.to_dict()),
                **({} if options is None else {OPTIONS_KEY: options}),
            },
            consistency_level="Session",  # a search sees what this client wrote
            **({} if self._options.partitions is None else {"num_partitions": self._options.partitions}),
        )

    def _prepare(self, manifest: CollectionManifest) -> None:
        self._options.check_write(self._read_options(), collection=self._collection)
        # Fields without an index: those of a new collection, or of one whose creation was interrupted.
        with self._request("indexing the collection"):
            indexed = self._call("list_indexes", self._collection)
            wanted = {vector_name(width): self._options.index(width, lite=self._lite) for width in manifest.dimensions}
            if self._layout.sparse:
                metric = "BM25" if self._options.lexical else "IP"
                wanted[SPARSE] = {"index_type": "SPARSE_INVERTED_INDEX", "metric_type": metric}
            for name in sorted(wanted.keys() - set(indexed)):
                index = MilvusClient.prepare_index_params()
                index.add_index(name, index_name=name, **wanted[name])
                # sync would poll twice a second, and a collection without rows has nothing to wait for.
                self._call("create_index", self._collection, index, sync=False)

    def _load(self) -> None:
        self._load_collection()

    def _read_options(self) -> VectorOptions:
        """What the collection was created with."""
        if self._stored_options is None:
            with self._request("a look at the collection"):
                properties = self._call("describe_collection", self._collection).get("properties") or {}
            self._stored_options = VectorOptions.from_property(properties.get(OPTIONS_KEY), collection=self._collection)
        return self._stored_options

    def _encode(self, batch: WriteBatch) -> list[dict[str, Any]]:
        return self._layout.rows(batch)

    def _upsert(self, rows: list[dict[str, Any]]) -> None:
        # A server's upsert replaces a row, and its insert may duplicate it; Lite's insert replaces a row, and its
        # upsert merges the old metadata into the new.
        method = "insert" if self._lite else "upsert"
        with self._changes():
            answer = self._call(method, self._collection, rows, retry_on_rate_limit=False)
            count = answer.get(f"{method}_count")
            if count != len(rows):
                raise SinkError(
                    f"Milvus at {self._where} acknowledged {count} of {len(rows)} rows of an upsert, and does not say "
                    "which; write them again"
                )
        if self._lite:
            self._warn_of_size(len(rows))

    def _query(self, plan: SearchPlan, native: str | None, fields: FieldLayout) -> list[Any]:
        schema = SCHEMAS[fields]
        within = native
        if plan.coarse is not None:
            candidates = self._nearest(
                plan, plan.coarse, min(plan.candidates, self.max_results), native, [schema.primary]
            )
            if not candidates and not plan.hybrid:
                return []
            within = one_of(schema.primary, [str(row[schema.primary]) for row in candidates])
        if not plan.hybrid:
            return self._nearest(plan, plan.full, plan.k, within, schema.output_fields())
        return self._fused(plan, within, native, schema.output_fields())

    def _fused(self, plan: SearchPlan, dense: str | None, sparse: str | None, fields: list[str]) -> list[Any]:
        """The rows of two rankings, fused by reciprocal rank.

        Args:
            plan: The search.
            dense: Finds the rows that are ranked by their vectors.
            sparse: Finds those that are ranked by their tokens.
            fields: The fields to return.
        """
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
                param=self._read_options().search_params(limit, lite=self._lite),
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
        results = self._call(
            "hybrid_search", self._collection, requests, RRFRanker(_RRF), limit=plan.k, output_fields=fields
        )
        return list(results[0])

    def _decode(self, row: Mapping[str, Any], fields: FieldLayout) -> Hit:
        schema = SCHEMAS[fields]
        point = str(row[schema.primary])
        with self._reading(point, fields):
            record_id, text, metadata = schema.record_fields(row["entity"], point)
        return Hit(id=record_id, score=float(row["distance"]), text=text, metadata=metadata)

    def _nearest(
        self, plan: SearchPlan, width: int, limit: int, expression: str | None, fields: list[str]
    ) -> list[Any]:
        options = self._read_options()
        results = self._call(
            "search",
            self._collection,
            data=[options.encode_query(plan.vectors[width])],
            anns_field=vector_name(width),
            limit=limit,
            filter=expression or "",
            search_params=options.search_params(limit, lite=self._lite),
            output_fields=fields,
        )
        return list(results[0])

    def _delete(self, which: Sequence[str] | str, fields: FieldLayout) -> None:
        expression = which if isinstance(which, str) else one_of(SCHEMAS[fields].primary, which)
        with self._changes():
            self._call("delete", self._collection, filter=expression)

    def _fetch(self, row_ids: Sequence[str], widths: Sequence[int], fields: FieldLayout) -> dict[str, StoredRow]:
        schema, options = SCHEMAS[fields], self._read_options()
        names = {width: vector_name(width) for width in widths}
        rows: dict[str, StoredRow] = {}
        size = max(1, min(self.max_rows, self.max_bytes // (self.float_bytes * max(1, sum(widths)))))
        for start in range(0, len(row_ids), size):
            part = list(row_ids[start : start + size])
            for row in self._call(
                "query",
                self._collection,
                filter=one_of(schema.primary, part),
                output_fields=[*schema.identity_fields(), *names.values()],
            ):
                point = str(row[schema.primary])
                with self._reading(point, fields):
                    record_id, content_hash = schema.identity(row)
                    rows[point] = StoredRow(
                        record_id=record_id,
                        content_hash=content_hash,
                        vectors={
                            width: options.decode(row[name])
                            for width, name in names.items()
                            if row.get(name) is not None
                        },
                    )
        return rows

    def _scan(self, fields: FieldLayout) -> Iterator[list[tuple[str, str]]]:
        schema = SCHEMAS[fields]
        for page in self._pages_of("", schema.identity_fields(), size=_SCANNED):
            ids = []
            for row in page:
                point = str(row[schema.primary])
                with self._reading(point, fields):
                    ids.append((point, schema.identity(row)[0]))
            yield ids

    def _row_ids(self, record_id: str) -> list[str]:
        written = [point_id(record_id)]
        # A row that a framework wrote has its own id, which its hit shows.
        return written if self._manifest is None or self._manifest.fields == "plain" else [*written, record_id]

    def _to_native(self, filter: Mapping[str, object] | str | None, fields: FieldLayout) -> str:
        widths = () if self._manifest is None else self._manifest.dimensions
        options = self._read_options()
        layout = RowLayout(
            schema=SCHEMAS[fields],
            options=options,
            hybrid=self._manifest is not None and self._manifest.sparse is not None,
        )
        expression = to_expression(filter, layout.schema, vectors=layout.added_fields(widths))
        if isinstance(filter, Mapping) and options.partition_key is not None and options.partition_key in filter:
            values = check_filter(filter)[options.partition_key]
            if all(isinstance(value, str) for value in values):  # then Milvus reads their partitions only
                return f"{one_of(PARTITION, [str(value) for value in values])} and {expression}"
        return expression

    def _sparse_engine(self, manifest: CollectionManifest, engine: Engine) -> Engine | None:
        return None if self._read_options().lexical else super()._sparse_engine(manifest, engine)

    def _warn_of_size(self, written: int) -> None:
        """Say once that a collection has outgrown Milvus Lite."""
        assert self._file is not None
        if self._collection in self._file.warned:
            return
        # What was written since the last count may have replaced rows.
        if self._rows is None or (self._rows + written) > _LITE_ROWS:
            self._rows = self._count()
        else:
            self._rows += written
        if self._rows > _LITE_ROWS:
            self._file.warned.add(self._collection)
            logger.warning(
                "collection %r of Milvus Lite at %s holds more than %d rows, and Milvus Lite compares a question with "
                "each; start a server and ingest there: --to milvus+http://localhost:19530#%s (with --cache nothing is "
                "embedded again)",
                self._collection,
                self._where,
                _LITE_ROWS,
                self._collection,
            )
