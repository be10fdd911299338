"""TruncatedTexts: the texts that several calls cut, and TruncationLog: an engine's one warning of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

import numpy as np
import numpy.typing as npt

from millpond.support.text_names import shown

logger = logging.getLogger(__name__)

truncated_noun: ContextVar[str | None] = ContextVar("truncated_noun", default="texts")
"""What calls made here warn of when they cut some: "texts", "queries" or "documents". None: they do not warn."""

_NAMED_TEXTS = 10


def log_truncated(
    count: int, texts: int, limit: int, first: Sequence[str], *, noun: str = "texts", more: str = ""
) -> None:
    """Warn that ``count`` of so many texts were cut to ``limit`` tokens, if any were; ``first`` names some of them."""
    if count:
        others = f" and {count - len(first)} more" if count > len(first) else ""
        named = ", ".join(first) + others
        logger.warning("%d of %d %s were cut to %d tokens: %s%s", count, texts, noun, limit, named, more)


class TruncationLog:
    """Warns of the first texts that an engine cuts, once for each noun; others are counted in its statistics."""

    def __init__(self) -> None:
        self._warned: dict[str, object] = {}  # by noun; setdefault() is atomic

    def is_first(self, noun: str) -> bool:
        """Whether nothing was told of ``noun`` yet; it is from now on."""
        mine = object()
        return self._warned.setdefault(noun, mine) is mine


class TruncatedTexts:
    """Collects the texts that consecutive calls cut, for one warning after the last."""

    def __init__(
        self,
        limit: int,
        *,
        first_index: int = 0,
        noun: str = "texts",
        names: Sequence[str] | None = None,  # of all texts, in place of their indices
    ) -> None:
        self._limit = limit
        self._noun = noun
        self._names = names
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

    def log(self, to: TruncationLog) -> None:
        """Warn, if texts were cut and the engine has not warned yet."""
        if self._count and to.is_first(self._noun):
            names = self._names
            first = [f"index {index}" if names is None else shown(names[index]) for index in self._first]
            more = "; others that this engine cuts are only counted"
            log_truncated(self._count, self._seen, self._limit, first, noun=self._noun, more=more)
