"""What can be done about an error of an SQL database, by its SQLSTATE."""

from __future__ import annotations

import re

from millpond.errors import SinkError, SinkRejectedError, SinkTooLargeError, SinkUnavailableError

# Connection, resources, operator, conflict with another transaction, lock, system, and a server that only reads.
_PASSING = re.compile("08|53|57|40|55P03|58|25006")
# What a server says when it refuses a connection; such errors have no SQLSTATE.
_LASTING = re.compile("authentication failed|does not exist|pg_hba|no password|permission denied|not supported")


def kind_of_state(state: str | None, message: str) -> type[SinkError]:
    """Wait, send less, leave a row out, or nothing.

    Args:
        state: Five letters and digits; ``None`` if the connection was lost, or never made.
        message: What the client says.
    """
    if state is None:
        return SinkError if _LASTING.search(message) else SinkUnavailableError
    if _PASSING.match(state):
        return SinkUnavailableError
    if state.startswith("54"):  # a limit of the program
        return SinkTooLargeError
    return SinkRejectedError if state.startswith(("22", "23")) else SinkError  # data, constraints
