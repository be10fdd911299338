"""TruncatedTexts: the texts that several calls cut, reported once."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

import numpy as np
import numpy.typing as npt

logger = logging.getLogger(__name__)

truncated_noun: ContextVar[str | None] = ContextVar("truncated_noun", default="texts")
"""What calls made here warn of when they cut some: "texts", "queries" or "documents". None: they do not warn."""

_NAMED_TEXTS = 10


def log_truncated(count: int, texts: int, limit: int, first: Sequence[str], *, noun: str = "texts") -> None:
    """Warn that ``count`` of so many texts were cut to ``limit`` tokens, if any were; ``first`` names some of them."""
    if count:
        more = f" and {count - len(first)} more" if count > len(first) else ""
        logger.warning("%d of %d %s were cut to %d tokens: %s%s", count, texts, noun, limit, ", ".join(first), more)


class TruncatedTexts:
    """Collects the texts that consecutive calls cut, for one warning after the last."""

    def __init__(self, limit: int, *, first_index: int = 0, noun: str = "texts") -> None:
        self._limit = limit
        self._noun = noun
        self._first_index = first_index
        self._seen = self._count = 0
        self._first: list[int] = []  # indices

    @staticmethod
    @contextmanager
    def called(noun: str | None) -> Iterator[None]:
        """Calls made inside warn of texts by this noun, or not at all, as inside another block without one."""
        token = truncated_noun.set(truncated_noun.get() and noun)
        try:
            yield
        finally:
            truncated_noun.reset(token)

    @classmethod
    def quiet(cls) -> AbstractContextManager[None]:
        """Calls made inside do not warn themselves."""
        return cls.called(None)

    def note(self, truncated: npt.NDArray[np.bool_]) -> None:
        """Collect the next call's ``truncated [n]``."""
        indices = np.flatnonzero(truncated) + self._first_index + self._seen
        self._seen += len(truncated)
        self._count += len(indices)
        self._first += indices[: _NAMED_TEXTS - len(self._first)].tolist()

    def log(self) -> None:
        """Warn, if texts were cut."""
        first = [f"index {index}" for index in self._first]
        log_truncated(self._count, self._seen, self._limit, first, noun=self._noun)
