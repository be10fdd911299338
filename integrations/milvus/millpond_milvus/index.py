"""MilvusIndex: token matrices in a collection of Milvus."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from heapq import nsmallest
from itertools import chain
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pymilvus import DataType, MilvusClient
from pymilvus.client.embedding_list import EmbeddingList

from millpond.errors import InvalidRequestError, SinkError
from millpond.ingest.record import point_id
from millpond.ingest.sinks.batch import slices
from millpond.ingest.sinks.index_manifest import IndexManifest, check_prefetch
from millpond.ingest.sinks.late_interaction import CollectionIndex, Found, IndexDriver, IndexQuery, IndexRow
from millpond.ingest.sinks.manifest import MANIFEST_KEY
from millpond.late_interaction.index.arguments import TokenEngine
from millpond.late_interaction.index.documents import Hit, IndexStats
from millpond.late_interaction.index.metadata_filter import MetadataTable
from millpond.late_interaction.scoring.exact import Tokens, score
from millpond.support.filters import Condition
from millpond.vectors.ragged import Ragged
from millpond_milvus.connection import MilvusConnection
from millpond_milvus.filters import is_exact, one_of, to_expression
from millpond_milvus.layout import MAX_JSON, MAX_VARCHAR, SCHEMAS, key_of
from millpond_milvus.rows import PATH, ROWS, VECTOR, pack, packed_tokens, struct_tokens, to_structs
from millpond_milvus.versions import TOKEN_VECTORS, Need

_PLAIN = SCHEMAS["plain"]
_FIELDS = [*_PLAIN.strings, "metadata", "tokens", "added"]
_METRIC = "MAX_SIM_IP"

# Of an array on a server.
_MAX_CAPACITY = 4096
# Of one search, or one page of a query, on a server.
_MAX_RESULTS = 16_384
# Characters of a field in Milvus Lite, which has no limit of its own; a request takes less.
_MAX_LITE = 1 << 26
_MAX_REQUEST = 63 << 20
# Bytes of rows that a search holds at a time.
_MAX_FETCHED = 32 << 20


class MilvusIndex(CollectionIndex):
    """A late-interaction index in one collection of Milvus.

    Milvus Lite has no token vectors. A document there is one row with a single vector, by which candidates are found,
    and its token rows as int8, which are compared in this process. On a server (2.6.4 or newer) the token rows are an
    array of structs, which Milvus indexes and compares by MaxSim itself; this has never run against such a server, only
    against a fake one that checks the requests. Primary keys are :func:`millpond.ingest.point_id` of the caller's id,
    and the other fields are the plain ones of :class:`~millpond_milvus.MilvusSink`.

    The first ``add`` creates the collection; its properties hold the model's fingerprint, width, pooling and encodings.
    A call of ``add`` may be several requests, so a reader may see a part of it. A server stores at most 4,096 rows of a
    document, and 65,535 bytes of text.

    Args:
        uri: A ``*.db`` file (Milvus Lite, inside this process), a server's URL, or a ``MilvusClient`` (which
            :meth:`close` leaves open). A server's token comes from ``MILVUS_TOKEN``.
        collection: Name of the collection: letters, digits and underscores.
        engine: An engine that serves ``token_embed``; ``None`` for an index that is given embeddings only.
        prefetch: The vector by which Milvus Lite finds candidates: ``"muvera"``, encodings of 2,560 dimensions whose
            dot product approximates MaxSim, or ``"dense"``, the mean of the token rows. A server needs none.
        dimensions: Columns to keep of every row; ``None`` keeps all, or those that the collection has.
        pool_factor: Mean tokens of a document that become one row; ``None`` is the collection's factor, and 1 for a
            new one.
        timeout: Seconds any request may take; without a limit the client would retry for minutes.

    Raises:
        TypeError: ``engine`` is not an engine.
        InvalidRequestError: A location, name or option that is not valid, or not that of the collection.
        FingerprintMismatchError: Another model built the collection, or it is no index.
        MissingExtraError: The uri is a file, and milvus-lite is not installed.
        SinkError: The server does not answer, or another process has the file open.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str] | MilvusClient,
        collection: str,
        engine: TokenEngine | None,
        *,
        prefetch: Literal["muvera", "dense"] = "muvera",
        dimensions: int | None = None,
        pool_factor: int | None = None,
        timeout: float = 60,
    ) -> None:
        connection = MilvusConnection(uri, collection, kind="index", timeout=timeout)
        check_prefetch(prefetch, MilvusIndexDriver.prefetches[:2])
        connection.open()
        try:
            connection.check_needs([Need(feature=TOKEN_VECTORS, option="MilvusIndex")])
        except InvalidRequestError:
            connection.close()
            raise
        codec, wanted = ("int8", prefetch) if connection.embedded else ("float32", "tokens")
        driver = MilvusIndexDriver(connection)
        super().__init__(driver, engine, codec=codec, prefetch=wanted, dimensions=dimensions, pool_factor=pool_factor)


