"""TruncatedTexts: the texts that several calls cut, reported once."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np
import numpy.typing as npt

logger = logging.getLogger(__name__)

reports_truncation: ContextVar[bool] = ContextVar("reports_truncation", default=True)
"""Whether calls made here warn that they cut texts."""

_NAMED_TEXTS = 10


def warn_truncated(truncated: npt.NDArray[np.bool_], limit: int, *, first_index: int = 0) -> None:
    """Warn of the texts that one call cut: ``truncated [n]``, the first at ``first_index`` in the caller's list."""
    texts = TruncatedTexts(limit, first_index=first_index)
    texts.note(truncated)
    texts.log()


def log_truncated(count: int, texts: int, limit: int, first: Sequence[str]) -> None:
    """Warn that ``count`` of so many texts were cut to ``limit`` tokens, if any were; ``first`` names some of them."""
    if count:
        more = f" and {count - len(first)} more" if count > len(first) else ""
        logger.warning("%d of %d texts were cut to %d tokens: %s%s", count, texts, limit, ", ".join(first), more)


class TruncatedTexts:
    """Collects the texts that consecutive calls cut, for one warning after the last.

    Args:
        limit: Most tokens per text.
        first_index: Index of the first text in the caller's list.
    """

    def __init__(self, limit: int, *, first_index: int = 0) -> None:
        self._limit = limit
        self._first_index = first_index
        self._seen = self._count = 0
        self._first: list[int] = []  # indices

    @staticmethod
    @contextmanager
    def quiet() -> Iterator[None]:
        """Calls made inside do not warn themselves."""
        token = reports_truncation.set(False)
        try:
            yield
        finally:
            reports_truncation.reset(token)

    def note(self, truncated: npt.NDArray[np.bool_]) -> None:
        """Collect the next call's ``truncated [n]``."""
        indices = np.flatnonzero(truncated) + self._first_index + self._seen
        self._seen += len(truncated)
        self._count += len(indices)
        self._first += indices[: _NAMED_TEXTS - len(self._first)].tolist()

    def log(self) -> None:
        """Warn, if texts were cut."""
        log_truncated(self._count, self._seen, self._limit, [f"index {index}" for index in self._first])
