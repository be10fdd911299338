"""Parents: the documents whose chunks a search found, each once, with the text that all of its chunks make."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from millpond.errors import InvalidRequestError
from millpond.ingest.chunking import CHUNK_KEYS
from millpond.ingest.record import point_id

if TYPE_CHECKING:
    from millpond.ingest.sinks.reader import CollectionReader
    from millpond.ingest.sinks.search import Hit

Expand = Literal["parent"]
"""What a hit is expanded to: ``parent``, the document of a chunk."""

# How many times more chunks are asked for, while they are of too few documents.
_GROWTH = 4


def check_expand(expand: object) -> None:
    """Raise InvalidRequestError for what a hit cannot be expanded to."""
    if expand is not None and expand not in get_args(Expand):
        raise InvalidRequestError(f"expand={expand!r} is unknown; choose parent, or leave it out")


def best_of_each(search: Callable[[int], Sequence[Hit]], k: int, most: int) -> list[Hit]:
    """The best hit of each of ``k`` records, best first; fewer if fewer match.

    Args:
        search: Returns so many hits, best first.
        k: Most records.
        most: Most hits that a search returns.
    """
    asked = k
    while True:
        hits = search(asked)
        best: dict[str, Hit] = {}
        for hit in hits:
            best.setdefault(hit.id, hit)
        if len(best) >= k or len(hits) < asked or asked >= most:
            return list(best.values())[:k]
        asked = min(_GROWTH * asked, most)


def with_parents(sink: CollectionReader[Any], hits: Sequence[Hit]) -> list[Hit]:
    """The hits, with the whole text of its document in place of a chunk's own.

    The metadata stays the chunk's: ``text[chunk_start:chunk_end]`` of the new text is the chunk. What is no chunk of
    millpond's stays as it is.
    """
    parents = dict.fromkeys(hit.id for hit in hits if _span(hit.metadata, hit.text) is not None)
    row_ids = [row_id for parent in parents for row_id in sink.row_ids(parent)]
    row_ids += sink.chunks_from(dict.fromkeys(parents, 1)) if parents else []
    pieces: dict[str, dict[int, str]] = {parent: {} for parent in parents}
    for row_id, row in sink.read_rows(row_ids).items() if row_ids else ():
        metadata, text = row.metadata or {}, row.text or ""
        span = _span(metadata, text)
        if span is not None and point_id(row.record_id, metadata[CHUNK_KEYS[0]]) == row_id:
            pieces[row.record_id][span] = text
    found = []
    for hit in hits:
        if hit.id in pieces:  # the hit's own piece, too: it may be of a collection that does not serve
            start = int(hit.metadata[CHUNK_KEYS[1]])
            hit = replace(hit, text=joined({start: hit.text, **pieces[hit.id]}.items()))
        found.append(hit)
    return found


def joined(pieces: Iterable[tuple[int, str]]) -> str:
    """A text put together of pieces by the characters at which they begin, those that overlap once.

    Between two pieces lies white space that the chunks do not hold; of one character it is taken for a space, of more
    for an empty line and spaces.
    """
    parts: list[str] = []
    end = 0
    for start, piece in sorted(pieces):
        if (gap := start - end) > 0:
            parts.append(" " if gap == 1 else "\n\n" + " " * (gap - 2))
            end = start
        parts.append(piece[end - start :])
        end = max(end, start + len(piece))
    return "".join(parts)


def _span(metadata: Mapping[str, Any], text: str) -> int | None:
    """Where a chunk begins in its document; ``None`` for a row that is none."""
    number, start, end = (metadata.get(key) for key in CHUNK_KEYS)
    if type(number) is int and type(start) is int and type(end) is int and end - start == len(text) and start >= 0:
        return start
    return None
