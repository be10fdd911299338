"""Errors of the cache's file. They are apart from it, so that an engine without a cache does not import sqlite."""

from __future__ import annotations

from millpond.errors import CacheError


class CacheFileError(CacheError):
    """The file, its disk or another process is at fault: damage, no space, no permission, a lock."""


def kind_of(error: CacheError) -> str:
    """What went wrong, as a word: errors with equal words need to be reported once."""
    return getattr(error.__cause__, "sqlite_errorname", None) or type(error.__cause__ or error).__name__
