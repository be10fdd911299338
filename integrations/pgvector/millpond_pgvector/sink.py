"""PgVectorSink: a table of PostgreSQL, with one pgvector column for each Matryoshka width."""

from __future__ import annotations

import json
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

from millpond.errors import InvalidRequestError, SinkError
from millpond.ingest.batch import FloatArray
from millpond.ingest.deadline import hang_up_after
from millpond.ingest.manifest import MANIFEST_KEY, CollectionManifest
from millpond.ingest.payload import Payload
from millpond.ingest.record import Record
from millpond.ingest.search import SearchPlan
from millpond.ingest.sink import vector_name
from millpond.ingest.table_sink import TableSink
from millpond.metadata import check_filter
from millpond_pgvector.connection import check_dsn, kind_of

_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")  # in JSON
_OPERATORS = {"vector": "vector_cosine_ops", "halfvec": "halfvec_cosine_ops", "bit": "bit_hamming_ops"}
_COLUMNS = (
    "pk uuid PRIMARY KEY, id text NOT NULL, text text NOT NULL, metadata jsonb NOT NULL, content_hash text NOT NULL"
)


class PgVectorSink(TableSink[Composable]):
    """Writes to one table of PostgreSQL with pgvector, and searches it; a request is a transaction.

    Args:
        dsn: ``postgresql://host/db`` or ``host=... dbname=...``, without a password (set ``PGPASSWORD`` or
            ``PGPASSFILE``), or an open ``psycopg.Connection`` that is in no transaction.
        table: Name of the table, or ``schema.table``.
        dimensions: The widths to store and search, each in a column ``d{width}``; by default the width that ``embed``
            returns. A search without them uses every width that the table has.
        payload: ``plain``: columns ``pk``, ``id``, ``text``, ``metadata`` (jsonb), ``content_hash``.
        datatype: ``float32`` (vector), ``float16`` (halfvec), or ``bit``: of all widths but the largest only the signs.
        index: ``hnsw``, built by :meth:`close` after a run. By default a search is exact.
        timeout: Seconds that a request may take; those that build an index have no limit.

    Raises:
        InvalidRequestError: A string, name or option that is not valid.
        SinkError: The server does not answer, or refuses.
    """

    database = "PostgreSQL"
    name_pattern = re.compile(r"(?:[A-Za-z_]\w{0,62}\.)?[A-Za-z_]\w{0,47}", re.ASCII)
    name_rule = "at most 48 letters, digits and underscores, no digit first, and SCHEMA. before them if need be"
    max_rows, max_bytes, float_bytes = 5000, 64 << 20, 4
    datatypes = {"float32": "vector", "float16": "halfvec", "bit": "bit"}
    indexes = ("hnsw",)

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
        path, owned = (None, False) if isinstance(dsn, psycopg.Connection) else (dsn, True)
        super().__init__(path, table, dimensions=dimensions, payload=payload, owned=owned)
        self._set_options(datatype=datatype, index=index)
        if owned:
            check_dsn(self._where)
        if not 0 < timeout <= threading.TIMEOUT_MAX:
            raise InvalidRequestError(f"timeout={timeout!r} is no time; pass seconds above 0")
        self._timeout, self._table, self._types = timeout, Identifier(*table.split(".")), dict[int, str]()
        self._lock, self._late = threading.RLock(), threading.Event()
        with self._request("the connection"):
            self._client = self._connect() if owned else dsn

    def check(self, record: Record) -> None:
        """Raise InvalidRequestError for a record that PostgreSQL cannot store: too large, or with a NUL character."""
        super().check(record)
        if "\0" in record.text or _NUL.search(json.dumps(dict(record.metadata))):
            raise InvalidRequestError("it holds a NUL character, which PostgreSQL does not store; leave that out")

    def _connect(self) -> psycopg.Connection[Any]:
        options: dict[str, Any] = {"autocommit": True, "connect_timeout": math.ceil(self._timeout)}
        return psycopg.connect(self._where, prepare_threshold=None, **options)  # poolers keep no prepared statements

    @contextmanager
    def _transaction(self, seconds: float | None) -> Iterator[psycopg.Cursor[Any]]:
        """A cursor in a transaction that is over after so many seconds, whatever the server does."""
        with self._lock:
            self._late = threading.Event()
            if self._owned and self._client.closed:
                self._client = self._connect()
            if self._client.info.transaction_status == TransactionStatus.INTRANS:
                raise InvalidRequestError("the connection is in a transaction; end it, or pass one with autocommit")
            with hang_up_after(seconds, self._client.fileno) as self._late, self._client.transaction():
                cursor = self._client.cursor(row_factory=tuple_row)
                cursor.execute(SQL("SET LOCAL statement_timeout = {}").format(math.ceil(1000 * (seconds or 0))))
                yield cursor

    def _run(self, query: str, **parts: Any) -> list[Any]:
        """The rows of one statement in a transaction of its own; a part that is no SQL becomes a literal."""
        with self._transaction(self._timeout) as cursor:
            cursor.execute(SQL(query).format(table=self._table, name=self._table.as_string(), **parts))
            return cursor.fetchall() if cursor.description else []

    def _exists(self) -> bool:
        return self._run("SELECT to_regclass({name})") != [(None,)]

    def _read_comment(self) -> str | None:
        ((comment,),) = self._run("SELECT obj_description(to_regclass({name}), 'pg_class')")
        mark, _, manifest = (comment or "").partition(" ")
        return manifest if mark == MANIFEST_KEY else None

    def _create(self, manifest: CollectionManifest) -> None:
        types = dict.fromkeys(manifest.dimensions, self.datatypes[self._datatype])
        if self._datatype == "bit":
            types[max(types)] = "vector"
            if len(types) == 1:
                raise InvalidRequestError("datatype='bit' keeps the largest width in float32; pass two dimensions")
        columns = [SQL("{} {}({})").format(Identifier(vector_name(d)), SQL(kind), d) for d, kind in types.items()]
        with self._transaction(self._timeout) as cursor:
            cursor.execute("SELECT pg_advisory_xact_lock(hashtext('millpond'))")  # of two that create, one waits
            cursor.execute("CREATE EXTENSION IF NOT EXISTS vector")
            command = SQL("CREATE TABLE {} (" + _COLUMNS + ", {})")
            cursor.execute(command.format(self._table, SQL(", ").join(columns)))
            comment = f"{MANIFEST_KEY} {json.dumps(manifest.to_dict())}"
            cursor.execute(SQL("COMMENT ON TABLE {} IS {}").format(self._table, comment))

    def _load(self) -> None:
        with self._request("a look at its columns"):
            rows = self._run(
                "SELECT attname, typname FROM pg_attribute JOIN pg_type ON pg_type.oid = atttypid "
                "WHERE attrelid = to_regclass({name}) AND attname ~ '^d[1-9][0-9]*$'"
            )
        self._types = {int(column[1:]): kind for column, kind in rows}

    def _stored_datatype(self, manifest: CollectionManifest) -> str:
        self._load()
        stored = self._types[manifest.dimensions[0]]
        return next(name for name, kind in self.datatypes.items() if kind == stored)

    def _pack(self, rows: FloatArray) -> list[bytes]:
        """As PostgreSQL receives vectors ``[n, width]`` in binary."""
        width = rows.shape[1]
        kind = self._types[width]
        if kind == "bit":
            return [struct.pack(">i", width) + bits.tobytes() for bits in np.packbits(rows > 0, axis=1)]
        numbers = rows.astype(">f4" if kind == "vector" else ">f2")
        return [struct.pack(">HH", width, 0) + row.tobytes() for row in numbers]

    def _unpack(self, vector: Any, width: int) -> FloatArray:
        numbers = np.asarray(vector, np.float32)
        return (2 * numbers - 1) / np.float32(math.sqrt(width)) if self._types[width] == "bit" else numbers

    def _upsert(self, columns: dict[str, list[Any]]) -> None:
        names = SQL(", ").join(map(Identifier, columns))
        changed = SQL(", ").join(SQL("EXCLUDED.{}").format(Identifier(name)) for name in columns)
        # jsonb in binary has its version, 1, before the text.
        sent = {
            **columns,
            "pk": map(UUID, columns["pk"]),
            "metadata": (b"\1" + m.encode() for m in columns["metadata"]),
        }
        with self._transaction(self._timeout) as cursor:
            # The name of no sink's table, which has no $.
            cursor.execute(SQL('CREATE TEMP TABLE "millpond$rows" (LIKE {}) ON COMMIT DROP').format(self._table))
            with cursor.copy(SQL('COPY "millpond$rows" ({}) FROM STDIN (FORMAT BINARY)').format(names)) as copy:
                for row in zip(*sent.values(), strict=True):
                    copy.write_row(row)
            command = SQL(
                'INSERT INTO {table} ({names}) SELECT {names} FROM "millpond$rows" ORDER BY pk '  # so that none deadlock
                "ON CONFLICT (pk) DO UPDATE SET ({names}) = ROW({changed})"
            )
            cursor.execute(command.format(table=self._table, names=names, changed=changed))

    def _query(self, plan: SearchPlan, native: Composable | None, payload: Payload) -> list[Any]:
        width, limit = (plan.full, plan.k) if plan.coarse is None else (plan.coarse, plan.candidates)
        query = SQL(
            "SELECT pk, id, text, metadata::text, 1 - {scale} * ({full}) FROM (SELECT * FROM {table} "
            "WHERE {condition} ORDER BY {nearest} LIMIT {limit}) AS nearest ORDER BY {full} LIMIT {k}"
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
            cursor.execute("SET LOCAL hnsw.iterative_scan = strict_order")  # until as many rows as asked for are found
            cursor.execute(SQL("SET LOCAL hnsw.ef_search = {}").format(min(max(limit, 40), 1000)))
            return cursor.execute(query).fetchall()

    def _distance(self, width: int, vector: FloatArray) -> Composable:
        bits = self._types[width] == "bit"
        text = "".join("01"[number > 0] for number in vector) if bits else json.dumps(vector.tolist())
        expression = SQL("{} <~> {}::{}({})" if bits else "{} <=> {}::{}({})")
        return expression.format(Identifier(vector_name(width)), text, SQL(self._types[width]), width)

    def _build_index(self, width: int, index: str) -> None:
        column, table = vector_name(width), self._collection.rpartition(".")[2]
        with self._transaction(None) as cursor:
            for indexed, method, operators in (
                (column, index, _OPERATORS[self._types[width]]),
                ("metadata", "gin", "jsonb_path_ops"),
            ):
                name = Identifier(f"{table}_{indexed}_{method}")
                command = SQL("CREATE INDEX IF NOT EXISTS {} ON {} USING {} ({} {})")
                cursor.execute(command.format(name, self._table, SQL(method), Identifier(indexed), SQL(operators)))

    def _delete(self, which: Sequence[str] | Composable, payload: Payload) -> None:
        one_of = SQL("pk = ANY({}::uuid[])")
        condition = which if isinstance(which, Composable) else one_of.format(list(which))
        self._run("DELETE FROM {table} WHERE {condition}", condition=condition)

    def _count(self) -> int:
        return int(self._run("SELECT count(*) FROM {table}")[0][0])

    def _select(self, row_ids: Sequence[str], widths: Sequence[int]) -> list[Any]:
        kinds = ["string_to_array({}::text, NULL)::real[]" if self._types[d] == "bit" else "{}::real[]" for d in widths]
        columns = [SQL(kind).format(Identifier(vector_name(d))) for d, kind in zip(widths, kinds, strict=True)]
        read = SQL(", ").join([SQL("pk, id, content_hash"), *columns])
        return self._run("SELECT {read} FROM {table} WHERE pk = ANY({ids}::uuid[])", read=read, ids=list(row_ids))

    def _scan(self, payload: Payload) -> Iterator[list[tuple[str, str]]]:
        query = "SELECT pk::text, id FROM {table} WHERE pk > {last}::uuid ORDER BY pk LIMIT {limit}"
        page = [(str(UUID(int=0)), "")]
        while page := self._run(query, last=page[-1][0], limit=self.max_rows):
            yield page

    def _to_native(self, filter: Mapping[str, object] | Composable | None, payload: Payload) -> Composable | None:
        if filter is None or isinstance(filter, Composable):
            return filter
        if not isinstance(filter, Mapping):
            kind = type(filter).__name__
            raise InvalidRequestError(f"filter is of type {kind}; pass a dict of metadata, or psycopg.sql.SQL")
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
