"""PgVectorSink: a table of PostgreSQL, with one pgvector column for each Matryoshka width."""

from __future__ import annotations

import json
import math
import re
import socket
import struct
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ClassVar
from uuid import UUID

import numpy as np
import psycopg
from psycopg.pq import Conninfo, TransactionStatus
from psycopg.rows import tuple_row
from psycopg.sql import SQL, Composable, Composed, Identifier

from millpond.errors import InvalidRequestError, SinkError, SinkRejectedError, SinkTooLargeError, SinkUnavailableError
from millpond.ingest.record import Record
from millpond.ingest.sinks.batch import FloatArray, WriteBatch
from millpond.ingest.sinks.client import Connection, Fault, check_timeout
from millpond.ingest.sinks.manifest import MANIFEST_KEY, CollectionManifest
from millpond.ingest.sinks.protocol import StoredRow, vector_name
from millpond.ingest.sinks.raw_rows import RawPage, VectorField
from millpond.ingest.sinks.search import Hit, SearchPlan
from millpond.ingest.sinks.table import TableDriver, TableSink, manifest_of
from millpond.support.filters import Condition, Range, check_filter
from millpond_pgvector.raw_rows import raw_fields, raw_pages

_SIGNS = {"gt": ">", "gte": ">=", "lt": "<", "lte": "<="}
_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")  # in JSON
# Connection, resources, operator, conflict with another transaction, lock, system, and a server that only reads.
_PASSING = re.compile("08|53|57|40|55P03|58|25006")
# What a server says when it refuses a connection; such errors have no SQLSTATE.
_LASTING = re.compile("authentication failed|does not exist|pg_hba|no password|permission denied|not supported")
_OPERATORS = {"vector": "vector_cosine_ops", "halfvec": "halfvec_cosine_ops", "bit": "bit_hamming_ops"}


class PgVectorSink(TableSink[Composable]):
    """Writes to one table of PostgreSQL with pgvector, and searches it; a request is a transaction.

    Args:
        dsn: ``postgresql://host/db`` or ``host=... dbname=...``, without a password (set ``PGPASSWORD`` or
            ``PGPASSFILE``), or an open ``psycopg.Connection`` that is in no transaction.
        table: Name of the table, or ``schema.table``.
        dimensions: The widths to store and search, each in a column ``d{width}``; by default those of the table, and
            in a new one the width that ``embed`` returns.
        fields: ``plain``: columns ``pk``, ``id``, ``text``, ``metadata`` (jsonb), ``content_hash``.
        datatype: ``float32`` (vector), ``float16`` (halfvec), or ``bit``: of all widths but the largest only the signs.
            By default that of the table.
        index: ``hnsw``, built by :meth:`close` after a run. By default a search is exact.
        timeout: Seconds that a request may take; those that build an index have no limit.

    Raises:
        InvalidRequestError: A string, name or option that is not valid.
        SinkError: The server does not answer, or refuses.
    """

    def __init__(
        self,
        dsn: str | psycopg.Connection[Any],
        table: str,
        *,
        dimensions: Sequence[int] | None = None,
        fields: str | None = None,
        datatype: str | None = None,
        index: str | None = None,
        timeout: float = 60,
    ) -> None:
        connection = PgVectorConnection(dsn, table, timeout=timeout)
        driver = PgVectorDriver(connection, fields=fields, datatype=datatype, index=index)
        super().__init__(driver, dimensions=dimensions, fields=fields)
        self.options = {"datatype": datatype, "index": index, "timeout": timeout}
        connection.open()


