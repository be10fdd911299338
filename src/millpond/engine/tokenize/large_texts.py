"""Large texts take turns at the tokenizer, and their memory goes back to the system."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from millpond.support.fair_semaphore import FairSemaphore
from millpond.support.heap import HEAP
from millpond.values.inputs import Item, TokenIds, size_of

# A longer text takes tens of milliseconds, and a hundred megabytes.
LARGE_CHARACTERS = 1 << 17
# The tokenizer has a thread for each core, for all engines of a process: half of them stay free for small texts.
SLOTS = max(1, (os.cpu_count() or 2) // 2)
TURNS = FairSemaphore()


def is_large(item: Item) -> bool:
    """Whether an item may be tokenized in its turn: half of a large text may become one by a prompt or a template."""
    return not isinstance(item, TokenIds) and size_of(item) > LARGE_CHARACTERS // 2


@contextmanager
def turn(texts: Iterable[str]) -> Iterator[None]:
    """Wait for a turn if one of ``texts`` is large, so that small ones never wait for many large ones."""
    if all(len(text) <= LARGE_CHARACTERS for text in texts):
        yield
        return
    with TURNS.turn(SLOTS):
        try:
            yield
        finally:
            HEAP.trim_soon()
