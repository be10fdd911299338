"""PgVectorSink: a table of PostgreSQL, with one pgvector column for each Matryoshka width."""

from __future__ import annotations

import json
import logging
import math
import re
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from uuid import UUID

import numpy as np
import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row
from psycopg.sql import SQL, Composable, Identifier
from psycopg.types.json import Jsonb

from millpond.errors import InvalidRequestError, SinkError
from millpond.ingest.batch import FloatArray, WriteBatch
from millpond.ingest.collection import CollectionSink
from millpond.ingest.manifest import MANIFEST_KEY, CollectionManifest
from millpond.ingest.payload import Payload
from millpond.ingest.record import Record, content_hash
from millpond.ingest.search import Hit, SearchPlan
from millpond.ingest.sink import StoredRow, vector_name
from millpond.metadata import check_filter
from millpond_pgvector.connection import check_dsn, deadline, kind_of

logger = logging.getLogger(__name__)

_TYPES = {"float32": "vector", "float16": "halfvec", "bit": "bit"}
_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")  # in JSON
_FIELDS = ["pk", "id", "text", "metadata", "content_hash"]


class PgVectorSink(CollectionSink[Composable]):
    """Writes to one table of PostgreSQL with pgvector, and searches it; a request is a transaction.

    Args:
        dsn: ``postgresql://host/db`` or ``host=... dbname=...``, without a password (set ``PGPASSWORD`` or
            ``PGPASSFILE``), or an open ``psycopg.Connection`` that is in no transaction.
        table: Name of the table, or ``schema.table``.
        dimensions: The widths to store and search, each in a column ``d{width}``; by default the width that ``embed``
            returns. A search without them uses every width that the table has.
        payload: ``plain``, the only form: columns ``pk``, ``id``, ``text``, ``metadata`` (jsonb), ``content_hash``.
        datatype: ``float32`` (vector), ``float16`` (halfvec), or ``bit``: of all widths but the largest only the signs.
        index: ``hnsw``: :meth:`close` builds it after a run. By default a search is exact.
        timeout: Seconds a request may take; those that build an index have no limit.

    Raises:
        InvalidRequestError: A string, name or option that is not valid.
        SinkError: The server does not answer, or refuses.
    """

    database = "PostgreSQL"
    name_pattern = re.compile(r"(?:[A-Za-z_]\w{0,62}\.)?[A-Za-z_]\w{0,47}", re.ASCII)
    name_rule = "at most 48 letters, digits and underscores, no digit first, and SCHEMA. before them if need be"
    max_rows, max_bytes, float_bytes = 5000, 64 << 20, 4

    def __init__(
        self,
        dsn: str | psycopg.Connection[Any],
        table: str,
        *,
        dimensions: Sequence[int] | None = None,
        payload: str = "plain",
        datatype: str = "float32",
        index: str | None = None,
        timeout: float = 60,
    ) -> None:
        client = dsn if isinstance(dsn, psycopg.Connection) else None
        path = None if isinstance(dsn, psycopg.Connection) else dsn
        super().__init__(path, table, dimensions=dimensions, payload=payload, owned=client is None)
        if client is None:
            check_dsn(self._where)
        for name, value, known in (
            ("payload", self._payload, ["plain"]),  # whose columns the stores of frameworks take by name
            ("datatype", datatype, list(_TYPES)),
            ("index", index, [None, "hnsw"]),
        ):
            if value not in known:
                raise InvalidRequestError(f"{name}={value!r} is none of {known}; pass {name}={known[0]!r}")
        if not timeout > 0:
            raise InvalidRequestError(f"timeout={timeout!r} is no time; pass seconds above 0")
        self._datatype, self._index, self._timeout, self._written = datatype, index, timeout, False
        self._table, self._types = Identifier(*table.split(".")), dict[int, str]()
        self._lock, self._late = threading.RLock(), threading.Event()
        with self._request("the connection"):
            self._client = self._connect() if client is None else client

    def check(self, record: Record) -> None:
        """Raise InvalidRequestError for a record that PostgreSQL cannot store: too large, or with a NUL character."""
        super().check(record)
        if "\0" in record.text or _NUL.search(json.dumps(dict(record.metadata))):
            raise InvalidRequestError("it holds a NUL character, which PostgreSQL does not store; leave it out")

    def close(self) -> None:
        """Build the index of what was written, and close the connection unless it was passed in."""
        if self._index is not None and self._written and not self._closed:
            try:
                self.create_index()
            except SinkError as error:  # every row is stored all the same
                logger.warning("%s; its rows are stored, and only searches are slower", error)
        self._written = False
        super().close()

    def create_index(self) -> None:
        """Index the smallest width by HNSW, and the metadata by which dicts filter, unless that is done.

        Raises:
            InvalidRequestError: No such table.
            SinkError: PostgreSQL refuses: HNSW takes 2,000 numbers of float32, and 4,000 of float16.
        """
        width = self._opened().dimensions[0]
        ranked = {"vector": "vector_cosine_ops", "halfvec": "halfvec_cosine_ops", "bit": "bit_hamming_ops"}
        indexes = [(vector_name(width), "hnsw", ranked[self._types[width]]), ("metadata", "gin", "jsonb_path_ops")]
        with self._request("an index"), self._transaction(None) as cursor:
            for column, kind, operators in indexes:
                name = Identifier(f"{self._collection.rpartition('.')[2]}_{column}_{kind}")
                command = SQL("CREATE INDEX IF NOT EXISTS {} ON {} USING {} ({} {})")
                cursor.execute(command.format(name, self._table, SQL(kind), Identifier(column), SQL(operators)))

    def _connect(self) -> psycopg.Connection[Any]:
        # Without prepared statements, which a pooler of connections does not keep.
        options: dict[str, Any] = {"connect_timeout": math.ceil(self._timeout), "prepare_threshold": None}
        return psycopg.connect(self._where, autocommit=True, **options)

    @contextmanager
    def _transaction(self, seconds: float | None) -> Iterator[psycopg.Cursor[Any]]:
        """A cursor in a transaction that is over after so many seconds, whatever the server does."""
        with self._lock:
            self._late = threading.Event()
            if self._owned and self._client.closed:
                self._client = self._connect()
            if self._client.info.transaction_status == TransactionStatus.INTRANS:
                raise InvalidRequestError("the connection is in a transaction; end it, or pass one with autocommit")
            with deadline(self._client, seconds) as self._late, self._client.transaction():
                cursor = self._client.cursor(row_factory=tuple_row)
                cursor.execute(SQL("SET LOCAL statement_timeout = {}").format(int(1000 * (seconds or 0))))
                yield cursor

    def _run(self, query: str, **parts: Any) -> psycopg.Cursor[Any]:
        """Run one statement in a transaction of its own; a part that is no SQL becomes a literal."""
        with self._transaction(self._timeout) as cursor:
            return cursor.execute(SQL(query).format(table=self._table, **parts))

    def _exists(self) -> bool:
        return self._run("SELECT to_regclass({name})", name=self._table.as_string()).fetchone() != (None,)

    def _read_manifest(self) -> object:
        query = "SELECT obj_description(to_regclass({name}), 'pg_class')"
        ((comment,),) = self._run(query, name=self._table.as_string())
        try:
            return json.loads(comment or "{}").get(MANIFEST_KEY)
        except (AttributeError, ValueError):
            return None  # somebody's comment

    def _create(self, manifest: CollectionManifest) -> None:
        types = {width: _TYPES[self._datatype] for width in manifest.dimensions}
        if self._datatype == "bit":
            if len(types) == 1:
                raise InvalidRequestError("datatype='bit' keeps the largest width as float32; pass two dimensions")
            types[manifest.dimensions[-1]] = "vector"
        columns = [SQL("{} {}({})").format(Identifier(vector_name(d)), SQL(t), d) for d, t in types.items()]
        with self._transaction(self._timeout) as cursor:
            cursor.execute("SELECT pg_advisory_xact_lock(hashtext('millpond'))")  # of two that create, one waits
            cursor.execute("CREATE EXTENSION IF NOT EXISTS vector")
            cursor.execute(
                SQL(
                    "CREATE TABLE {} (pk uuid PRIMARY KEY, id text NOT NULL, text text NOT NULL, "
                    "metadata jsonb NOT NULL, content_hash text NOT NULL, {})"
                ).format(self._table, SQL(", ").join(columns))
            )
            comment = json.dumps({MANIFEST_KEY: manifest.to_dict()})
            cursor.execute(SQL("COMMENT ON TABLE {} IS {}").format(self._table, comment))

    def _prepare(self, manifest: CollectionManifest) -> None:
        self._load()
        stored = self._types[manifest.dimensions[0]]
        if stored != _TYPES[self._datatype]:
            (name,) = (name for name, kind in _TYPES.items() if kind == stored)
            raise InvalidRequestError(f"table {self._collection!r} holds {stored} columns; pass datatype={name!r}")

    def _load(self) -> None:
        query = (
            "SELECT substr(attname, 2)::int, typname FROM pg_attribute JOIN pg_type ON pg_type.oid = atttypid "
            "WHERE attrelid = to_regclass({name}) AND attname ~ '^d[1-9][0-9]*$'"
        )
        with self._request("a look at its columns"):
            self._types = dict(self._run(query, name=self._table.as_string()).fetchall())

    def _encode(self, batch: WriteBatch) -> tuple[list[str], list[tuple[Any, ...]]]:
        vectors = [_packed(values, self._types[width]) for width, values in batch.vectors.items()]
        rows = zip(
            map(UUID, batch.ids),
            [record.id for record in batch.records],
            [record.text for record in batch.records],
            [Jsonb(dict(record.metadata)) for record in batch.records],
            [content_hash(record.text) for record in batch.records],
            *vectors,
            strict=True,
        )
        return [*_FIELDS, *map(vector_name, batch.vectors)], list(rows)

    def _upsert(self, encoded: tuple[list[str], list[tuple[Any, ...]]]) -> None:
        columns, rows = encoded
        names = SQL(", ").join(map(Identifier, columns))
        changed = SQL(", ").join(SQL("EXCLUDED.{}").format(Identifier(name)) for name in columns)
        with self._transaction(self._timeout) as cursor:
            # No table has this name: a $ is not allowed.
            cursor.execute(SQL('CREATE TEMP TABLE "millpond$rows" (LIKE {}) ON COMMIT DROP').format(self._table))
            with cursor.copy(SQL('COPY "millpond$rows" ({}) FROM STDIN (FORMAT BINARY)').format(names)) as copy:
                for row in rows:
                    copy.write_row(row)
            cursor.execute(
                SQL(
                    'INSERT INTO {} ({names}) SELECT {names} FROM "millpond$rows" ORDER BY pk '  # so none deadlock
                    "ON CONFLICT (pk) DO UPDATE SET ({names}) = ROW({changed})"
                ).format(self._table, names=names, changed=changed)
            )
        self._written = True

    def _query(self, plan: SearchPlan, native: Composable | None, payload: Payload) -> list[Any]:
        width, limit = (plan.full, plan.k) if plan.coarse is None else (plan.coarse, plan.candidates)
        query = SQL(
            "SELECT pk, id, text, metadata::text, 1 - {scale} * ({full}) FROM "
            "(SELECT * FROM {table} WHERE {condition} ORDER BY {nearest} LIMIT {limit}) AS nearest "
            "ORDER BY {full} LIMIT {k}"
        ).format(
            table=self._table,
            condition=native or SQL("true"),
            nearest=self._distance(width, plan.vectors[width]),
            limit=limit,
            full=self._distance(plan.full, plan.vectors[plan.full]),
            k=plan.k,
            scale=2 / plan.full if self._types[plan.full] == "bit" else 1,
        )
        with self._transaction(self._timeout) as cursor:
            # HNSW goes on until it has found as many rows as are asked for.
            cursor.execute("SET LOCAL hnsw.iterative_scan = strict_order")
            cursor.execute(SQL("SET LOCAL hnsw.ef_search = {}").format(min(max(limit, 40), 1000)))
            return cursor.execute(query).fetchall()

    def _distance(self, width: int, vector: FloatArray) -> Composable:
        kind = self._types[width]
        text = "".join("01"[x > 0] for x in vector) if kind == "bit" else json.dumps(vector.tolist())
        operator, size = SQL("<~>" if kind == "bit" else "<=>"), width
        return SQL("{} {} {}::{}({})").format(Identifier(vector_name(width)), operator, text, SQL(kind), size)

    def _decode(self, row: tuple[str, str, str, str, float], payload: Payload) -> Hit:
        pk, record_id, text, metadata, score = row
        with self._reading(str(pk), payload):
            # jsonb writes a large float as an int; an int of a record has 64 bits.
            fields = json.loads(metadata, parse_int=_number)
        return Hit(id=record_id, score=score, text=text, metadata=fields)

    def _delete(self, which: Sequence[str] | Composable, payload: Payload) -> None:
        if isinstance(which, Composable):
            self._run("DELETE FROM {table} WHERE {condition}", condition=which)
        else:
            self._run("DELETE FROM {table} WHERE pk = ANY({ids}::uuid[])", ids=list(which))

    def _count(self) -> int:
        ((count,),) = self._run("SELECT count(*) FROM {table}")
        return int(count)

    def _fetch(self, row_ids: Sequence[str], widths: Sequence[int], payload: Payload) -> dict[str, StoredRow]:
        columns = [
            SQL("{}::{}").format(Identifier(vector_name(d)), SQL("text" if self._types[d] == "bit" else "real[]"))
            for d in widths
        ]
        query = "SELECT {columns} FROM {table} WHERE pk = ANY({ids}::uuid[])"
        rows = self._run(
            query, columns=SQL(", ").join([SQL("pk::text, id, content_hash"), *columns]), ids=list(row_ids)
        )
        return {
            pk: StoredRow(
                record_id=record_id,
                content_hash=hashed,
                vectors=dict(zip(widths, map(_unpacked, vectors), strict=True)),
            )
            for pk, record_id, hashed, *vectors in rows
        }

    def _scan(self, payload: Payload) -> Iterator[list[tuple[str, str]]]:
        query = "SELECT pk::text, id FROM {table} WHERE pk > {last}::uuid ORDER BY pk LIMIT {limit}"
        page = [(str(UUID(int=0)), "")]
        while page := self._run(query, last=page[-1][0], limit=self.max_rows).fetchall():
            yield page

    def _to_native(self, filter: Mapping[str, object] | Composable | None, payload: Payload) -> Composable | None:
        if filter is None or isinstance(filter, Composable):
            return filter
        if not isinstance(filter, Mapping):
            raise InvalidRequestError(
                f"filter is of type {type(filter).__name__}; pass a dict of metadata, or psycopg.sql.SQL"
            )
        # A list contains its values, a number is an int or a float, and True is no number.
        clauses = []
        for key, values in check_filter(filter).items():
            wanted = [json.dumps({key: each}) for value in values for each in (value, [value])]
            clauses.append(SQL(" OR ").join(SQL("metadata @> {}").format(each) for each in wanted))
        return SQL("({})").format(SQL(") AND (").join(clauses)) if clauses else None

    def _describe_error(self, error: Exception, request: str) -> str | None:
        if self._late.is_set():
            return f"did not answer {request} within {self._timeout:g} s"
        return f"refused {request}: {' '.join(str(error).split())}" if isinstance(error, psycopg.Error) else None

    def _classify(self, error: Exception) -> type[SinkError]:
        return kind_of(error)


