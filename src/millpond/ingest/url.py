"""Sink URLs: ``KIND+SCHEME:LOCATION#COLLECTION`` names a collection in a database."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import cast

from millpond.errors import InvalidRequestError, MissingExtraError
from millpond.ingest.sink import Sink

GROUP = "millpond.sinks"

SinkFactory = Callable[..., Sink]
"""``factory(scheme, location, collection, *, dimensions, payload)``: what an entry point of the group is."""

# Ours, by name: an unknown kind must not become the name of somebody's package.
_PACKAGES = {"qdrant": "millpond-qdrant", "milvus": "millpond-milvus"}
_EXAMPLE = "qdrant+path:DIR#docs, qdrant+http://host:6333#docs or milvus+file:X.db#docs"


def open_sink(url: str, *, dimensions: Sequence[int] | None = None, payload: str = "plain") -> Sink:
    """The sink that a URL names, from whichever installed package knows its kind.

    Args:
        url: ``KIND+SCHEME:LOCATION#COLLECTION``. The part between ``+`` and ``:`` is the package's to read. Keys never
            stand in it: they come from ``QDRANT_API_KEY`` and ``MILVUS_TOKEN``.
        dimensions: The widths to store; by default the one that ``embed`` gives (full, for nearly every model).
        payload: The form of the payload.

    Raises:
        InvalidRequestError: Not such a URL, or one that the package cannot use.
        MissingExtraError: No installed package knows the kind.
    """
    # What stands before the scheme's colon is printable; what follows it may hold a password that should not be there.
    head, colon, rest = url.partition(":")
    kind, plus, scheme = head.partition("+")
    location, hash_sign, collection = rest.rpartition("#")
    if not (colon and plus and kind and scheme and hash_sign and collection):
        raise InvalidRequestError(f"{head + colon!r}... is no URL of a collection; write one like {_EXAMPLE}")
    found = {point.name: point for point in entry_points(group=GROUP)}
    if kind not in found:
        if kind in _PACKAGES:
            raise MissingExtraError(f"writing to {kind} needs a package of its own: pip install {_PACKAGES[kind]}")
        known = ", ".join(sorted({*found, *_PACKAGES}))
        raise InvalidRequestError(f"no installed package writes to {kind!r}; choose one of {known}")
    factory = cast(SinkFactory, found[kind].load())
    return factory(scheme, location, collection, dimensions=dimensions, payload=payload)
