"""Connections of the PostgreSQL sink: lost, slow, refused, and the errors of a server."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psycopg
import pytest
from tests.ingest.batches import rows
from tests.ingest.postgres import PostgresServer, running_server

from millpond import Engine, InvalidRequestError
from millpond.errors import SinkRejectedError, SinkTooLargeError, SinkUnavailableError
from millpond.ingest import Record, SinkError, ingest
from millpond_pgvector import PgVectorSink

pytestmark = pytest.mark.contract


@pytest.mark.parametrize("autocommit", [True, False])
def test_a_connection_that_is_passed_in_is_committed_and_left_open(
    engine: Engine, records: list[Record], dsn: str, autocommit: bool
) -> None:
    with psycopg.connect(dsn, autocommit=autocommit) as connection, psycopg.connect(dsn, autocommit=True) as other:
        with PgVectorSink(connection, "docs") as sink:
            ingest(records, engine=engine, sink=sink, show_progress=False)
            assert other.execute("SELECT count(*) FROM docs").fetchone() == (12,)
            connection.execute("SELECT 1")
            if not autocommit:  # which begins a transaction, inside which nothing of ours would be committed
                with pytest.raises(InvalidRequestError, match="the connection is in a transaction; end it"):
                    sink.count()
                connection.rollback()
            assert sink.count() == 12
        assert not connection.closed


def test_a_lost_connection_is_opened_again(engine: Engine, dsn: str) -> None:
    with PgVectorSink(dsn, "docs", dimensions=[32]) as sink, psycopg.connect(dsn, autocommit=True) as other:
        sink.prepare(engine.spec)
        sink.write(rows(10, 32))
        other.execute("SELECT pg_terminate_backend(%s)", [sink.client.info.backend_pid])
        with pytest.raises(SinkUnavailableError, match="PostgreSQL at .* refused a look at the coll.*: .*terminat"):
            sink.write(rows(10, 32, 10))
        sink.write(rows(10, 32, 10))
        assert sink.count() == 20


def test_a_run_waits_for_a_lock_no_longer_than_the_timeout(engine: Engine, dsn: str) -> None:
    with PgVectorSink(dsn, "docs", dimensions=[32], timeout=2) as sink:
        sink.prepare(engine.spec)
        with psycopg.connect(dsn) as other:
            other.execute("LOCK TABLE docs")
            with pytest.raises(SinkUnavailableError, match="an upsert of 10 rows"):
                sink.write(rows(10, 32))
        sink.write(rows(10, 32))
        assert sink.count() == 10


@contextmanager
def server_that(answers: Callable[[socket.socket, threading.Event], None]) -> Iterator[str]:
    """A server on loopback that speaks to each client in a thread of its own."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve(taken: socket.socket) -> None:
            with taken, suppress(OSError):
                answers(taken, over)

        def accept() -> None:
            while True:
                try:
                    taken = listening.accept()[0]
                except OSError:
                    return
                threading.Thread(target=serve, args=(taken,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield f"postgresql://x@127.0.0.1:{listening.getsockname()[1]}/x"
        over.set()
        listening.shutdown(socket.SHUT_RDWR)


def hang(taken: socket.socket, over: threading.Event) -> None:
    over.wait(60)


def trickle(taken: socket.socket, over: threading.Event) -> None:
    taken.sendall(b"N")  # no TLS
    taken.sendall(b"R\0\0\0\x08\0\0\0\0")  # authentication is fine, and then a notice without an end
    taken.sendall(b"N\0\1\0\0")
    while not over.wait(0.1):
        taken.sendall(b"x")


def close(taken: socket.socket, over: threading.Event) -> None:
    taken.recv(100)


def rubbish(taken: socket.socket, over: threading.Event) -> None:
    taken.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n<html>")
    over.wait(60)


@pytest.mark.parametrize("answers", [hang, trickle, close, rubbish])
def test_a_server_that_never_becomes_one_is_an_error_in_time(
    answers: Callable[[socket.socket, threading.Event], None],
) -> None:
    with (
        server_that(answers) as place,
        pytest.raises(SinkError, match="PostgreSQL at .* (refused|did not answer) the connection"),
    ):
        PgVectorSink(place, "docs", timeout=2)


class Proxy:
    """Passes on what a client and a real server say, until it is told to keep silent or to trickle."""

    def __init__(self, folder: Path) -> None:
        self._socket = str(folder / ".s.PGSQL.5432")
        self.silent, self.trickling = threading.Event(), threading.Event()

    def __call__(self, taken: socket.socket, over: threading.Event) -> None:
        with socket.socket(socket.AF_UNIX) as server:
            server.connect(self._socket)
            threading.Thread(target=self._pass_on, args=(taken, server, None), daemon=True).start()
            self._pass_on(server, taken, over)

    def _pass_on(self, source: socket.socket, target: socket.socket, over: threading.Event | None) -> None:
        try:
            while data := source.recv(1 << 16):
                if over is not None and self.silent.is_set():
                    over.wait(60)
                    return
                if over is not None and self.trickling.is_set():
                    for n in range(len(data)):
                        target.sendall(data[n : n + 1])
                        if over.wait(0.3):
                            return
                target.sendall(data)
        except OSError:
            pass
        finally:
            for end in (source, target):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("fault", ["silent", "trickling"])
def test_a_server_that_stops_answering_is_given_up_at_the_deadline(
    engine: Engine, dsn: str, postgres: PostgresServer, fault: str
) -> None:
    proxy = Proxy(postgres.folder)
    with server_that(proxy) as place:
        options = dsn.partition("&options=")[2]
        with PgVectorSink(
            f"{place.replace('x@', 'postgres@')[:-1]}postgres?options={options}", "docs", dimensions=[32], timeout=2
        ) as sink:
            sink.prepare(engine.spec)
            sink.write(rows(10, 32))
            getattr(proxy, fault).set()
            began = time.monotonic()
            with pytest.raises(SinkUnavailableError, match="did not answer a look at the collection within 2 s"):
                sink.write(rows(10, 32, 10))
            assert time.monotonic() - began < 30  # the server would take a minute and more
            getattr(proxy, fault).clear()
            sink.write(rows(10, 32, 10))
            assert sink.count() == 20


def test_a_port_without_a_server_is_an_error_that_may_pass() -> None:
    with pytest.raises(
        SinkUnavailableError,
        match=r"^nothing listens at postgresql://127.0.0.1:1/x, so PostgreSQL did not answer the connection; start it",
    ):
        PgVectorSink("postgresql://127.0.0.1:1/x", "docs", timeout=2)


def test_a_user_or_database_that_is_not_there_is_an_error_that_lasts(postgres: PostgresServer) -> None:
    for place in (
        postgres.address().replace("postgres@", "nobody-here@"),
        postgres.address().replace("/postgres?", "/nothing?"),
    ):
        with pytest.raises(SinkError, match="does not exist") as caught:
            PgVectorSink(place, "docs")
        assert type(caught.value) is SinkError


def test_a_server_without_room_for_a_connection_is_an_error_that_may_pass() -> None:
    with running_server("max_connections=2", "superuser_reserved_connections=0", "reserved_connections=0") as server:
        taken = [psycopg.connect(server.address()) for _ in range(2)]
        with pytest.raises(SinkUnavailableError, match="too many clients"):
            PgVectorSink(server.address(), "docs")
        for connection in taken:
            connection.close()


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        ("53100", SinkUnavailableError),  # disk full
        ("40P01", SinkUnavailableError),
        ("54000", SinkTooLargeError),
        ("23514", SinkRejectedError),
        ("42501", SinkError),
    ],
)
def test_the_servers_errors_are_told_apart(engine: Engine, dsn: str, state: str, kind: type[SinkError]) -> None:
    with PgVectorSink(dsn, "docs", dimensions=[32]) as sink:
        sink.prepare(engine.spec)
        sink.client.execute(
            "CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            f"RAISE EXCEPTION 'on purpose' USING ERRCODE = '{state}'; END $$; "
            "CREATE TRIGGER fail BEFORE INSERT ON docs FOR EACH ROW EXECUTE FUNCTION fail()"
        )
        with pytest.raises(SinkError, match="refused an upsert of 3 rows: on purpose") as caught:
            sink.write(rows(3, 32))
        assert type(caught.value) is kind
        sink.client.execute("DROP TRIGGER fail ON docs")
        sink.write(rows(3, 32))
        assert sink.count() == 3
