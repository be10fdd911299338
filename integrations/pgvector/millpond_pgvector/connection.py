"""Connections to PostgreSQL: strings without secrets, and which errors pass by themselves."""

import re

import psycopg
from psycopg.pq import Conninfo

from millpond.errors import InvalidRequestError, SinkError, SinkRejectedError, SinkTooLargeError, SinkUnavailableError

# By SQLSTATE: connection, resources, operator, another transaction, lock, system, and a server that only reads.
_PASSING = re.compile("08|53|57|40|55P03|58|25006")
# Errors of a connection have no SQLSTATE.
_LASTING = re.compile("authentication failed|does not exist|pg_hba|no password|permission denied|not supported")


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


def kind_of(error: Exception) -> type[SinkError]:
    """What can be done about an error: wait, send less, leave a row out, or nothing."""
    state = getattr(error, "sqlstate", None) or ""
    if _PASSING.match(state):
        return SinkUnavailableError
    if not state and isinstance(error, psycopg.OperationalError):  # the connection is lost, or was never made
        return SinkError if _LASTING.search(str(error)) else SinkUnavailableError
    if state.startswith("54"):
        return SinkTooLargeError
    return SinkRejectedError if isinstance(error, psycopg.DataError | psycopg.IntegrityError) else SinkError
