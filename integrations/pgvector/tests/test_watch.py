"""A collection is kept equal to a table: by a column of times, by counts, by NOTIFY, and through an outage."""

import contextlib
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from tests.ingest.watching import Watching, watching

from millpond.errors import InvalidRequestError
from millpond.ingest.sources.rows import Columns
from millpond_pgvector import table_source
from millpond_pgvector.table_source import TableSource

pytestmark = pytest.mark.contract


@pytest.fixture
def engine(engine_of: Any) -> Any:
    return engine_of("bert")


@pytest.fixture
def table(dsn: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(
            "CREATE TABLE docs (id int PRIMARY KEY, text text, page int, updated timestamptz DEFAULT clock_timestamp())"
        )
        connection.execute("INSERT INTO docs SELECT n, 'text ' || n, n FROM generate_series(1, 2500) n")
        yield connection


def rows(table: psycopg.Connection[Any]) -> dict[str, str]:
    return {str(key): text for key, text in table.execute("SELECT id, text FROM docs")}


def follow(table: psycopg.Connection[Any], watcher: Watching) -> None:
    before = len(watcher.written)
    table.execute("UPDATE docs SET text = 'changed', updated = clock_timestamp() WHERE id = 7")
    table.execute("INSERT INTO docs VALUES (9999, 'new', 1)")
    watcher.until_texts(rows(table))
    table.execute("DELETE FROM docs WHERE id IN (1, 2)")
    watcher.until_texts(rows(table))
    table.execute("UPDATE docs SET id = 8888, updated = clock_timestamp() WHERE id = 3")
    watcher.until(lambda: "8888" in watcher.texts)
    assert sorted(watcher.written[before:]) == ["7", "8888", "9999"]


@pytest.mark.parametrize("updated", [None, "updated"])
def test_what_changes_in_a_table_is_followed(
    dsn: str, table: psycopg.Connection[Any], engine: Any, tmp_path: Any, updated: str | None
) -> None:
    with watching(
        f"{dsn}#docs", engine, tmp_path / "j", poll=0.1, updated=updated, columns=Columns(metadata=["page"])
    ) as w:
        assert w.texts == rows(table)
        follow(table, w)
        table.execute("TRUNCATE docs")
        w.until_texts({})


def test_notifications_are_heard_and_may_name_rows(
    dsn: str, table: psycopg.Connection[Any], engine: Any, tmp_path: Any
) -> None:
    with watching(f"{dsn}#docs", engine, tmp_path / "j", poll=1000, notify="changed") as watcher:
        table.execute("UPDATE docs SET text = 'named' WHERE id = 5")
        table.execute("NOTIFY changed, '5'")
        watcher.until_texts(rows(table))
        table.execute("DELETE FROM docs WHERE id = 6")
        table.execute("NOTIFY changed, '6'")
        watcher.until_texts(rows(table))
        table.execute("NOTIFY changed, 'no id at all'")
        table.execute("UPDATE docs SET text = 'unnamed' WHERE id = 8")
        table.execute("NOTIFY changed")
        watcher.until_texts(rows(table))
        assert watcher.written[2500:] == ["5", "8"]


def test_a_server_that_cuts_the_connections_is_asked_again(
    dsn: str, table: psycopg.Connection[Any], engine: Any, tmp_path: Any
) -> None:
    others = "pid <> pg_backend_pid() AND backend_type = 'client backend'"
    end = f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {others}"
    with watching(f"{dsn}#docs", engine, tmp_path / "j", poll=0.1, notify="changed", updated="updated") as watcher:
        for number in range(3):
            table.execute(end)
            table.execute("UPDATE docs SET text = %s, updated = clock_timestamp() WHERE id = 9", [f"after {number}"])
            watcher.until_texts(rows(table))


def test_a_row_of_a_transaction_that_was_committed_late_is_found(
    dsn: str, table: psycopg.Connection[Any], engine: Any, tmp_path: Any
) -> None:
    with (
        watching(f"{dsn}#docs", engine, tmp_path / "j", poll=0.1, updated="updated") as watcher,
        psycopg.connect(dsn) as late,
    ):
        late.execute("UPDATE docs SET text = 'late', updated = now() WHERE id = 4")
        table.execute("UPDATE docs SET text = 'early', updated = clock_timestamp() WHERE id = 5")
        watcher.until(lambda: watcher.texts["5"] == "early")
        late.commit()
        watcher.until_texts(rows(table))


def test_all_rows_are_read_again_from_time_to_time(
    dsn: str, table: psycopg.Connection[Any], engine: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_source, "_WHOLE_SECONDS", 0.3)
    with watching(f"{dsn}#docs", engine, tmp_path / "j", poll=0.1, updated="updated") as watcher:
        table.execute("UPDATE docs SET text = 'in silence', updated = 'yesterday' WHERE id = 4")
        watcher.until_texts(rows(table))


def test_a_table_that_cannot_be_watched_is_named(dsn: str, table: psycopg.Connection[Any]) -> None:
    for name, columns, updated, message in (
        ("docs", Columns(), "at", "no column 'at' for the time of a change"),
        ("docs", Columns(id="key"), None, "no column 'key' for the id"),
        ("docs", Columns(text="body"), None, "no column 'body' for the text"),
        ("none", Columns(), None, "there is no table 'none'"),
    ):
        source = TableSource(f"{dsn}#{name}", columns, updated=updated)
        with contextlib.closing(_Stopped(source)), pytest.raises(InvalidRequestError, match=message):
            source.start(lambda: None)
    with pytest.raises(InvalidRequestError, match="names no table"):
        TableSource(dsn, Columns())
    with pytest.raises(InvalidRequestError, match="PGPASSWORD"):
        TableSource("postgresql://me:secret@host/db#docs", Columns())


class _Stopped:
    def __init__(self, source: TableSource) -> None:
        self.close = source.stop
