"""Large texts take turns at the tokenizer, and their memory goes back to the system."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from millpond.inputs import Item, TokenIds, size_of

# A longer text takes tens of milliseconds, and a hundred megabytes.
LARGE_CHARACTERS = 1 << 17
# The tokenizer's threads are as many as the cores: half of them stay free for small texts.
_TURNS = max(1, (os.cpu_count() or 2) // 2)
# Seconds from the last large text until its memory is given back: by then its request is over, and so are those that
# came with it.
_TRIM_SECONDS = 1.0


def is_large(item: Item) -> bool:
    """Whether an item may be tokenized in its turn: half of a large text may become one by a prompt or a template."""
    return not isinstance(item, TokenIds) and size_of(item) > LARGE_CHARACTERS // 2


class _Turns:
    """Who is tokenizing a large text, and when memory is given back next."""

    def __init__(self) -> None:
        self.free = threading.BoundedSemaphore(_TURNS)
        self.lock = threading.Lock()
        self.trim: threading.Timer | None = None


_turns = _Turns()


def _forked() -> None:
    global _turns
    _turns = _Turns()  # a thread of the parent may have had its turn


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


@contextmanager
def turn(texts: Iterable[str]) -> Iterator[None]:
    """Wait for a turn if one of ``texts`` is large, so that small ones never wait for many large ones."""
    if all(len(text) <= LARGE_CHARACTERS for text in texts):
        yield
        return
    turns = _turns
    with turns.free:
        try:
            yield
        finally:
            trim_soon()


def trim_soon() -> None:
    """Give the memory that is free by then back to the system, once for all large texts of a moment."""
    turns = _turns
    with turns.lock:
        if turns.trim is None and _malloc_trim() is not None:
            timer = threading.Timer(_TRIM_SECONDS, _trim, [turns])
            timer.daemon = True
            try:
                timer.start()
            except RuntimeError:  # the program ends
                return
            turns.trim = timer


def _trim(turns: _Turns) -> None:
    with turns.lock:
        turns.trim = None
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Any:
    """glibc's malloc_trim; ``None`` with another C library. glibc itself keeps what large texts took in parts."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return None