class MilvusIndexDriver(IndexDriver):
    """A row for each document: its token rows, and in Milvus Lite a vector by which it becomes a candidate."""

    codecs = ("int8", "float32")
    prefetches = ("muvera", "dense", "tokens")
    least_candidates = 200  # Milvus Lite hands their rows to this process

    def __init__(self, connection: MilvusConnection) -> None:
        self.connection: MilvusConnection = connection
        self._name = connection.collection

    def stats(self, manifest: IndexManifest) -> IndexStats:
        """The size of the index."""
        tokens = [int(row["tokens"]) for row in self._rows_where("", ["tokens"])]
        width = manifest.settings.width
        row_bytes = (width + 2) * 4 / 3 if manifest.codec == "int8" else width * 4
        lite = self.connection.embedded
        return IndexStats(
            documents=len(tokens),
            tokens=sum(tokens),
            dimensions=width if tokens else 0,
            codec=manifest.codec,
            bytes=int(sum(tokens) * row_bytes) + len(tokens) * manifest.prefetch_width * 4,
            details={"prefetch": manifest.prefetch, "prefetch_width": manifest.prefetch_width, "lite": lite},
        )

    def check(self, manifest: IndexManifest) -> list[str]:
        """Rows that cannot be read, and ids that do not fit."""
        problems = []
        for row in self._rows_where("", ["pk", "id", "tokens"]):
            if point_id(row["id"]) != row["pk"]:
                problems.append(
                    f"collection {self._name!r}: the row {row['pk']!r} was not written by an index (its id is "
                    f"{row['id']!r}); delete it in Milvus"
                )
        for row in chain.from_iterable(self._pages("", manifest, ["id", "tokens"])):
            try:
                self._tokens([row], manifest)
            except SinkError as error:
                problems.append(str(error))
        return problems

    def create(self, manifest: IndexManifest) -> None:
        """Create the collection."""
        schema = self.connection.client.create_schema(auto_id=False, enable_dynamic_field=False)
        longest = _MAX_LITE if self.connection.embedded else MAX_VARCHAR
        schema.add_field(_PLAIN.primary, DataType.VARCHAR, is_primary=True, max_length=36)
        for name in _PLAIN.strings:
            schema.add_field(name, DataType.VARCHAR, max_length=longest)
        schema.add_field("metadata", DataType.JSON)
        schema.add_field("tokens", DataType.INT64)
        schema.add_field("added", DataType.INT64)
        if manifest.codec == "int8":
            schema.add_field(ROWS, DataType.VARCHAR, max_length=longest)
            schema.add_field(str(manifest.prefetch), DataType.FLOAT_VECTOR, dim=manifest.prefetch_width)
        else:
            struct = self.connection.client.create_struct_field_schema()
            struct.add_field(VECTOR, DataType.FLOAT_VECTOR, dim=manifest.settings.width)
            schema.add_field(
                ROWS,
                DataType.ARRAY,
                element_type=DataType.STRUCT,
                struct_schema=struct,
                max_capacity=_MAX_CAPACITY,
            )
        self.connection.call(
            "create_collection",
            self._name,
            schema=schema,
            properties={MANIFEST_KEY: json.dumps(manifest.to_dict())},
            consistency_level="Session",  # a search sees what this client wrote
        )

    def prepare(self, manifest: IndexManifest) -> None:
        """Index the vectors, and load the collection."""
        self.connection.request("indexing the collection", lambda: self._index(manifest))
        self.connection.load()

    def _index(self, manifest: IndexManifest) -> None:
        field = PATH if manifest.codec == "float32" else str(manifest.prefetch)
        if field in self.connection.call("list_indexes", self._name):
            return
        index = self.connection.client.prepare_index_params()
        if manifest.codec == "float32":
            params = {"M": 16, "efConstruction": 200}
            index.add_index(field, index_name=field, index_type="HNSW", metric_type=_METRIC, params=params)
        else:  # exact: its collections are small
            index.add_index(field, index_name=field, index_type="FLAT", metric_type="IP")
        self.connection.call("create_index", self._name, index, sync=False)

    def count(self) -> int:
        """How many rows there are."""
        return self.connection.count()

    def existing(self, points: Sequence[str]) -> int:
        """How many rows have one of these ids."""
        return len(self._query_rows(one_of(_PLAIN.primary, points), [_PLAIN.primary]))

    def write(self, rows: Sequence[IndexRow], manifest: IndexManifest) -> None:
        """Store rows."""
        entities: list[dict[str, Any]] = []
        for row in rows:
            entity = {_PLAIN.primary: row.point, **row.fields}
            if manifest.codec == "int8":
                entity |= {ROWS: pack(row.matrix), str(manifest.prefetch): row.prefetch}
            else:
                entity[ROWS] = to_structs(row.matrix)
            entities.append(entity)
        # A server's upsert replaces a row, and its insert may duplicate it; Lite's insert replaces a row, and its
        # upsert merges the old metadata into the new.
        with self.connection.changing():
            self.connection.call("insert" if self.connection.embedded else "upsert", self._name, entities)

    def remove(self, points: Sequence[str]) -> None:
        """Delete rows by id."""
        if points:
            with self.connection.changing():
                self.connection.call("delete", self._name, filter=one_of(_PLAIN.primary, points))

    def delete_matching(self, conditions: Mapping[str, Condition]) -> int:
        """Delete rows by metadata."""
        points = self._matching(conditions, None)
        for start in range(0, len(points), self.connection.max_rows):
            self.remove(points[start : start + self.connection.max_rows])
        return len(points)

    def listed(self) -> list[tuple[int, str]]:
        """``added`` and ``id`` of every row."""
        return [(int(row["added"]), str(row["id"])) for row in self._rows_where("", ["added", "id"])]

    def stored(self, point: str) -> tuple[str, Mapping[str, Any]] | None:
        """Text and metadata of a row."""
        rows = self._query_rows(one_of(_PLAIN.primary, [point]), ["text", "metadata"])
        return (str(rows[0]["text"]), dict(rows[0]["metadata"] or {})) if rows else None

    def query(self, queries: Sequence[IndexQuery], manifest: IndexManifest) -> list[list[Found]]:
        """The best documents of each query."""
        self.connection.seal()
        first = queries[0]  # all of a call have the same filter, ids and number of candidates
        expression = to_expression(first.conditions, _PLAIN)
        points = first.points
        if not is_exact(first.conditions, lite=True):
            points = self._matching(first.conditions, points)
        candidates = first.candidates
        if candidates is None or (points is not None and len(points) <= candidates):
            found: Sequence[Sequence[str]] | None = None
            expression = _among(expression, points)
        else:
            if manifest.codec == "float32":
                return self._scored_by_milvus(queries, _among(expression, points), candidates)
            found = self._candidates(queries, _among(expression, points), candidates, manifest)
            union = list(dict.fromkeys(point for answer in found for point in answer))
            expression = _among("", union)
        return self._scored_here(queries, expression, found, manifest)

    def _candidates(
        self, queries: Sequence[IndexQuery], expression: str, candidates: int, manifest: IndexManifest
    ) -> list[list[str]]:
        """For each query the primary keys of the documents whose single vector is nearest."""
        results = self.connection.call(
            "search",
            self._name,
            data=[query.prefetch.tolist() for query in queries],
            anns_field=str(manifest.prefetch),
            limit=candidates,
            filter=_and(expression, "tokens > 0"),
            output_fields=[_PLAIN.primary],
        )
        return [[key_of(row, _PLAIN.primary) for row in result] for result in results]

    def _scored_by_milvus(self, queries: Sequence[IndexQuery], expression: str, candidates: int) -> list[list[Found]]:
        """The best documents of each query by the server's index of token rows."""
        if queries[0].k > _MAX_RESULTS:
            raise InvalidRequestError(
                f"k={queries[0].k} is more than Milvus hands out ({_MAX_RESULTS}); pass exact=True"
            )
        results = self.connection.call(
            "search",
            self._name,
            data=[EmbeddingList(query.matrix) for query in queries],
            anns_field=PATH,
            limit=min(candidates, _MAX_RESULTS),
            filter=expression,
            search_params={"metric_type": _METRIC},
            output_fields=_FIELDS,
        )
        return [[_hit(row["entity"], float(row["distance"])) for row in result] for result in results]

    def _scored_here(
        self,
        queries: Sequence[IndexQuery],
        expression: str,
        candidates: Sequence[Sequence[str]] | None,
        manifest: IndexManifest,
    ) -> list[list[Found]]:
        """The best documents of each query by MaxSim in this process, among those that the expression finds.

        ``candidates`` are for each query the primary keys of its own; ``None`` if all are.
        """
        among = [None if candidates is None else set(candidates[index]) for index in range(len(queries))]
        best: list[list[Found]] = [[] for _ in queries]
        width = manifest.settings.width
        for rows in self._pages(_and(expression, "tokens > 0"), manifest, _FIELDS):
            matching = _matching_rows(rows, queries[0].conditions)
            rows = [row for row, matches in zip(rows, matching, strict=True) if matches]
            tokens = self._tokens(rows, manifest)
            for index, query in enumerate(queries):
                own = among[index]
                chosen = [n for n, row in enumerate(rows) if own is None or row[_PLAIN.primary] in own]
                if not chosen:
                    continue
                (scores,) = score(Ragged.from_matrices([query.matrix], width=width), tokens, documents=chosen)
                found = [_hit(rows[n], float(value)) for n, value in zip(chosen, scores, strict=True)]
                best[index] = nsmallest(query.k, best[index] + found, key=lambda one: (-one.hit.score, one.added))
        return best

    def _pages(self, expression: str, manifest: IndexManifest, fields: list[str]) -> Iterator[list[dict[str, Any]]]:
        """These fields and the token rows of the documents that an expression finds, a few megabytes at a time."""
        keys = self._rows_where(expression, [_PLAIN.primary, "tokens"])
        row_bytes = manifest.settings.width * (1.5 if manifest.codec == "int8" else 4)
        sizes = [int(row["tokens"] * row_bytes) + 1000 for row in keys]
        for part in slices(sizes, max_rows=self.connection.max_rows, max_bytes=_MAX_FETCHED):
            points = [str(row[_PLAIN.primary]) for row in keys[part]]
            yield self._query_rows(one_of(_PLAIN.primary, points), [_PLAIN.primary, *fields, ROWS])

    def _matching(self, conditions: Mapping[str, Condition], points: Sequence[str] | None) -> list[str]:
        """The primary keys of the documents that a filter matches, as every index understands it.

        Milvus Lite takes True for 1, and False for 0.
        """
        rows = self._rows_where(_among(to_expression(conditions, _PLAIN), points), [_PLAIN.primary, "metadata"])
        matching = _matching_rows(rows, conditions)
        return [str(row[_PLAIN.primary]) for row, matches in zip(rows, matching, strict=True) if matches]

    def _rows_where(self, expression: str, fields: list[str]) -> list[dict[str, Any]]:
        """These fields of every document that an expression finds; of all documents if it is empty."""
        everything = expression or "tokens >= 0"
        if self.connection.embedded:
            return self._query_rows(everything, fields)
        return [
            row for page in self.connection.pages(everything, fields, size=self.connection.max_rows) for row in page
        ]

    def _query_rows(self, expression: str, fields: list[str]) -> list[dict[str, Any]]:
        return list(self.connection.call("query", self._name, filter=expression, output_fields=fields))

    def _tokens(self, rows: Sequence[Mapping[str, Any]], manifest: IndexManifest) -> Tokens:
        """The token rows of documents, ready to be scored."""
        width = manifest.settings.width
        with self.reading(", ".join(repr(row["id"]) for row in rows[:3]) + ", ..." * (len(rows) > 3)):
            if manifest.codec == "float32":
                return struct_tokens([row[ROWS] or [] for row in rows], width=width)
            return packed_tokens([row[ROWS] for row in rows], [int(row["tokens"]) for row in rows], width=width)

    def check_document(self, fields: Mapping[str, Any], matrix: npt.NDArray[np.float32], size: int) -> None:
        """Raise InvalidRequestError for a document that no row can hold."""
        id, tokens = fields["id"], len(matrix)
        if not self.connection.embedded:
            metadata = json.dumps(fields["metadata"], ensure_ascii=False)
            for name, stored, most in (
                ("an id", id, MAX_VARCHAR),
                ("a text", fields["text"], MAX_VARCHAR),
                ("metadata", metadata, MAX_JSON),
            ):
                if (length := len(stored.encode())) > most:
                    raise InvalidRequestError(
                        f"document {id[:100]!r} has {name} of {length} bytes; Milvus stores at most {most}, so split it"
                    )
            if tokens > _MAX_CAPACITY:
                raise InvalidRequestError(
                    f"document {id!r} has {tokens} token rows; Milvus stores at most {_MAX_CAPACITY} of a document; "
                    "split the text, or build the index with a larger pool_factor"
                )
        if size > _MAX_REQUEST:
            raise InvalidRequestError(
                f"document {id[:100]!r} takes {size} bytes in a request, and Milvus at most {_MAX_REQUEST}; split it"
            )


def _matching_rows(rows: Sequence[Mapping[str, Any]], conditions: Mapping[str, Condition]) -> npt.NDArray[np.bool_]:
    """Which rows a filter matches."""
    metadata = [row["metadata"] or {} for row in rows]
    return MetadataTable(len(rows), lambda: metadata).mask(conditions)


def _hit(row: Mapping[str, Any], score: float) -> Found:
    hit = Hit(id=str(row["id"]), score=score, exact=True, text=str(row["text"]), metadata=dict(row["metadata"] or {}))
    return Found(hit, int(row["added"]))


def _among(expression: str, points: Sequence[str] | None) -> str:
    """An expression, for these primary keys only."""
    if points is None:
        return expression
    return _and(expression, one_of(_PLAIN.primary, points))


def _and(left: str, right: str) -> str:
    return f"({left}) and {right}" if left else right
