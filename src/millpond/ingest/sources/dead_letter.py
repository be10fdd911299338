"""Dead letters: what failed, one JSON object a line, so that it can be read again as a source."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from millpond.errors import InvalidRequestError
from millpond.ingest.record import Record, Rejected
from millpond.ingest.sources.rows import RowReader, make_record

DEAD_LETTER_KEY = "millpond_dead_letter"
"""The key that marks a line as a dead letter; its value is the version of the format."""

_VERSION = 1


def dump_record(record: Record, *, where: str, reason: str) -> str:
    """A line for a record that could not be embedded or stored; a piece of a longer text keeps its number."""
    letter: dict[str, Any] = {"id": record.id, "text": record.text, "metadata": record.metadata}
    if record.chunk:
        letter["chunk"] = record.chunk
    return _dump(letter, where, reason)


def dump_rejected(rejected: Rejected) -> str:
    """A line for a line, row or item that held no record, with its content if it is known."""
    letter: dict[str, Any] = {} if rejected.content is None else {"content": rejected.content}
    return _dump(letter, rejected.where, rejected.reason)


def _dump(letter: dict[str, Any], where: str, reason: str) -> str:
    return json.dumps({DEAD_LETTER_KEY: _VERSION, **letter, "reason": reason, "where": where}, ensure_ascii=False)


def read_dead_letter(letter: Mapping[str, Any], where: str, rows: RowReader) -> Record | Rejected:
    """The record of a dead letter, whatever the names of the source's columns; its reason is left behind.

    A line that held no record is read again as an object of JSON; if it still is none, it is rejected with the place
    and the reason of the letter.
    """
    if (version := letter[DEAD_LETTER_KEY]) != _VERSION:
        reason = f"{DEAD_LETTER_KEY}={version!r} is not known to this version of millpond, which reads {_VERSION}"
        return Rejected(where=where, reason=reason)
    origin, reason = str(letter.get("where") or where), str(letter.get("reason") or "holds no record")
    content = letter.get("content")
    try:
        if "text" in letter:
            content = json.dumps(dict(letter), ensure_ascii=False)
            record = make_record(letter.get("id"), letter["text"], letter.get("metadata") or {})
            return replace(record, chunk=letter["chunk"]) if "chunk" in letter else record
        row = json.loads(content) if isinstance(content, str) else None
        if isinstance(row, dict) and DEAD_LETTER_KEY not in row:
            return rows.record(row)
    except InvalidRequestError as error:
        reason = str(error)
    except (ValueError, RecursionError):  # the line was no JSON
        pass
    return Rejected(where=origin, reason=reason, content=content if isinstance(content, str) else None)
