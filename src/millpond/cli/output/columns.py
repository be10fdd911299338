"""Columns of equal width, for tables of plain text."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence


def aligned(rows: Iterable[Sequence[str]], *, right: Container[int] = ()) -> Iterator[str]:
    """The rows as lines: cells to the left, those of the columns ``right`` to the right."""
    rows = list(rows)
    spans = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = enumerate(zip(row, spans, strict=True))
        yield "  ".join(cell.rjust(span) if at in right else cell.ljust(span) for at, (cell, span) in cells).rstrip()
