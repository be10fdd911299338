"""Watchdog: the connections of a server that wait for their client, and how long each of them may."""

from __future__ import annotations

from asyncio import AbstractEventLoop, TimerHandle
from collections import OrderedDict
from typing import Protocol


class Connection(Protocol):
    """What the watchdog does with a connection."""

    def give_up(self) -> None:
        """The client has not got on with its request in time: close, or wait again."""

    def abort(self) -> None:
        """Close at once: another connection needs the place."""


class Watchdog:
    """Gives every connection that waits for its client the same time.

    The time counts from the latest :meth:`wait`, so the connections in their order of insertion are also in the order
    in which their time ends, and one timer for the first of them is enough.

    Args:
        loop: The event loop of the server.
        seconds: The time of each wait.
    """

    def __init__(self, loop: AbstractEventLoop, seconds: float) -> None:
        self._loop = loop
        self._seconds = seconds
        self._since: OrderedDict[Connection, float] = OrderedDict()
        self._timer: TimerHandle | None = None

    def wait(self, connection: Connection) -> None:
        """It is the client's turn, from now on."""
        self._since.pop(connection, None)
        self._since[connection] = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(self._seconds, self._check)

    def stop(self, connection: Connection) -> None:
        """It is the server's turn, or the connection is closed."""
        self._since.pop(connection, None)

    def abort_longest(self) -> bool:
        """Close the connection that has waited longest; returns whether there was one."""
        if not self._since:
            return False
        connection, _ = self._since.popitem(last=False)
        connection.abort()
        return True

    def _check(self) -> None:
        self._timer = None
        now = self._loop.time()
        while self._since:
            connection, since = next(iter(self._since.items()))
            left = since + self._seconds - now
            if left > 0:
                self._timer = self._timer or self._loop.call_later(left, self._check)
                return
            self.stop(connection)
            connection.give_up()