class PgVectorConnection(Connection):
    """A table of a server; requests are transactions."""

    database = "PostgreSQL"
    name_pattern = re.compile(r"(?:[A-Za-z_]\w{0,62}\.)?[A-Za-z_]\w{0,47}", re.ASCII)
    name_rule = "at most 48 letters, digits and underscores, no digit first, and SCHEMA. before them if need be"
    max_rows, max_bytes = 5000, 64 << 20

    def __init__(self, dsn: str | psycopg.Connection[Any], table: str, *, timeout: float) -> None:
        passed = dsn if isinstance(dsn, psycopg.Connection) else None
        super().__init__(
            None if isinstance(dsn, psycopg.Connection) else dsn, table, client=passed, timeout=check_timeout(timeout)
        )
        if self.owned:
            check_dsn(self.where)
        self._table = Identifier(*table.split("."))
        self._lock = threading.RLock()
        self._late = False  # the last request took too long, and what it waited for was shut down

    def open(self) -> None:
        """Connect."""
        if self.owned:
            self.client = self.request("the connection", self._connect)

    def exists(self) -> bool:
        """Whether there is such a table."""
        return self.rows("SELECT to_regclass({name})") != [(None,)]

    def names(self) -> list[str]:
        """Names of tables of sinks or with vectors, in the search path and in this one's schema."""
        found = self.rows(
            "SELECT CASE WHEN pg_table_is_visible(c.oid) THEN c.relname ELSE n.nspname || '.' || c.relname END "
            "FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.relkind IN ('r', 'p') AND "
            "(pg_table_is_visible(c.oid) OR n.nspname = {schema}) AND ("
            "starts_with(obj_description(c.oid, 'pg_class'), 'millpond ') OR EXISTS (SELECT FROM pg_attribute a "
            "JOIN pg_type t ON t.oid = a.atttypid WHERE a.attrelid = c.oid AND t.typname IN ('vector', 'halfvec')))",
            schema=self.collection.rpartition(".")[0],
        )
        return [name for (name,) in found]

    def read_manifest(self) -> object:
        """The manifest in the table's comment."""
        ((comment,),) = self.rows("SELECT obj_description(to_regclass({name}), 'pg_class')")
        mark, _, manifest = (comment or "").partition(" ")
        return manifest_of(manifest if mark == MANIFEST_KEY else None)

    def fault(self, error: Exception, request: str) -> Fault | None:
        """What an error of psycopg means."""
        if not isinstance(error, psycopg.Error):
            return None
        words, state = " ".join(str(error).split()), error.sqlstate
        if isinstance(error, psycopg.OperationalError) or state:
            kind = kind_of_state(state, str(error))
        else:
            kind = SinkRejectedError if isinstance(error, psycopg.DataError) else SinkError
        verb = "did not answer" if kind is SinkUnavailableError and not state else "refused"
        return Fault(words=f"{verb} {request}: {words}", kind=kind)

    def hang_up(self) -> None:
        """Shut the connection down, whose owner then meets its end; the descriptor stays his."""
        self._late = True
        with suppress(Exception):  # closed meanwhile, or never made
            line = socket.socket(fileno=self.client.fileno())
            try:
                line.shutdown(socket.SHUT_RDWR)
            finally:
                line.detach()

    def release(self) -> None:
        """Close the connection."""
        if self.client is not None:
            self.client.close()

    @contextmanager
    def transaction(self, *, limited: bool = True) -> Iterator[psycopg.Cursor[Any]]:
        """A cursor in a transaction, which the server ends as well when its time is over."""
        with self._lock:
            if self.owned and (self._late or self.client.closed):
                self.client.close()
                self.client = self._connect()
            self._late = False
            if self.client.info.transaction_status == TransactionStatus.INTRANS:
                raise InvalidRequestError("the connection is in a transaction; end it, or pass one with autocommit")
            with self.client.transaction():
                cursor = self.client.cursor(row_factory=tuple_row)
                limit = math.ceil(1000 * (self.timeout or 0)) if limited else 0
                cursor.execute(self.sql("SET LOCAL statement_timeout = {limit}", limit=limit))
                yield cursor

    def sql(self, query: str, **parts: Any) -> Composed:
        """A statement; a part that is no SQL becomes a literal."""
        return SQL(query).format(table=self._table, name=self._table.as_string(), **parts)

    def rows(self, query: str, **parts: Any) -> list[Any]:
        """The rows of one statement in a transaction of its own."""
        with self.transaction() as cursor:
            cursor.execute(self.sql(query, **parts))
            return cursor.fetchall() if cursor.description else []

    def _connect(self) -> psycopg.Connection[Any]:
        options: dict[str, Any] = {"autocommit": True, "connect_timeout": math.ceil(self.timeout or 0)}
        return psycopg.connect(self.where, prepare_threshold=None, **options)  # poolers keep no prepared statements


