"""Sink URLs: ``KIND+SCHEME:LOCATION#COLLECTION`` names a collection in a database."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from inspect import Parameter, signature
from typing import Any, cast

from millpond.errors import InvalidRequestError, MissingExtraError
from millpond.ingest.sink import Sink

GROUP = "millpond.sinks"

SinkFactory = Callable[..., Sink]
"""``factory(scheme, location, collection, *, dimensions, payload, **options)``: what an entry point names."""

# Only our own packages are suggested: guessing a name from an unknown kind could name anybody's package.
_PACKAGES = {
    "qdrant": "millpond-qdrant",
    "milvus": "millpond-milvus",
    "lancedb": "millpond-lancedb",
    "pgvector": "millpond-pgvector",
}
_EXAMPLE = (
    "qdrant+path:DIR#docs, qdrant+http://host:6333#docs, milvus+file:X.db#docs, lancedb+path:DIR#docs or "
    "pgvector+postgresql://host/db#docs"
)


def open_sink(
    url: str,
    *,
    dimensions: Sequence[int] | None = None,
    payload: str = "plain",
    must_exist: bool = False,
    **options: object,
) -> Sink:
    """Open the sink that a URL names, through the installed package for its kind of database.

    Args:
        url: ``KIND+SCHEME:LOCATION#COLLECTION``. The package interprets scheme and location. A URL holds no keys: they
            come from ``QDRANT_API_KEY`` and ``MILVUS_TOKEN``.
        dimensions: The widths to store; by default the width that ``embed`` returns (full, for nearly every model).
        payload: The form of the payload.
        must_exist: Refuse a folder or file that is not there, instead of creating it. A sink whose factory has no such
            argument is opened as it is.
        options: Other arguments of the sink, as ``hybrid``, ``datatype``, ``quantization`` and ``timeout``.

    Raises:
        InvalidRequestError: The URL has another form, the package cannot use it or one of the options, or there is no
            such database.
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
        known = sorted({*factories, "milvus", "qdrant"})
        absent = sorted(_PACKAGES[name] for name in _PACKAGES.keys() - set(known))
        more = f", or install {' or '.join(absent)}" if absent else ""
        raise InvalidRequestError(f"no installed package writes to {kind!r}; choose one of {', '.join(known)}{more}")
    factory = cast(SinkFactory, factories[kind].load())
    _check_options(kind, factory, options)
    if must_exist and "must_exist" in signature(factory).parameters:
        options = {**options, "must_exist": True}
    return factory(scheme, location, collection, dimensions=dimensions, payload=payload, **options)


def _check_options(kind: str, factory: SinkFactory, options: dict[str, Any]) -> None:
    """Raise InvalidRequestError for an option that the factory does not take."""
    parameters = signature(factory).parameters
    if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    known = {name for name, parameter in parameters.items() if parameter.kind is Parameter.KEYWORD_ONLY}
    known.discard("must_exist")  # an argument of open_sink
    if unknown := sorted(options.keys() - known):
        name = unknown[0]
        raise InvalidRequestError(
            f"{name}={options[name]!r} is no option of a sink of {kind}; it takes {', '.join(sorted(known))}"
        )
