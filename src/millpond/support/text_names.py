"""Names of the texts of a call, for warnings: an index knows a text by its document's id, the engine by its place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

text_names: ContextVar[Sequence[str] | None] = ContextVar("text_names", default=None)
"""What a call made here names its texts by in warnings; None: by their indices."""

_SHOWN_CHARS = 80


def shown(name: str) -> str:
    """A name, shortened if it is long."""
    return name if len(name) <= _SHOWN_CHARS else f"{name[:_SHOWN_CHARS]}..."


@contextmanager
def named(names: Sequence[str]) -> Iterator[None]:
    """Calls made inside, each with as many texts as there are ``names``, warn of a text by its name."""
    token = text_names.set(names)
    try:
        yield
    finally:
        text_names.reset(token)
