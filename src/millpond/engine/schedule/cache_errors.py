"""CacheErrors: what is wrong with an engine's cache, logged once for each kind of error."""

from __future__ import annotations

import logging

from millpond.cache.sqlitefile import kind_of
from millpond.errors import CacheError

logger = logging.getLogger(__name__)


class CacheErrors:
    """Errors after which an engine goes on. One line for each batch would fill a disk that is full already."""

    def __init__(self, consequence: str, level: int) -> None:
        """``consequence``: what the errors mean for the vectors; ``level``: of the log's line."""
        self._consequence = consequence
        self._level = level
        self._kinds: set[str] = set()

    def report(self, error: CacheError) -> None:
        """Log the error, if it is the first of its kind."""
        kind = kind_of(error)
        first = kind not in self._kinds
        self._kinds.add(kind)
        logger.log(
            self._level if first else logging.DEBUG,
            "%s: %s (the engine goes on; this is logged once)",
            self._consequence,
            error,
        )
