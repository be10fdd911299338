"""PgVectorSink: a table of PostgreSQL, with one pgvector column for each Matryoshka width."""

from __future__ import annotations

import json
import math
import re
import struct
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar
from uuid import UUID

import numpy as np
import psycopg
from psycopg.pq import Conninfo, TransactionStatus
from psycopg.rows import tuple_row
from psycopg.sql import SQL, Composable, Composed, Identifier

from millpond.errors import InvalidRequestError, SinkError, SinkRejectedError
from millpond.ingest.record import Record
from millpond.ingest.sinks.batch import FloatArray
from millpond.ingest.sinks.deadline import hang_up_after
from millpond.ingest.sinks.manifest import MANIFEST_KEY, CollectionManifest
from millpond.ingest.sinks.payload import FieldLayout
from millpond.ingest.sinks.protocol import StoredRow, vector_name
from millpond.ingest.sinks.search import SearchPlan
from millpond.ingest.sinks.sqlstate import kind_of_state
from millpond.ingest.sinks.table import TableSink
from millpond.metadata import check_filter

_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")  # in JSON
_OPERATORS = {"vector": "vector_cosine_ops", "halfvec": "halfvec_cosine_ops", "bit": "bit_hamming_ops"}


class PgVectorSink(TableSink[Composable]):
    """Writes to one table of PostgreSQL with pgvector, and searches it; a request is a transaction.

    Args:
        dsn: ``postgresql://host/db`` or ``host=... dbname=...``, without a password (set ``PGPASSWORD`` or
            ``PGPASSFILE``), or an open ``psycopg.Connection`` that is in no transaction.
        table: Name of the table, or ``schema.table``.
        dimensions: The widths to store and search, each in a column ``d{width}``; by default the width that ``embed``
            returns. A search without them uses every width that the table has.
        fields: ``plain``: columns ``pk``, ``id``, ``text``, ``metadata`` (jsonb), ``content_hash``.
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
    datatypes: ClassVar[Mapping[str, str]] = {"float32": "vector", "float16": "halfvec", "bit": "bit"}
    indexes = ("hnsw",)

    def __init__(
        self,
        dsn: str | psycopg.Connection[Any],
        table: str,
        *,
        dimensions: Sequence[int] | None = None,
        fields: str = "plain",
        datatype: str = "float32",
        index: str | None = None,
        timeout: float = 60,
    ) -> None:
        path, owned = (None, False) if isinstance(dsn, psycopg.Connection) else (dsn, True)
        super().__init__(path, table, dimensions=dimensions, fields=fields, owned=owned)
        self._set_options(datatype=datatype, index=index)
        if owned:
            _check_dsn(self._where)
        if not isinstance(timeout, int | float) or not 0 < timeout <= threading.TIMEOUT_MAX:
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
            try:
                with hang_up_after(seconds, self._client.fileno) as self._late, self._client.transaction():
                    cursor = self._client.cursor(row_factory=tuple_row)
                    cursor.execute(
                        self._sql("SET LOCAL statement_timeout = {limit}", limit=math.ceil(1000 * (seconds or 0)))
                    )
                    yield cursor
            finally:
                if self._owned and self._late.is_set():
                    self._client.close()  # shut down, which it may not have met yet

    def _sql(self, query: str, **parts: Any) -> Composed:
        """A statement; a part that is no SQL becomes a literal."""
        return SQL(query).format(table=self._table, name=self._table.as_string(), **parts)

    def _rows(self, query: str, **parts: Any) -> list[Any]:
        """The rows of one statement in a transaction of its own."""
        with self._transaction(self._timeout) as cursor:
            cursor.execute(self._sql(query, **parts))
            return cursor.fetchall() if cursor.description else []

    def _exists(self) -> bool:
        return self._rows("SELECT to_regclass({name})") != [(None,)]

    def _read_comment(self) -> str | None:
        ((comment,),) = self._rows("SELECT obj_description(to_regclass({name}), 'pg_class')")
        mark, _, manifest = (comment or "").partition(" ")
        return manifest if mark == MANIFEST_KEY else None

    def _create(self, manifest: CollectionManifest) -> None:
        types = dict.fromkeys(manifest.dimensions, self.datatypes[self._datatype])
        if self._datatype == "bit":
            types[max(types)] = "vector"
            if len(types) == 1:
                raise InvalidRequestError("datatype='bit' keeps the largest width in float32; pass two dimensions")
        columns = [SQL("{} {}({})").format(Identifier(vector_name(d)), SQL(kind), d) for d, kind in types.items()]
        comment = f"{MANIFEST_KEY} {json.dumps(manifest.to_dict())}"
        with self._transaction(self._timeout) as cursor:
            cursor.execute("SELECT pg_advisory_xact_lock(hashtext('millpond'))")  # of two that create, one waits
            cursor.execute("CREATE EXTENSION IF NOT EXISTS vector")
            fields = (
                "pk uuid PRIMARY KEY, id text NOT NULL, text text NOT NULL, metadata jsonb NOT NULL, content_hash text"
            )
            cursor.execute(self._sql(f"CREATE TABLE {{table}} ({fields}, {{columns}})", columns=_listed(columns)))
            cursor.execute(self._sql("COMMENT ON TABLE {table} IS {comment}", comment=comment))

    def _load(self) -> None:
        query = (
            "SELECT attname, typname FROM pg_attribute JOIN pg_type ON pg_type.oid = atttypid "
            "WHERE attrelid = to_regclass({name}) AND attname ~ '^d[1-9][0-9]*$'"
        )
        with self._request("a look at its columns"):
            self._types = {int(column[1:]): kind for column, kind in self._rows(query)}

    def _stored_datatype(self, manifest: CollectionManifest) -> str:
        self._load()
        stored = self._types[manifest.dimensions[0]]
        return next(name for name, kind in self.datatypes.items() if kind == stored)

    def _pack(self, rows: FloatArray) -> list[bytes]:
        """As PostgreSQL receives vectors ``[n, width]`` in binary."""
        width, kind = rows.shape[1], self._types[rows.shape[1]]
        head = struct.pack(">i", width) if kind == "bit" else struct.pack(">HH", width, 0)
        sent = np.packbits(rows > 0, axis=1) if kind == "bit" else rows.astype(">f4" if kind == "vector" else ">f2")
        return [head + row.tobytes() for row in sent]

    def _upsert(self, columns: dict[str, list[Any]]) -> None:
        jsonb = (b"\1" + text.encode() for text in columns["metadata"])  # in binary, with its version
        sent = {**columns, "pk": map(UUID, columns["pk"]), "metadata": jsonb}
        names = _listed(map(Identifier, columns))
        changed = _listed(SQL("EXCLUDED.{}").format(Identifier(name)) for name in columns)
        with self._transaction(self._timeout) as cursor:
            cursor.execute(self._sql("CREATE TEMP TABLE {own} (LIKE {table}) ON COMMIT DROP", own=_OWN))
            with cursor.copy(
                self._sql("COPY {own} ({names}) FROM STDIN (FORMAT BINARY)", own=_OWN, names=names)
            ) as copy:
                for row in zip(*sent.values(), strict=True):
                    copy.write_row(row)
            # In one order, so that no two writers wait for each other.
            query = "INSERT INTO {table} ({names}) SELECT {names} FROM {own} ORDER BY pk "
            query += "ON CONFLICT (pk) DO UPDATE SET ({names}) = ROW({changed})"
            cursor.execute(self._sql(query, own=_OWN, names=names, changed=changed))

    def _query(self, plan: SearchPlan, native: Composable | None, fields: FieldLayout) -> list[Any]:
        width, limit = (plan.full, plan.k) if plan.coarse is None else (plan.coarse, plan.candidates)
        scale = 2 / plan.full if self._types[plan.full] == "bit" else 1
        near, full = (self._distance(each, plan.vectors[each]) for each in (width, plan.full))
        inner = "SELECT * FROM {table} WHERE {condition} ORDER BY {near} LIMIT {limit}"
        query = "SELECT pk, id, text, metadata::text, 1 - {scale} * ({full}) FROM (" + inner + ") AS nearest "
        query += "ORDER BY {full} LIMIT {k}"
        condition = native or SQL("true")
        with self._transaction(self._timeout) as cursor:
            cursor.execute("SET LOCAL hnsw.iterative_scan = strict_order")  # until as many rows as asked for are found
            cursor.execute(self._sql("SET LOCAL hnsw.ef_search = {breadth}", breadth=min(max(limit, 40), 1000)))
            parts = {"near": near, "limit": limit, "full": full, "k": plan.k, "scale": scale}
            return cursor.execute(self._sql(query, condition=condition, **parts)).fetchall()

    def _distance(self, width: int, vector: FloatArray) -> Composed:
        bits = self._types[width] == "bit"
        text = "".join(np.where(vector > 0, "1", "0")) if bits else json.dumps(vector.tolist())
        expression = SQL("{} <~> {}::{}({})" if bits else "{} <=> {}::{}({})")
        return expression.format(Identifier(vector_name(width)), text, SQL(self._types[width]), width)

    def _build_index(self, width: int, index: str) -> None:
        kinds = [(vector_name(width), index, _OPERATORS[self._types[width]]), ("metadata", "gin", "jsonb_path_ops")]
        with self._transaction(None) as cursor:
            for column, *words in kinds:
                name = Identifier(f"{self._collection.rpartition('.')[2]}_{column}_{words[0]}")
                query = "CREATE INDEX IF NOT EXISTS {index} ON {table} USING {method} ({column} {operators})"
                method, operators = map(SQL, words)
                parts = {"method": method, "operators": operators, "column": Identifier(column)}
                cursor.execute(self._sql(query, index=name, **parts))

    def _delete(self, which: Sequence[str] | Composable, fields: FieldLayout) -> None:
        one_of = SQL("pk = ANY({}::uuid[])")
        condition = which if isinstance(which, Composable) else one_of.format(list(which))
        self._rows("DELETE FROM {table} WHERE {condition}", condition=condition)

    def _count(self) -> int:
        return int(self._rows("SELECT count(*) FROM {table}")[0][0])

    def _fetch(self, row_ids: Sequence[str], widths: Sequence[int], fields: FieldLayout) -> dict[str, StoredRow]:
        return super()._fetch(row_ids, [width for width in widths if self._types[width] != "bit"], fields)

    def _select(self, row_ids: Sequence[str], widths: Sequence[int]) -> list[Any]:
        columns = [SQL(", {}::real[]").format(Identifier(vector_name(width))) for width in widths]
        query = "SELECT pk, id, content_hash{columns} FROM {table} WHERE pk = ANY({ids}::uuid[])"
        return self._rows(query, columns=SQL("").join(columns), ids=list(row_ids))

    def _scan(self, fields: FieldLayout) -> Iterator[list[tuple[str, str]]]:
        query = "SELECT pk::text, id FROM {table} WHERE pk > {last}::uuid ORDER BY pk LIMIT {limit}"
        page = [(str(UUID(int=0)), "")]
        while page := self._rows(query, last=page[-1][0], limit=self.max_rows):
            yield page

    def _to_native(self, filter: Mapping[str, object] | Composable | None, fields: FieldLayout) -> Composable | None:
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
        if isinstance(error, psycopg.OperationalError) or getattr(error, "sqlstate", None):
            return kind_of_state(getattr(error, "sqlstate", None), str(error))
        return SinkRejectedError if isinstance(error, psycopg.DataError) else SinkError


_OWN = Identifier("millpond$rows")  # the name of no sink's table, which has no $


def _listed(parts: Iterable[Composable]) -> Composed:
    return SQL(", ").join(parts)


def _check_dsn(dsn: str) -> None:
    """Raise InvalidRequestError, which shows nothing of it, for a str that is no connection's or holds a secret."""
    advice = "write postgresql://host/db; user and password come from PGUSER, PGPASSWORD and PGPASSFILE"
    try:
        secret = any(option.val and option.dispchar == b"*" for option in Conninfo.parse(dsn.encode()))
    except psycopg.Error:  # not chained: its message quotes the str
        dsn = ""
    if not dsn:
        raise InvalidRequestError(f"the dsn is no connection string of PostgreSQL; {advice}")
    if secret:
        raise InvalidRequestError(f"the dsn holds a password; {advice}")