class PgVectorDriver(TableDriver[Composable]):
    """The requests of a sink."""

    datatypes: ClassVar[Mapping[str, str]] = {"float32": "vector", "float16": "halfvec", "bit": "bit"}
    indexes = ("hnsw",)

    def __init__(
        self, connection: PgVectorConnection, *, fields: str | None, datatype: str | None, index: str | None
    ) -> None:
        self.connection: PgVectorConnection = connection
        super().__init__(fields=fields, datatype=datatype, index=index)
        self._types: dict[int, str] = {}

    def check(self, record: Record, widths: Sequence[int]) -> None:
        """Raise InvalidRequestError for a record that PostgreSQL cannot store: too large, or with a NUL character."""
        super().check(record, widths)
        if "\0" in record.text or _NUL.search(json.dumps(dict(record.metadata))):
            raise InvalidRequestError("it holds a NUL character, which PostgreSQL does not store; leave that out")

    def create(self, manifest: CollectionManifest) -> None:
        """Create the table."""
        types = dict.fromkeys(manifest.dimensions, self.datatypes[self.datatype])
        if self.datatype == "bit":
            types[max(types)] = "vector"
            if len(types) == 1:
                raise InvalidRequestError("datatype='bit' keeps the largest width in float32; pass two dimensions")
        columns = [SQL("{} {}({})").format(Identifier(vector_name(d)), SQL(kind), d) for d, kind in types.items()]
        comment = f"{MANIFEST_KEY} {json.dumps(manifest.to_dict())}"
        with self.connection.transaction() as cursor:
            cursor.execute("SELECT pg_advisory_xact_lock(hashtext('millpond'))")  # of two that create, one waits
            cursor.execute("CREATE EXTENSION IF NOT EXISTS vector")
            fields = (
                "pk uuid PRIMARY KEY, id text NOT NULL, text text NOT NULL, metadata jsonb NOT NULL, content_hash text"
            )
            cursor.execute(
                self.connection.sql(f"CREATE TABLE {{table}} ({fields}, {{columns}})", columns=_listed(columns))
            )
            cursor.execute(self.connection.sql("COMMENT ON TABLE {table} IS {comment}", comment=comment))

    def store_manifest(self, manifest: CollectionManifest) -> None:
        """Replace the table's comment."""
        comment = f"{MANIFEST_KEY} {json.dumps(manifest.to_dict())}"
        self._rows("COMMENT ON TABLE {table} IS {comment}", comment=comment)

    def drop(self) -> None:
        """Delete the table."""
        self._rows("DROP TABLE {table}")

    def load(self) -> None:
        """Learn the types of the vectors."""
        self.connection.request("a look at its columns", self._read_types)

    def _read_types(self) -> None:
        found = self._rows(
            "SELECT attname, typname FROM pg_attribute JOIN pg_type ON pg_type.oid = atttypid "
            "WHERE attrelid = to_regclass({name}) AND attname ~ '^d[1-9][0-9]*$'"
        )
        self._types = {int(column[1:]): kind for column, kind in found}

    def stored_datatype(self, manifest: CollectionManifest) -> str:
        """The datatype of its vectors."""
        self._read_types()
        stored = self._types[manifest.dimensions[0]]
        return next(name for name, kind in self.datatypes.items() if kind == stored)

    def pack(self, rows: FloatArray) -> list[bytes]:
        """As PostgreSQL receives vectors ``[n, width]`` in binary."""
        width, kind = rows.shape[1], self._types[rows.shape[1]]
        head = struct.pack(">i", width) if kind == "bit" else struct.pack(">HH", width, 0)
        sent = np.packbits(rows > 0, axis=1) if kind == "bit" else rows.astype(">f4" if kind == "vector" else ">f2")
        return [head + row.tobytes() for row in sent]

    def upsert(self, batch: WriteBatch) -> None:
        """Copy the rows to a table of this transaction, and take them from there."""
        columns = self.columns(batch)
        jsonb = (b"\1" + text.encode() for text in columns["metadata"])  # in binary, with its version
        sent = {**columns, "pk": map(UUID, columns["pk"]), "metadata": jsonb}
        names = _listed(map(Identifier, columns))
        changed = _listed(SQL("EXCLUDED.{}").format(Identifier(name)) for name in columns)
        with self.connection.transaction() as cursor:
            cursor.execute(self.connection.sql("CREATE TEMP TABLE {own} (LIKE {table}) ON COMMIT DROP", own=_OWN))
            with cursor.copy(
                self.connection.sql("COPY {own} ({names}) FROM STDIN (FORMAT BINARY)", own=_OWN, names=names)
            ) as copy:
                for row in zip(*sent.values(), strict=True):
                    copy.write_row(row)
            # In one order, so that no two writers wait for each other.
            query = "INSERT INTO {table} ({names}) SELECT {names} FROM {own} ORDER BY pk "
            query += "ON CONFLICT (pk) DO UPDATE SET ({names}) = ROW({changed})"
            cursor.execute(self.connection.sql(query, own=_OWN, names=names, changed=changed))

    def query(self, plan: SearchPlan, condition: Composable | None, manifest: CollectionManifest) -> list[Hit]:
        """The hits of a search."""
        width, limit = (plan.full, plan.k) if plan.coarse is None else (plan.coarse, plan.candidates)
        scale = 2 / plan.full if self._types[plan.full] == "bit" else 1
        near, full = (self._distance(each, plan.vectors[each]) for each in (width, plan.full))
        inner = "SELECT * FROM {table} WHERE {condition} ORDER BY {near} LIMIT {limit}"
        query = "SELECT pk, id, text, metadata::text, 1 - {scale} * ({full}) FROM (" + inner + ") AS nearest "
        query += "ORDER BY {full} LIMIT {k}"
        with self.connection.transaction() as cursor:
            cursor.execute("SET LOCAL hnsw.iterative_scan = strict_order")  # until as many rows as asked for are found
            cursor.execute(
                self.connection.sql("SET LOCAL hnsw.ef_search = {breadth}", breadth=min(max(limit, 40), 1000))
            )
            parts = {"near": near, "limit": limit, "full": full, "k": plan.k, "scale": scale}
            cursor.execute(self.connection.sql(query, condition=condition or SQL("true"), **parts))
            return self.hits(cursor.fetchall(), manifest)

    def delete(self, which: Sequence[str] | Composable, manifest: CollectionManifest) -> None:
        """Delete rows."""
        one_of = SQL("pk = ANY({}::uuid[])")
        condition = which if isinstance(which, Composable) else one_of.format(list(which))
        self._rows("DELETE FROM {table} WHERE {condition}", condition=condition)

    def build_index(self, width: int, index: str) -> None:
        """Index the vectors of a width, and the metadata."""
        kinds = [(vector_name(width), index, _OPERATORS[self._types[width]]), ("metadata", "gin", "jsonb_path_ops")]
        with self.connection.transaction(limited=False) as cursor:
            for column, *words in kinds:
                name = Identifier(f"{self.connection.collection.rpartition('.')[2]}_{column}_{words[0]}")
                query = "CREATE INDEX IF NOT EXISTS {index} ON {table} USING {method} ({column} {operators})"
                method, operators = map(SQL, words)
                parts = {"method": method, "operators": operators, "column": Identifier(column)}
                cursor.execute(self.connection.sql(query, index=name, **parts))

    def count(self) -> int:
        """How many rows there are."""
        return int(self._rows("SELECT count(*) FROM {table}")[0][0])

    def fetch(
        self, row_ids: Sequence[str], widths: Sequence[int], manifest: CollectionManifest
    ) -> dict[str, StoredRow]:
        """Those of these rows that exist; signs are no vectors."""
        return super().fetch(row_ids, self._readable(widths), manifest)

    def read(self, row_ids: Sequence[str], widths: Sequence[int], manifest: CollectionManifest) -> dict[str, StoredRow]:
        """The same with texts and metadata."""
        return super().read(row_ids, self._readable(widths), manifest)

    def _readable(self, widths: Sequence[int]) -> list[int]:
        return [width for width in widths if self._types[width] != "bit"]

    def select(self, row_ids: Sequence[str], columns: Sequence[str], widths: Sequence[int]) -> list[Any]:
        """These columns of these rows, and then their vectors."""
        parts = [SQL("{}::text" if name == "metadata" else "{}").format(Identifier(name)) for name in columns]
        parts += [SQL("{}::real[]").format(Identifier(vector_name(width))) for width in widths]
        query = "SELECT {columns} FROM {table} WHERE pk = ANY({ids}::uuid[])"
        return self._rows(query, columns=_listed(parts), ids=list(row_ids))

    def scan(self, manifest: CollectionManifest) -> Iterator[list[tuple[str, str]]]:
        """Pages of row ids and record ids."""
        query = "SELECT pk::text, id FROM {table} WHERE pk > {last}::uuid ORDER BY pk LIMIT {limit}"
        page = [(str(UUID(int=0)), "")]
        while page := self._rows(query, last=page[-1][0], limit=self.connection.max_rows):
            yield page

    def raw_fields(self) -> list[VectorField]:
        """The vectors of any table."""
        return raw_fields(self.connection.rows)

    def raw_pages(self, field: VectorField) -> Iterator[RawPage]:
        """Rows of any table."""
        return raw_pages(self.connection, field)

    def condition(
        self, filter: Mapping[str, object] | Composable | None, manifest: CollectionManifest
    ) -> Composable | None:
        """A condition in SQL."""
        if filter is None or isinstance(filter, Composable):
            return filter
        if not isinstance(filter, Mapping):
            kind = type(filter).__name__
            raise InvalidRequestError(f"filter is of type {kind}; pass a dict of metadata, or psycopg.sql.SQL")
        clauses = [_clause(key, wanted) for key, wanted in check_filter(filter).items()]
        return SQL("({})").format(SQL(") AND (").join(clauses)) if clauses else None

    def is_exact(self, conditions: Mapping[str, Condition]) -> bool:
        """Times are compared as str, a day around the range."""
        return not any(isinstance(condition, Range) and condition.of_times for condition in conditions.values())

    def matching(self, condition: Composable, manifest: CollectionManifest) -> Iterator[list[tuple[str, Any]]]:
        """Pages of row ids and metadata."""
        query = "SELECT pk::text, metadata::text FROM {table} WHERE pk > {last}::uuid AND {condition} "
        query += "ORDER BY pk LIMIT {limit}"
        last = str(UUID(int=0))
        while page := self._rows(query, last=last, condition=condition, limit=self.connection.max_rows):
            yield [(row_id, json.loads(metadata)) for row_id, metadata in page]
            last = page[-1][0]

    def _distance(self, width: int, vector: FloatArray) -> Composed:
        bits = self._types[width] == "bit"
        text = "".join(np.where(vector > 0, "1", "0")) if bits else json.dumps(vector.tolist())
        expression = SQL("{} <~> {}::{}({})" if bits else "{} <=> {}::{}({})")
        return expression.format(Identifier(vector_name(width)), text, SQL(self._types[width]), width)

    def _rows(self, query: str, **parts: Any) -> list[Any]:
        return self.connection.rows(query, **parts)


