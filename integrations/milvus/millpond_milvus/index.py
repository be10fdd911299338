"""MilvusIndex: token matrices in a collection of Milvus."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from heapq import nsmallest
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from pymilvus import DataType, MilvusClient
from pymilvus.client.embedding_list import EmbeddingList

from millpond.errors import InvalidRequestError, SinkError
from millpond.ingest.record import point_id
from millpond.ingest.sinks.batch import slices
from millpond.ingest.sinks.index_manifest import IndexManifest, Prefetch
from millpond.ingest.sinks.late_interaction import CollectionIndex, Found, IndexQuery, IndexRow
from millpond.ingest.sinks.location import is_url
from millpond.ingest.sinks.manifest import MANIFEST_KEY
from millpond.late_interaction.index.arguments import TokenEngine
from millpond.late_interaction.index.documents import Hit, IndexStats
from millpond.late_interaction.index.metadata_filter import MetadataTable
from millpond.late_interaction.kernels.exact import Tokens, score
from millpond.metadata import Scalar
from millpond.vectors.ragged import Ragged
from millpond_milvus.client import URL_SCHEMES
from millpond_milvus.collection import MilvusCollection
from millpond_milvus.filters import one_of, to_expression
from millpond_milvus.lite import lite_lock
from millpond_milvus.rows import PATH, ROWS, VECTOR, pack, packed_tokens, struct_tokens, to_structs
from millpond_milvus.schema import MAX_JSON, MAX_VARCHAR, SCHEMAS

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


class MilvusIndex(MilvusCollection, CollectionIndex):
    """A late-interaction index in one collection of Milvus.

    Milvus Lite has no token vectors. A document there is one row with a single vector, by which candidates are found,
    and its token rows as int8, which are compared in this process. On a server (2.6.4 or newer) the token rows are an
    array of structs, which Milvus indexes and compares by MaxSim itself; this has never run against a server, only
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

    codecs: ClassVar[tuple[str, ...]] = ("int8", "float32")
    prefetches: ClassVar[tuple[Prefetch | None, ...]] = ("muvera", "dense")
    least_candidates = 200  # Milvus Lite hands their rows to this process

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
        client = uri if isinstance(uri, MilvusClient) else None
        CollectionIndex.__init__(
            self,
            None if isinstance(uri, MilvusClient) else uri,
            collection,
            engine,
            codec="int8",
            prefetch=prefetch,
            dimensions=dimensions,
            pool_factor=pool_factor,
            owned=client is None,
        )
        self._connect(client, timeout)
        try:
            if not self._lite:
                self._codec, self._prefetch = "float32", "tokens"
            self._opened()
        except BaseException:
            self.close()
            raise

    def stats(self) -> IndexStats:
        """The size of the index; ``bytes`` is computed from the number of rows."""
        self._check_open()
        manifest = self._manifest
        if manifest is None:
            return IndexStats(documents=0, tokens=0, dimensions=0, codec=self._codec, bytes=0)
        with self._request("a listing of the documents"):
            tokens = [int(row["tokens"]) for row in self._rows_where("", ["tokens"])]
        width = manifest.settings.width
        row_bytes = (width + 2) * 4 / 3 if manifest.codec == "int8" else width * 4
        return IndexStats(
            documents=len(tokens),
            tokens=sum(tokens),
            dimensions=width if tokens else 0,
            codec=manifest.codec,
            bytes=int(sum(tokens) * row_bytes) + len(tokens) * manifest.prefetch_width * 4,
            details={"prefetch": manifest.prefetch, "prefetch_width": manifest.prefetch_width, "lite": self._lite},
        )

    def check(self) -> list[str]:
        """What is wrong with the stored data: rows that cannot be read, and ids that do not fit."""
        self._check_open()
        manifest = self._manifest
        if manifest is None:
            return []
        problems = []
        with self._request("a check"):
            for row in self._rows_where("", ["pk", "id", "tokens"]):
                if point_id(row["id"]) != row["pk"]:
                    problems.append(
                        f"collection {self._collection!r}: the row {row['pk']!r} was not written by an index (its id "
                        f"is {row['id']!r}); delete it in Milvus"
                    )
            for row in self._fetched("", manifest, fields=["id", "tokens"]):
                try:
                    self._tokens([row], manifest)
                except SinkError as error:
                    problems.append(str(error))
        return problems

    # ------------------------------------------------------------------------------------------------- requests

    def _opened(self) -> IndexManifest | None:
        if self._manifest is not None:
            return super()._opened()
        with self._opening():
            return super()._opened()

    def _created(self, manifest: IndexManifest) -> None:
        with self._opening():
            super()._created(manifest)

    def _opening(self) -> AbstractContextManager[object]:
        """Held while Milvus Lite creates or prepares a collection, which it takes from one thread only."""
        return nullcontext() if is_url(self._where, URL_SCHEMES) else lite_lock

    def _create(self, manifest: IndexManifest) -> None:
        schema = self._client.create_schema(auto_id=False, enable_dynamic_field=False)
        longest = _MAX_LITE if self._lite else MAX_VARCHAR
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
            struct = self._client.create_struct_field_schema()
            struct.add_field(VECTOR, DataType.FLOAT_VECTOR, dim=manifest.settings.width)
            schema.add_field(
                ROWS,
                DataType.ARRAY,
                element_type=DataType.STRUCT,
                struct_schema=struct,
                max_capacity=_MAX_CAPACITY,
            )
        self._call(
            "create_collection",
            self._collection,
            schema=schema,
            properties={MANIFEST_KEY: json.dumps(manifest.to_dict())},
            consistency_level="Session",  # a search sees what this client wrote
        )

    def _prepare(self, manifest: IndexManifest) -> None:
        field = PATH if manifest.codec == "float32" else str(manifest.prefetch)
        with self._request("indexing the collection"):
            if field not in self._call("list_indexes", self._collection):
                index = self._client.prepare_index_params()
                if manifest.codec == "float32":
                    params = {"M": 16, "efConstruction": 200}
                    index.add_index(field, index_name=field, index_type="HNSW", metric_type=_METRIC, params=params)
                else:  # exact: its collections are small
                    index.add_index(field, index_name=field, index_type="FLAT", metric_type="IP")
                self._call("create_index", self._collection, index, sync=False)
        self._load_collection()

    def _existing(self, points: Sequence[str]) -> int:
        return len(self._query_rows(one_of(_PLAIN.primary, points), [_PLAIN.primary]))

    def _write(self, rows: Sequence[IndexRow], manifest: IndexManifest) -> None:
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
        with self._changes():
            self._call("insert" if self._lite else "upsert", self._collection, entities)

    def _remove(self, points: Sequence[str]) -> None:
        if points:
            with self._changes():
                self._call("delete", self._collection, filter=one_of(_PLAIN.primary, points))

    def _delete_matching(self, conditions: Mapping[str, Sequence[Scalar]]) -> int:
        if self._manifest is None:
            return 0
        with self._request("a delete by filter"):
            points = self._matching(conditions, None)
            for start in range(0, len(points), self.max_rows):
                self._remove(points[start : start + self.max_rows])
        return len(points)

    def _listed(self) -> list[tuple[int, str]]:
        return [(int(row["added"]), str(row["id"])) for row in self._rows_where("", ["added", "id"])]

    def _stored(self, id: str) -> tuple[str, Mapping[str, Any]] | None:
        if self._manifest is None:
            return None
        with self._request("a look for a document"):
            rows = self._query_rows(one_of(_PLAIN.primary, [point_id(id)]), ["text", "metadata"])
        return (str(rows[0]["text"]), dict(rows[0]["metadata"] or {})) if rows else None

    def _query(self, queries: Sequence[IndexQuery], manifest: IndexManifest) -> list[list[Found]]:
        first = queries[0]  # all of a call have the same filter, ids and number of candidates
        expression = to_expression(first.conditions, _PLAIN)
        points = first.points
        if _confusable(first.conditions):
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
        results = self._call(
            "search",
            self._collection,
            data=[query.prefetch.tolist() for query in queries],
            anns_field=str(manifest.prefetch),
            limit=candidates,
            filter=_and(expression, "tokens > 0"),
            output_fields=[_PLAIN.primary],
        )
        return [[str(row[_PLAIN.primary]) for row in result] for result in results]

    def _scored_by_milvus(self, queries: Sequence[IndexQuery], expression: str, candidates: int) -> list[list[Found]]:
        """The best documents of each query by the server's index of token rows."""
        if queries[0].k > _MAX_RESULTS:
            raise InvalidRequestError(
                f"k={queries[0].k} is more than Milvus hands out ({_MAX_RESULTS}); pass exact=True"
            )
        results = self._call(
            "search",
            self._collection,
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
        """The best documents of each query by MaxSim in this process.

        Args:
            queries: The queries.
            expression: Finds the documents of all of them.
            candidates: For each query the primary keys of its own; ``None`` if all are.
            manifest: Says how rows are stored.
        """
        among = [None if candidates is None else set(candidates[index]) for index in range(len(queries))]
        best: list[list[Found]] = [[] for _ in queries]
        width = manifest.settings.width
        for rows in self._pages(expression, manifest):
            matching = MetadataTable([row["metadata"] or {} for row in rows]).mask(queries[0].conditions)
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

    def _pages(self, expression: str, manifest: IndexManifest) -> Iterator[list[dict[str, Any]]]:
        """The documents with tokens that an expression finds, with all their fields, a few megabytes at a time."""
        yield from self._fetched_pages(_and(expression, "tokens > 0"), manifest, [*_FIELDS, ROWS])

    def _fetched(self, expression: str, manifest: IndexManifest, *, fields: list[str]) -> Iterator[dict[str, Any]]:
        for page in self._fetched_pages(expression, manifest, [*fields, ROWS]):
            yield from page

    def _fetched_pages(
        self, expression: str, manifest: IndexManifest, fields: list[str]
    ) -> Iterator[list[dict[str, Any]]]:
        keys = self._rows_where(expression, [_PLAIN.primary, "tokens"])
        row_bytes = manifest.settings.width * (1.5 if manifest.codec == "int8" else 4)
        sizes = [int(row["tokens"] * row_bytes) + 1000 for row in keys]
        for part in slices(sizes, max_rows=self.max_rows, max_bytes=_MAX_FETCHED):
            points = [str(row[_PLAIN.primary]) for row in keys[part]]
            yield self._query_rows(one_of(_PLAIN.primary, points), [_PLAIN.primary, *fields])

    def _matching(self, conditions: Mapping[str, Sequence[Scalar]], points: Sequence[str] | None) -> list[str]:
        """The primary keys of the documents that a filter matches, as every index understands it.

        Milvus Lite takes True for 1, and False for 0.
        """
        rows = self._rows_where(_among(to_expression(conditions, _PLAIN), points), [_PLAIN.primary, "metadata"])
        matching = MetadataTable([row["metadata"] or {} for row in rows]).mask(conditions)
        return [str(row[_PLAIN.primary]) for row, matches in zip(rows, matching, strict=True) if matches]

    def _rows_where(self, expression: str, fields: list[str]) -> list[dict[str, Any]]:
        """These fields of every document that an expression finds; of all documents if it is empty."""
        everything = expression or "tokens >= 0"
        if self._lite:
            return self._query_rows(everything, fields)
        return [row for page in self._pages_of(everything, fields, size=self.max_rows) for row in page]

    def _query_rows(self, expression: str, fields: list[str]) -> list[dict[str, Any]]:
        return list(self._call("query", self._collection, filter=expression, output_fields=fields))

    def _tokens(self, rows: Sequence[Mapping[str, Any]], manifest: IndexManifest) -> Tokens:
        """The token rows of documents, ready to be scored."""
        width = manifest.settings.width
        with self._reading(", ".join(repr(row["id"]) for row in rows[:3]) + ", ..." * (len(rows) > 3)):
            if manifest.codec == "float32":
                return struct_tokens([row[ROWS] or [] for row in rows], width=width)
            return packed_tokens([row[ROWS] for row in rows], [int(row["tokens"]) for row in rows], width=width)

    def _check_document(self, fields: Mapping[str, Any], matrix: npt.NDArray[np.float32], size: int) -> None:
        id, tokens = fields["id"], len(matrix)
        if not self._lite:
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


def _hit(row: Mapping[str, Any], score: float) -> Found:
    hit = Hit(id=str(row["id"]), score=score, exact=True, text=str(row["text"]), metadata=dict(row["metadata"] or {}))
    return Found(hit, int(row["added"]))


def _confusable(conditions: Mapping[str, Sequence[Scalar]]) -> bool:
    """Whether a filter has a value that Milvus Lite takes for another one: True for 1, False for 0, or the reverse."""
    return any(value in (0, 1) for values in conditions.values() for value in values)


def _among(expression: str, points: Sequence[str] | None) -> str:
    """An expression, for these primary keys only."""
    if points is None:
        return expression
    return _and(expression, one_of(_PLAIN.primary, points))


def _and(left: str, right: str) -> str:
    return f"({left}) and {right}" if left else right
