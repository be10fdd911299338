"""Passages: the parts of a document, put together again of its chunks, that may have been embedded for one of them."""

from __future__ import annotations

from collections.abc import Sequence

from millpond.audit.rows import Row

_MOST_CHARS = 1 << 20  # of a document


def passages(row: Row, document: Sequence[Row]) -> dict[str, str]:
    """Longer passages that a chunk is part of.

    Args:
        row: The chunk.
        document: The rows of its document, this one among them.

    Returns:
        Texts by a name; empty if it is not known where the chunks begin, or if there is only one.
    """
    chunks = sorted(
        ((each.start, each) for each in document if each.start is not None and each.text), key=lambda item: item[0]
    )
    if len(chunks) < 2 or row.start is None:
        return {}
    place = next((index for index, (_, each) in enumerate(chunks) if each.id == row.id), None)
    if place is None:
        return {}
    found = {"the whole document": _joined([each for _, each in chunks])}
    if place > 0:
        found["with the chunk before it"] = _joined([each for _, each in chunks[place - 1 : place + 1]])
    if place + 1 < len(chunks):
        found["with the chunk after it"] = _joined([each for _, each in chunks[place : place + 2]])
    if 0 < place < len(chunks) - 1:
        found["with the chunks around it"] = _joined([each for _, each in chunks[place - 1 : place + 2]])
    return {name: text for name, text in found.items() if text != row.text}


def _joined(chunks: Sequence[Row]) -> str:
    """The text from the first chunk to the last; what lies between two of them is taken for a space."""
    text, start = "", chunks[0].start or 0
    for chunk in chunks:
        place = (chunk.start or 0) - start
        if place > len(text):
            text += " " * (place - len(text))
        text = text[:place] + (chunk.text or "")
        if len(text) > _MOST_CHARS:
            break
    return text
