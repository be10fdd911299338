"""Watchdog: one timer for the connections that wait, in the order in which their time ends."""

from __future__ import annotations

import asyncio

from millpond.server.launch.watchdog import Watchdog


class Waiting:
    """A connection that records what becomes of it."""

    def __init__(self, name: str, log: list[str], *, watchdog: Watchdog | None = None) -> None:
        self.name = name
        self.log = log
        self.watchdog = watchdog

    def give_up(self) -> None:
        self.log.append(f"{self.name} is given up")
        if self.watchdog is not None:
            self.watchdog.wait(self)

    def abort(self) -> None:
        self.log.append(f"{self.name} is aborted")


class Clock(asyncio.SelectorEventLoop):
    """An event loop whose time stands still until a timer is due."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Run what becomes due."""
        self.now += seconds
        self.run_until_complete(_some_turns())


async def _some_turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_each_connection_has_its_time_from_its_latest_progress():
    loop, log = Clock(), list[str]()
    watchdog = Watchdog(loop, 10)
    first, second, third = (Waiting(name, log) for name in ("first", "second", "third"))
    try:
        watchdog.wait(first)
        loop.advance(4)
        watchdog.wait(second)
        watchdog.wait(third)
        watchdog.stop(third)
        loop.advance(4)
        watchdog.wait(first)  # it has got on
        loop.advance(5)
        assert log == []
        loop.advance(1)
        assert log == ["second is given up"]
        loop.advance(4)
        assert log == ["second is given up", "first is given up"]
        loop.advance(100)
        assert len(log) == 2
    finally:
        loop.close()


def test_who_waits_again_has_its_time_again():
    loop, log = Clock(), list[str]()
    watchdog = Watchdog(loop, 10)
    try:
        watchdog.wait(Waiting("one", log, watchdog=watchdog))
        for count in range(1, 4):
            loop.advance(9.5)
            assert len(log) == count - 1
            loop.advance(0.5)
            assert len(log) == count
    finally:
        loop.close()


def test_the_one_that_waits_longest_makes_room():
    loop, log = Clock(), list[str]()
    watchdog = Watchdog(loop, 10)
    first, second = Waiting("first", log), Waiting("second", log)
    try:
        watchdog.wait(first)
        watchdog.wait(second)
        watchdog.wait(first)
        assert watchdog.abort_longest()
        assert watchdog.abort_longest()
        assert not watchdog.abort_longest()
        assert log == ["second is aborted", "first is aborted"]
    finally:
        loop.close()
