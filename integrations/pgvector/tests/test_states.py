"""What a run does about an error of PostgreSQL, by its SQLSTATE."""

import pytest

from millpond.errors import SinkError, SinkRejectedError, SinkTooLargeError, SinkUnavailableError
from millpond_pgvector.sink import kind_of_state


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
def test_an_error_is_told_by_its_sqlstate(state: str | None, message: str, kind: type[SinkError]) -> None:
    assert kind_of_state(state, message) is kind