def _packed(rows: FloatArray, kind: str) -> list[bytes]:
    """The vectors ``[n, width]`` as PostgreSQL receives them in binary."""
    width = rows.shape[1]
    if kind == "bit":
        return [struct.pack(">i", width) + np.packbits(row > 0).tobytes() for row in rows]
    numbers = rows.astype(">f4" if kind == "vector" else ">f2")
    return [struct.pack(">HH", width, 0) + row.tobytes() for row in numbers]


def _unpacked(vector: str | list[float]) -> FloatArray:
    """``[width]``: a vector that was read, of length 1 if only its signs are stored."""
    if isinstance(vector, str):
        return np.where(np.array(list(vector)) == "1", 1, -1).astype(np.float32) / np.float32(len(vector) ** 0.5)
    return np.array(vector, np.float32)


def _number(digits: str) -> float:
    """An int of 64 bits, or the float of which jsonb wrote every digit."""
    return number if -(2**63) <= (number := int(digits)) < 2**63 else float(digits)


def sink_from_url(
    scheme: str,
    location: str,
    collection: str,
    *,
    dimensions: Sequence[int] | None = None,
    payload: str = "plain",
    datatype: str = "float32",
    index: str | None = None,
    timeout: float = 60,
) -> PgVectorSink:
    """Open ``pgvector+postgresql://host/db#docs``."""
    if scheme not in ("postgresql", "postgres") or not location.startswith("//"):
        raise InvalidRequestError(f"'pgvector+{scheme}:' names no PostgreSQL; write pgvector+postgresql://host/db#docs")
    dsn, options = f"{scheme}:{location}", {"datatype": datatype, "index": index, "timeout": timeout}
    return PgVectorSink(dsn, collection, dimensions=dimensions, payload=payload, **options)
