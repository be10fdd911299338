"""The bridge of a migration as rows, by which it is stored in the database itself, beside the new collection."""

from __future__ import annotations

import zlib
from base64 import b64decode, b64encode

import numpy as np

from millpond.errors import SinkError
from millpond.ingest.record import Record, point_id
from millpond.ingest.sinks.batch import WriteBatch
from millpond.ingest.sinks.manifest import CollectionManifest
from millpond.ingest.sinks.protocol import ReadsContent
from millpond.vectors.linear_map import Bridge

# Every database has vectors of this width, of which these rows have no use.
_WIDTH = 8
# Characters of a text: Milvus stores 65,535.
_PART = 48_000

FORM = CollectionManifest(fingerprint="bridge", model="a bridge", dimensions=(_WIDTH,), fields="plain")
"""The manifest of the collection of such rows."""


def bridge_rows(bridge: Bridge) -> list[WriteBatch]:
    """Rows that hold a bridge, in the order in which they are written: the first part last, without which it is none.

    Args:
        bridge: The bridge.

    Returns:
        Batches of one row.
    """
    content = bridge.to_bytes()
    text = b64encode(content).decode()
    parts = [text[start : start + _PART] for start in range(0, len(text), _PART)]
    facts = {"parts": len(parts), "checksum": zlib.crc32(content)}
    rows = [Record(_id(number), part, {} if number else facts) for number, part in reversed([*enumerate(parts)])]
    unit = np.eye(1, _WIDTH, dtype=np.float32)
    return [WriteBatch(records=[row], ids=[point_id(row.id)], vectors={_WIDTH: unit}) for row in rows]


def load_bridge(side: ReadsContent, name: str) -> Bridge:
    """The bridge that a collection holds.

    Args:
        side: The sink of the collection.
        name: Its name, for the error.

    Returns:
        The bridge.

    Raises:
        SinkError: It is not there, or damaged.
    """
    try:
        first = side.read_rows([point_id(_id(0))]).get(point_id(_id(0)))
        facts = {} if first is None else dict(first.metadata or {})
        ids = [point_id(_id(number)) for number in range(int(facts.get("parts", 0)))]
        rows = side.read_rows(ids) if ids else {}
        content = b64decode("".join(rows[row_id].text or "" for row_id in ids if row_id in rows))
        if not ids or zlib.crc32(content) != facts.get("checksum"):
            raise ValueError(f"{len(rows)} of {len(ids)} parts")
        return Bridge.from_bytes(content)
    except (ValueError, KeyError, TypeError) as error:
        raise SinkError(
            f"the bridge in collection {name!r} cannot be read ({error}); search with the model that filled the "
            "collection, or give the migration up and run it with a bridge again"
        ) from error


def _id(number: int) -> str:
    return f"bridge/{number}"
