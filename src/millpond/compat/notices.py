"""Warnings of an adapter that each process logs once."""

from __future__ import annotations

import logging

# A dict, whose setdefault() is atomic: a lock could be held by another thread when the process is forked.
_logged: dict[str, object] = {}


def log_once(to: logging.Logger, message: str) -> None:
    """Log a warning, unless this process has logged it already."""
    mine = object()
    if _logged.setdefault(message, mine) is mine:
        to.warning("%s", message)
