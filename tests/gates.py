"""Gates in front of an engine's work: what runs at the same time is shown by construction, and not by a clock."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest

from millpond import Engine

T = TypeVar("T")
SECONDS = 60  # how long anything may take before the test gives up


class LoopGate:
    """Functions that run elsewhere, and each call of which waits for a turn of the event loop.

    A call that sees no turn was made by the loop itself, or while somebody blocked the loop.

    Args:
        seconds: How long a call waits. A test in which the loop is blocked on purpose needs little.
    """

    def __init__(self, seconds: float = SECONDS) -> None:
        self.calls: list[str] = []  # the names of the functions
        self.blocked = False
        self._seconds = seconds
        self._turns = 0
        self._turned = threading.Condition()

    def hold(self, function: Callable[..., T]) -> Callable[..., T]:
        """``function`` behind the gate."""

        def held(*args: Any, **options: Any) -> T:
            with self._turned:
                self.calls.append(function.__name__)
                before = self._turns
                if not self.blocked:
                    self.blocked = not self._turned.wait_for(lambda: self._turns > before, self._seconds)
            return function(*args, **options)

        return held

    async def run(self, awaitable: Awaitable[T]) -> T:
        """The result, after opening the gate in every turn of the loop."""
        task = asyncio.ensure_future(awaitable)
        while not task.done():
            await asyncio.sleep(0.001)
            with self._turned:
                self._turns += 1
                self._turned.notify_all()
        return task.result()


@contextmanager
def batches_through(gate: LoopGate, engine: Engine) -> Iterator[None]:
    """Every batch of the engine goes through the gate."""
    with pytest.MonkeyPatch.context() as patch:
        for runner in engine._replicas.runners:
            for launch in ("run", "start"):  # on a CPU, and where batches overlap
                patch.setattr(runner, launch, gate.hold(getattr(runner, launch)))
        yield


@contextmanager
def loading_through(gate: LoopGate) -> Iterator[None]:
    """Every load of a checkpoint goes through the gate."""
    from millpond.engine import loading

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "load", gate.hold(loading.load))
        yield


@contextmanager
def batches_held(engine: Engine) -> Iterator[threading.Event]:
    """No batch of the engine runs before the end of the context. The event is set when the first one is due."""
    due, release = threading.Event(), threading.Event()

    def held(launch: Callable[..., T]) -> Callable[..., T]:
        def call(*args: Any) -> T:
            due.set()
            assert release.wait(SECONDS)
            return launch(*args)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for runner in engine._replicas.runners:
            for launch in ("run", "start"):
                patch.setattr(runner, launch, held(getattr(runner, launch)))
        try:
            yield due
        finally:
            release.set()


async def until_set(event: threading.Event) -> None:
    """Waits in the event loop."""
    for _ in range(SECONDS * 1000):
        if event.is_set():
            return
        await asyncio.sleep(0.001)
    raise TimeoutError("the event was not set")


def until(condition: Callable[[], object]) -> None:
    """Waits in a thread until ``condition()`` holds."""
    for _ in range(SECONDS * 1000):
        if condition():
            return
        threading.Event().wait(0.001)
    raise TimeoutError("it did not happen")
