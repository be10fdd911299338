"""TableSource: a table of PostgreSQL that changes, for ``millpond watch``."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import date, datetime, timedelta
from typing import Any

import psycopg
from psycopg.rows import dict_row, tuple_row
from psycopg.sql import SQL, Composable, Composed, Identifier

from millpond.errors import InvalidRequestError, SinkError, SinkUnavailableError
from millpond.ingest.pipeline.journal import CollectionEntries
from millpond.ingest.record import Record, Rejected
from millpond.ingest.sources.read import RecordReader
from millpond.ingest.sources.rows import Columns, RowReader
from millpond.ingest.watch.source import Changes
from millpond_pgvector.sink import check_dsn

logger = logging.getLogger(__name__)

_POLL_SECONDS, _POLL_WITH_NOTIFY_SECONDS = 5.0, 300.0
# All rows are read again so often: for what a transaction of old has committed late, and counts that were lost.
_WHOLE_SECONDS = 3600.0
# A transaction writes the time of its beginning, and may be committed so much later.
_OVERLAP = timedelta(seconds=60)
_PAGE = 1000
_LOOK_SECONDS = 1.0  # of the listener, whether it is to end
_CONNECT_SECONDS = 10


class TableSource:
    """A table whose rows are records.

    Args:
        url: ``postgresql://HOST/DATABASE#TABLE``, or ``#SCHEMA.TABLE``; it holds no password.
        columns: The columns of a record. Each row has an id.
        poll: Seconds between two looks; by default 5, and 300 with ``notify``.
        updated: The column that says when a row was changed; without it all rows are read when some have changed.
        notify: The channel of NOTIFY; its payload may be the id of a row.
    """

    def __init__(
        self,
        url: str,
        columns: Columns,
        *,
        poll: float | None = None,
        updated: str | None = None,
        notify: str | None = None,
    ) -> None:
        self._dsn, mark, table = url.rpartition("#")
        if not mark or not table:
            raise InvalidRequestError("the URL names no table; write postgresql://HOST/DATABASE#TABLE")
        check_dsn(self._dsn)
        self.name = table
        self._table = Identifier(*table.split("."))
        self._columns, self._updated, self._channel = columns, updated, notify
        self._poll = poll or (_POLL_SECONDS if notify is None else _POLL_WITH_NOTIFY_SECONDS)
        self._rows = RowReader(f"the table {table}", columns)
        self._lock = threading.Lock()
        self._noticed: float | None = None  # since when there are changes that are not accepted
        self._ids: set[str] = set()  # that notifications have named
        self._asked = False  # whether a notification named none
        self._look = self._whole = 0.0
        self._state: tuple[Any, ...] | None = None  # the table's counts, and the last time in it, as of the last look
        self._since: Any = None
        self._client: psycopg.Connection[Any] | None = None
        self._ended = threading.Event()
        self._listener: threading.Thread | None = None
        self._wake: Callable[[], None] = lambda: None
        self._type = SQL("text")

    def start(self, wake: Callable[[], None]) -> None:
        """Check the columns, and begin to listen."""
        self._wake = wake
        try:
            self._check()
        except psycopg.errors.UndefinedTable:
            raise InvalidRequestError(f"there is no table {self.name!r}") from None
        if self._channel is not None:
            listening = threading.Event()
            self._listener = threading.Thread(
                target=self._listen, args=(listening,), name="millpond-listen", daemon=True
            )
            self._listener.start()
            listening.wait(_CONNECT_SECONDS)

    def stop(self) -> None:
        """Close the connections."""
        self._ended.set()
        if self._listener is not None:
            self._listener.join()
        if self._client is not None:
            self._client.close()

    def is_there(self) -> bool:
        """Whether the server answers, and has the table."""
        with suppress(SinkUnavailableError):
            return self._query(SQL("SELECT to_regclass({})").format(self._table.as_string())) != [(None,)]
        return False

    def oldest(self) -> float | None:
        """When the oldest change was noticed that is not accepted."""
        return self._noticed

    def due(self) -> float | None:
        """When to look again."""
        return self._look

    def full(self) -> RecordReader:
        """All rows."""

        def items() -> Iterator[Record | Rejected]:
            state = self._read_state()
            yield from self._all()
            self._settle(state)

        return RecordReader(items())

    def changes(self, entries: CollectionEntries) -> Changes | None:
        """The rows that have changed, as the column, the notifications or the table's counts say."""
        now = time.monotonic()
        with self._lock:
            ids, self._ids = self._ids, set()
            asked, self._asked = self._asked, False
        if not (ids or asked or now >= self._look):
            return None
        try:
            return self._changes(entries, ids, asked, now)
        except BaseException:
            self._return(ids, asked)
            raise

    def _changes(self, entries: CollectionEntries, ids: set[str], asked: bool, now: float) -> Changes | None:
        state = self._read_state()
        self._look = now + self._poll
        whole = now >= self._whole or (self._updated is None and (asked or state[0] is None or state != self._state))
        changed = whole or asked or state != self._state
        if not (changed or ids):
            return None
        self._noticed = now if self._noticed is None else self._noticed
        deleted = whole or self._state is None or state[:2] != self._state[:2]

        def records() -> Iterator[Record | Rejected]:
            if whole:
                yield from self._all()
                return
            if changed and self._updated is not None:
                yield from self._since_then()
            if ids:
                yield from self._some(sorted(ids))

        def gone(seen: set[str]) -> Iterable[str]:
            known = seen if whole else seen | set(self._every_id()) if deleted else None
            if known is not None:
                for page in entries.pages():
                    yield from (each.id for each in page if each.chunks and each.id not in known)
            yield from ids - seen

        def accept() -> None:
            if whole:
                self._whole = time.monotonic() + _WHOLE_SECONDS
            if changed:
                self._settle(state)
            with self._lock:
                self._noticed = time.monotonic() if self._ids or self._asked else None

        return Changes(records=self._kept(records(), ids, asked), gone=gone, accept=accept)

    def _kept(self, items: Iterator[Record | Rejected], ids: set[str], asked: bool) -> Iterator[Record | Rejected]:
        """The items; what was notified is kept for the next time if they cannot be read to their end."""
        try:
            yield from items
        except BaseException:
            self._return(ids, asked)
            raise

    def _return(self, ids: set[str], asked: bool) -> None:
        with self._lock:
            self._ids |= ids
            self._asked |= asked
        self._look = 0.0

    def _settle(self, state: tuple[Any, ...]) -> None:
        if self._state is None:
            self._whole = time.monotonic() + _WHOLE_SECONDS
            self._look = time.monotonic() + self._poll
        self._state = state
        last = state[-1]
        if isinstance(last, datetime):
            last = last - _OVERLAP
        elif isinstance(last, date):
            last = last - timedelta(days=1)
        self._since = last

    def _check(self) -> None:
        """The columns that are named exist."""
        with self._transaction() as connection, connection.cursor() as cursor:
            cursor.execute(SQL("SELECT * FROM {} LIMIT 0").format(self._table))
            header = [column.name for column in cursor.description or ()]
            self._columns.check(f"the table {self.name!r}", header)
            for column, purpose in ((self._columns.id, "the id"), (self._updated, "the time of a change")):
                if column is not None and column not in header:
                    raise InvalidRequestError(
                        f"the table {self.name!r} has no column {column!r} for {purpose}; its columns: "
                        f"{', '.join(header)}"
                    )
            cursor.execute(
                SQL("SELECT pg_typeof({}) FROM (SELECT) x LEFT JOIN {} ON false").format(
                    Identifier(self._columns.id), self._table
                )
            )
            ((kind,),) = cursor.fetchall()
            self._type = SQL(str(kind))

    def _read_state(self) -> tuple[Any, ...]:
        """What changes with the table: deletions and the file, other changes, the last time in its column."""
        last: Composable = SQL("NULL")
        if self._updated is not None:
            last = SQL("(SELECT max({}) FROM {})").format(Identifier(self._updated), self._table)
        query = SQL(
            "SELECT n_tup_del, pg_relation_filenode(r), n_tup_ins + n_tup_upd, {last} "
            "FROM (SELECT to_regclass({name}) r) x LEFT JOIN pg_stat_user_tables s ON s.relid = r"
        )
        (row,) = self._query(query.format(last=last, name=self._table.as_string()))
        return tuple(row)

    def _all(self) -> Iterator[Record | Rejected]:
        yield from self._pages(SQL("true"), (), [self._columns.id])

    def _since_then(self) -> Iterator[Record | Rejected]:
        assert self._updated is not None
        condition, given = (
            (SQL("true"), ())
            if self._since is None
            else (SQL("{} >= %s").format(Identifier(self._updated)), (self._since,))
        )
        yield from self._pages(condition, given, [self._updated, self._columns.id])

    def _some(self, ids: Sequence[str]) -> Iterator[Record | Rejected]:
        query = SQL("{} = ANY(%s::text[]::{}[])").format(Identifier(self._columns.id), self._type)
        try:
            yield from self._pages(query, (list(ids),), [self._columns.id])
        except psycopg.DataError:
            logger.warning("notifications on %s name no ids of %s: %s", self._channel, self.name, ", ".join(ids[:3]))

    def _pages(
        self, condition: Composable, given: tuple[Any, ...], order: Sequence[str]
    ) -> Iterator[Record | Rejected]:
        """Rows in the order of some columns, a page at a time: no transaction lasts as long as the embedding."""
        columns = SQL(", ").join(map(Identifier, order))
        last: tuple[Any, ...] | None = None
        while True:
            behind = (
                SQL("")
                if last is None
                else SQL(" AND ({}) > ({})").format(columns, SQL(", ").join([SQL("%s")] * len(order)))
            )
            query = SQL("SELECT * FROM {} WHERE ({}){} ORDER BY {} LIMIT {}").format(
                self._table, condition, behind, columns, _PAGE
            )
            rows = self._query(query, (*given, *(last or ())), dicts=True)
            for row in rows:
                yield self._rows.item(row, f"{self.name}: {self._columns.id} = {row.get(self._columns.id)!r}")
            if len(rows) < _PAGE:
                return
            last = tuple(rows[-1][name] for name in order)

    def _every_id(self) -> Iterator[str]:
        with (
            self._transaction() as connection,
            connection.transaction(),
            connection.cursor("millpond_ids", row_factory=tuple_row) as cursor,
        ):
            cursor.itersize = 10 * _PAGE
            cursor.execute(SQL("SELECT {} FROM {}").format(Identifier(self._columns.id), self._table))
            yield from (str(identity) for (identity,) in cursor)

    def _query(self, query: Composed, given: Sequence[Any] = (), *, dicts: bool = False) -> list[Any]:
        with (
            self._transaction() as connection,
            connection.cursor(row_factory=dict_row if dicts else tuple_row) as cursor,
        ):
            cursor.execute(query, given)
            return cursor.fetchall()

    def _transaction(self) -> _Answering:
        return _Answering(self)

    def connection(self) -> psycopg.Connection[Any]:
        """The connection, which is made again if it broke."""
        if self._client is None or self._client.closed:
            self._client = self._connect()
        return self._client

    def _connect(self) -> psycopg.Connection[Any]:
        return psycopg.connect(self._dsn, autocommit=True, connect_timeout=_CONNECT_SECONDS, prepare_threshold=None)

    def _listen(self, listening: threading.Event) -> None:
        """Hear notifications, also after the connection broke: then any may have been missed."""
        assert self._channel is not None
        while not self._ended.is_set():
            try:
                with self._connect() as connection:
                    connection.execute(SQL("LISTEN {}").format(Identifier(self._channel)))
                    if listening.is_set():
                        self._hear("")
                    listening.set()
                    while not self._ended.is_set():
                        for heard in connection.notifies(timeout=_LOOK_SECONDS):
                            self._hear(heard.payload)
            except psycopg.Error as error:
                logger.warning("no notifications are heard: %s", " ".join(str(error).split()))
                self._ended.wait(_LOOK_SECONDS)

    def _hear(self, payload: str) -> None:
        with self._lock:
            if payload:
                self._ids.add(payload)
            else:
                self._asked = True
            self._noticed = time.monotonic() if self._noticed is None else self._noticed
        self._wake()


class _Answering:
    """The connection for a block; an outage is an error that a watcher waits after."""

    def __init__(self, source: TableSource) -> None:
        self._source = source

    def __enter__(self) -> psycopg.Connection[Any]:
        try:
            return self._source.connection()
        except psycopg.OperationalError as error:
            raise self._unavailable(error) from error

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, psycopg.OperationalError):
            raise self._unavailable(error) from error
        if isinstance(error, psycopg.Error) and not isinstance(
            error, psycopg.DataError | psycopg.errors.UndefinedTable
        ):
            words = " ".join(str(error).split())
            raise SinkError(f"PostgreSQL refused a look at the table {self._source.name}: {words}") from error

    def _unavailable(self, error: Exception) -> SinkUnavailableError:
        return SinkUnavailableError(
            f"PostgreSQL did not answer a look at the table {self._source.name}: {' '.join(str(error).split())}"
        )
