"""Warnings of an adapter that each process logs once."""

from __future__ import annotations

import logging
import threading

_logged: set[str] = set()
_lock = threading.Lock()


def log_once(to: logging.Logger, message: str) -> None:
    """Log a warning, unless this process has logged it already."""
    with _lock:
        if message in _logged:
            return
        _logged.add(message)
    to.warning("%s", message)
