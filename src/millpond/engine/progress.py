"""Progress: the bar of a call, drawn on a terminal only."""

from __future__ import annotations

from collections.abc import Sized
from types import TracebackType
from typing import Protocol, Self


class Bar(Protocol):
    """Counts the items of a call that are done."""

    def update(self, n: float | None = 1) -> bool | None:
        """Count ``n`` more items."""
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
    """No bar: even a disabled tqdm bar takes a noticeable part of a single text's call."""

    def update(self, n: float | None = 1) -> bool | None:
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return None


_HIDDEN = _Hidden()