_OWN = Identifier("millpond$rows")  # the name of no sink's table, which has no $


def _clause(key: str, condition: Condition) -> Composed:
    """The condition of a metadata key in SQL; a range is one of the JSON path language."""
    if isinstance(condition, Range):
        kind, bounds = ("string", condition.texts) if condition.of_times else ("number", condition.bounds)
        tests = [f'@.type() == "{kind}"', *(f"@ {_SIGNS[word]} ${word}" for word in bounds)]
        path = f"$.{_json(key)} ? ({' && '.join(tests)})"
        return SQL("jsonb_path_exists(metadata, {}::jsonpath, {}::jsonb)").format(path, _json(bounds))
    wanted = [_json({key: each}) for value in condition for each in (value, [value])]
    return SQL(" OR ").join(SQL("metadata @> {}").format(each) for each in wanted)


def _json(value: object) -> str:
    """A part of a filter as JSON."""
    text = json.dumps(value)
    if _NUL.search(text):
        raise InvalidRequestError(f"the filter's {text} holds a NUL character, which PostgreSQL does not store")
    return text


def _listed(parts: Iterable[Composable]) -> Composed:
    return SQL(", ").join(parts)


def check_dsn(dsn: str) -> None:
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


def kind_of_state(state: str | None, message: str) -> type[SinkError]:
    """Wait, send less, leave a row out, or nothing; without a state the connection was lost, or never made."""
    if state is None:
        return SinkError if _LASTING.search(message) else SinkUnavailableError
    if _PASSING.match(state):
        return SinkUnavailableError
    if state.startswith("54"):  # a limit of the program
        return SinkTooLargeError
    return SinkRejectedError if state.startswith(("22", "23")) else SinkError  # data, constraints
