"""The deadline over a whole request, and what an SQL database's error allows."""

import socket
import threading

import pytest

from millpond.errors import SinkError, SinkRejectedError, SinkTooLargeError, SinkUnavailableError
from millpond.ingest.sinks.deadline import hang_up_after
from millpond.ingest.sinks.sqlstate import kind_of_state


def test_a_client_that_waits_meets_the_end_of_its_connection():
    client, server = socket.socketpair()
    with client, server:
        with hang_up_after(0.05, client.fileno) as late:
            assert client.recv(1) == b""  # would wait for ever
        assert late.is_set()
        assert client.fileno() >= 0  # shut down, and closed by its owner


def test_a_request_in_time_leaves_the_connection_alone():
    client, server = socket.socketpair()
    with client, server:
        for seconds in (60, None):
            with hang_up_after(seconds, client.fileno) as late:
                server.sendall(b"x")
                assert client.recv(1) == b"x"
            assert not late.is_set()


def test_a_connection_that_is_closed_already_is_no_error_of_the_deadline():
    client, server = socket.socketpair()
    client.close()
    with server, hang_up_after(0, client.fileno) as late:
        assert late.wait(10)


@pytest.mark.parametrize(
    ("state", "message", "kind"),
    [
        (None, "connection refused", SinkUnavailableError),
        (None, "FATAL:  sorry, too many clients already", SinkUnavailableError),
        (None, 'FATAL:  password authentication failed for user "x"', SinkError),
        (None, 'FATAL:  database "x" does not exist', SinkError),
        (None, 'no pg_hba.conf entry for host "1.2.3.4"', SinkError),
        ("08006", "", SinkUnavailableError),
        ("53100", "disk full", SinkUnavailableError),
        ("55P03", "lock not available", SinkUnavailableError),
        ("55000", "object not in prerequisite state", SinkError),
        ("54000", "program limit", SinkTooLargeError),
        ("22021", "character not in repertoire", SinkRejectedError),
        ("23505", "unique violation", SinkRejectedError),
        ("42P01", "undefined table", SinkError),
    ],
)
def test_an_error_is_told_by_its_sqlstate(state, message, kind):
    assert kind_of_state(state, message) is kind


def test_a_hang_up_that_began_is_over_when_the_block_is_left():
    client, server = socket.socketpair()
    begun, may_end = threading.Event(), threading.Event()

    def fileno() -> int:
        begun.set()
        may_end.wait(60)
        return client.fileno()

    with client, server:
        with hang_up_after(0, fileno) as late:
            assert begun.wait(60)
            threading.Timer(0.1, may_end.set).start()
        server.setblocking(False)
        assert late.is_set() and server.recv(1) == b""
        with hang_up_after(60, client.fileno) as late:
            pass
        assert not late.is_set()
