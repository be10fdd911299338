"""Sink URLs: ``KIND+SCHEME:LOCATION#COLLECTION`` names a collection in a database."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import cast

from millpond.errors import InvalidRequestError
from millpond.ingest.sinks.database import GROUP, Database, url_examples
from millpond.ingest.sinks.protocol import Sink


def open_sink(
    url: str,
    *,
    dimensions: Sequence[int] | None = None,
    fields: str = "plain",
    must_exist: bool = False,
    **options: object,
) -> Sink:
    """Open the sink that a URL names, through the installed package for its kind of database.

    Args:
        url: ``KIND+SCHEME:LOCATION#COLLECTION``. The package interprets scheme and location. A URL holds no keys: they
            come from environment variables, which ``millpond env`` lists.
        dimensions: The widths to store; by default the width that ``embed`` returns (full, for nearly every model).
        fields: The layout of the stored fields: ``plain``, ``langchain`` or ``llama_index``.
        must_exist: Refuse a folder or file that is not there, instead of creating it. A sink whose package describes no
            database is opened as it is.
        options: Other arguments of the sink, as ``hybrid``, ``datatype``, ``index_quantization`` and ``timeout``.

    Returns:
        The sink; its collection is read, or created, by :meth:`~millpond.ingest.Sink.prepare`.

    Raises:
        InvalidRequestError: The URL has another form, no installed package writes to this kind of database, the package
            cannot use the URL or one of the options, or there is no such database.
    """
    # Error messages show only the part up to the first colon: the rest might hold a password.
    head, colon, rest = url.partition(":")
    kind, plus, scheme = head.partition("+")
    location, hash_sign, collection = rest.rpartition("#")
    if not (colon and plus and kind and scheme and hash_sign and collection):
        raise InvalidRequestError(f"{head + colon!r}... is no URL of a collection; write one {url_examples()}")
    kind, scheme = kind.lower(), scheme.lower()  # as in any URL
    points = {point.name: point for point in entry_points(group=GROUP)}
    if kind not in points:
        known = f"those that do write to {', '.join(sorted(points))}" if points else "none is"
        raise InvalidRequestError(
            f"no installed package writes to {kind!r} ({known}); correct the URL, or install the package for this "
            "database, which docs/ingest.md names"
        )
    opener = points[kind].load()
    if must_exist and isinstance(opener, Database):
        options = {**options, "must_exist": True}
    return cast(Sink, opener(scheme, location, collection, dimensions=dimensions, fields=fields, **options))
