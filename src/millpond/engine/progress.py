"""The progress bar of a call: drawn on a terminal, absent anywhere else."""

from __future__ import annotations

from collections.abc import Sized
from types import TracebackType
from typing import Protocol, Self


class Bar(Protocol):
    """What a call tells how far it is."""

    def update(self, n: float | None = 1) -> bool | None:
        """So many more items are done."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> object: ...


def progress_bar(texts: object, *, show: bool) -> Bar:
    """A bar over ``texts``; hidden unless ``show`` and the output is a terminal."""
    if not show:
        return _HIDDEN
    from tqdm import tqdm

    total = len(texts) if isinstance(texts, Sized) else None
    bar: Bar = tqdm(total=total, unit=" texts", disable=None)
    return bar


class _Hidden:
    """No bar at all: making one that is never drawn takes longer than much else of a single text's call."""

    def update(self, n: float | None = 1) -> bool | None:
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return None


_HIDDEN = _Hidden()
