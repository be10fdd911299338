"""The bar of a checkpoint that takes long to load."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from millpond.support.progress import draw_bar

Item = TypeVar("Item")

# Most checkpoints are loaded by then.
_SECONDS_UNTIL_DRAWN = 2.0


class _LoadingBar:
    """A bar over bytes, of one stage after the other; drawn at the first step after two seconds."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begun = time.monotonic()
        self._stage = ""
        self._total = self._done = 0
        self._bar: Any = None

    def begin(self, stage: str, total: int) -> None:
        self._stage, self._total, self._done = stage, total, 0
        if self._bar is not None:
            self._bar.set_description(self._words, refresh=False)
            self._bar.reset(total=total)

    def advance(self, size: int) -> None:
        self._done += size
        if self._bar is not None:
            self._bar.update(size)
        elif time.monotonic() - self._begun >= _SECONDS_UNTIL_DRAWN:
            self._bar = draw_bar(
                show=True,
                total=self._total,
                initial=self._done,
                desc=self._words,
                unit="B",
                unit_scale=True,
                leave=False,
            )

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    @property
    def _words(self) -> str:
        return f"{self._name}: {self._stage}"


_current: ContextVar[_LoadingBar | None] = ContextVar("loading_bar", default=None)


@contextmanager
def loading_bar(name: str) -> Iterator[None]:
    """A bar in a terminal or notebook, if what is inside takes longer than two seconds; it vanishes at the end."""
    bar = _LoadingBar(name)
    token = _current.set(bar)
    try:
        yield
    finally:
        _current.reset(token)
        bar.close()


def begin(stage: str, total: int) -> None:
    """The next stage of loading, over so many bytes."""
    if (bar := _current.get()) is not None:
        bar.begin(stage, total)


def advance(size: int) -> None:
    """So many bytes of the stage are done."""
    if (bar := _current.get()) is not None:
        bar.advance(size)


def advancing(items: Iterable[Item], size: int) -> Iterator[Item]:
    """The items, each of which is ``size`` bytes of the stage."""
    for item in items:
        yield item
        advance(size)
