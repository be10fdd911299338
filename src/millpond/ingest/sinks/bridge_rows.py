"""The bridge of a migration, stored in the database itself: as texts of a small collection beside the new one."""

from __future__ import annotations

import zlib
from base64 import b64decode, b64encode
from typing import TYPE_CHECKING, Any

import numpy as np

from millpond.errors import SinkError
from millpond.ingest.record import Record, point_id
from millpond.ingest.sinks.batch import WriteBatch
from millpond.ingest.sinks.manifest import CollectionManifest
from millpond.ingest.sinks.succession import bridge_name
from millpond.vectors.linear_map import Bridge

if TYPE_CHECKING:
    from millpond.ingest.sinks.collection import CollectionSink
    from millpond.ingest.sinks.reader import CollectionReader

# Every database has vectors of this width, of which these rows have no use.
_WIDTH = 8
# Characters of a text: Milvus stores 65,535.
_PART = 48_000


def store_bridge(sink: CollectionSink[Any], new: str, bridge: Bridge) -> None:
    """Store a bridge beside the collection ``new``, in place of an earlier one.

    Args:
        sink: A sink of the database.
        new: The name or URL of the new collection.
        bridge: The bridge.

    Raises:
        SinkError: The database refuses.
    """
    content = bridge.to_bytes()
    text = b64encode(content).decode()
    parts = [text[start : start + _PART] for start in range(0, len(text), _PART)]
    facts = {"parts": len(parts), "checksum": zlib.crc32(content)}
    # The first one last: without it there is no bridge.
    rows = [Record(_id(number), part, {} if number else facts) for number, part in reversed([*enumerate(parts)])]
    side = sink.sibling(bridge_name(new), bare=True)
    try:
        side.create(
            CollectionManifest(fingerprint="bridge", model="millpond's bridge", dimensions=(_WIDTH,), fields="plain")
        )
        for row in rows:
            unit = np.eye(1, _WIDTH, dtype=np.float32)
            side.write(WriteBatch(records=[row], ids=[point_id(row.id)], vectors={_WIDTH: unit}))
    finally:
        side.close()


def load_bridge(sink: CollectionReader[Any], new: str) -> Bridge:
    """The bridge beside the collection ``new``.

    Args:
        sink: A sink of the database.
        new: The name or URL of the new collection.

    Returns:
        The bridge.

    Raises:
        SinkError: It is not there, or damaged.
    """
    side = sink.sibling(bridge_name(new), bare=True)
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
            f"the bridge in collection {bridge_name(new)!r} cannot be read ({error}); make it again by millpond "
            "migrate run --bridge, or search with the model that filled the collection"
        ) from error
    finally:
        side.close()


def _id(number: int) -> str:
    return f"bridge/{number}"
