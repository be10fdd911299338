"""Sink URLs: ``KIND+SCHEME:LOCATION#COLLECTION`` names a collection in a database."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import cast

from millpond.errors import InvalidRequestError, MissingExtraError
from millpond.ingest.sink import Sink

GROUP = "millpond.sinks"

SinkFactory = Callable[..., Sink]
"""``factory(scheme, location, collection, *, dimensions, payload)``: the object that an entry point names."""

# Only our own packages are suggested: guessing a name from an unknown kind could name anybody's package.
_PACKAGES = {"qdrant": "millpond-qdrant", "milvus": "millpond-milvus"}
_EXAMPLE = "qdrant+path:DIR#docs, qdrant+http://host:6333#docs or milvus+file:X.db#docs"


def open_sink(url: str, *, dimensions: Sequence[int] | None = None, payload: str = "plain") -> Sink:
    """Open the sink that a URL names, through the installed package for its kind of database.

    Args:
        url: ``KIND+SCHEME:LOCATION#COLLECTION``. The package interprets scheme and location. A URL holds no keys: they
            come from ``QDRANT_API_KEY`` and ``MILVUS_TOKEN``.
        dimensions: The widths to store; by default the width that ``embed`` returns (full, for nearly every model).
        payload: The form of the payload.

    Raises:
        InvalidRequestError: The URL has another form, or the package cannot use it.
        MissingExtraError: The package for this kind of database is not installed.
    """
    # Error messages show only the part up to the first colon: the rest might hold a password.
    head, colon, rest = url.partition(":")
    kind, plus, scheme = head.partition("+")
    location, hash_sign, collection = rest.rpartition("#")
    if not (colon and plus and kind and scheme and hash_sign and collection):
        raise InvalidRequestError(f"{head + colon!r}... is no URL of a collection; write one like {_EXAMPLE}")
    kind, scheme = kind.lower(), scheme.lower()  # as in any URL
    factories = {point.name: point for point in entry_points(group=GROUP)}
    if kind not in factories:
        if kind in _PACKAGES:
            raise MissingExtraError(
                f"writing to {kind} needs the package {_PACKAGES[kind]}: in a checkout of millpond, "
                f"pip install ./integrations/{kind}"
            )
        known = ", ".join(sorted({*factories, *_PACKAGES}))
        raise InvalidRequestError(f"no installed package writes to {kind!r}; choose one of {known}")
    factory = cast(SinkFactory, factories[kind].load())
    return factory(scheme, location, collection, dimensions=dimensions, payload=payload)
