"""Database: what the package of a database tells of it, and the sinks that URLs name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Any, cast

from millpond.errors import InvalidRequestError
from millpond.ingest.sinks.protocol import Sink

logger = logging.getLogger(__name__)


GROUP = "millpond.sinks"


@dataclass(frozen=True, kw_only=True)
class Database:
    """Opens the sinks of a kind of database, and describes it; :func:`database` makes it of the function that opens.

    Attributes:
        opener: ``opener(scheme, location, collection, *, must_exist, **options)``.
        options: Names of the options that it takes; ``None`` if they are not checked.
        urls: Examples of URLs, the first one on this machine: the commands that ``millpond advise`` prints have it.
        variables: Environment variables that hold its key; what ends in ``_`` stands for every name that begins so.
        datatypes: Types in which it stores vectors.
        coarse_datatypes: Types in which it stores only the narrow vectors of a coarse-to-fine search.
        quantizations: Smaller copies of the vectors that it makes and searches.
        packages: Distributions whose versions ``millpond env`` prints, beside the one of the entry point.
    """

    opener: Callable[..., Any]
    options: frozenset[str] | None = None
    urls: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    datatypes: tuple[str, ...] = ()
    coarse_datatypes: tuple[str, ...] = ()
    quantizations: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()

    def __call__(self, scheme: str, location: str, collection: str, *, must_exist: bool = False, **options: Any) -> Any:
        """Open the sink of ``KIND+SCHEME:LOCATION#COLLECTION``."""
        if self.options is not None and (unknown := sorted(options.keys() - self.options)):
            name = unknown[0]
            raise InvalidRequestError(
                f"{name}={options[name]!r} is no option of this sink; it takes {', '.join(sorted(self.options))}"
            )
        return self.opener(scheme, location, collection, must_exist=must_exist, **options)


def database(*, options: Iterable[str], **facts: tuple[str, ...]) -> Callable[[Callable[..., Any]], Database]:
    """Make a :class:`Database` of the function below, which the package's entry point ``millpond.sinks`` names.

    Args:
        options: Names of the options of the sink: a ``TypedDict`` has them in ``__annotations__``.
        facts: The other attributes of :class:`Database`.

    Returns:
        A decorator of ``opener(scheme, location, collection, *, must_exist, **options)``.
    """
    return lambda opener: Database(opener=opener, options=frozenset(options), **facts)


def check_options(sink: str, options: Mapping[str, object], known: Iterable[str]) -> None:
    """Raise TypeError for a keyword argument of a sink's class that is no option of it."""
    names = list(known)
    if unknown := sorted(options.keys() - names):
        raise TypeError(f"{sink} has no option {unknown[0]!r}; it takes {', '.join(names)}")


@cache
def installed() -> dict[str, Database]:
    """The databases of the installed packages by the first part of their URLs, those with most layouts first."""
    found = {}
    for point in entry_points(group=GROUP):
        try:
            loaded = point.load()
        except Exception as error:  # of somebody's package, which no command but its own needs
            logger.warning("the package of %s cannot be imported: %s", point.name, error)
            continue
        if isinstance(loaded, Database):
            found[point.name] = loaded
    return dict(
        sorted(
            found.items(),
            key=lambda item: -len((*item[1].datatypes, *item[1].coarse_datatypes, *item[1].quantizations)),
        )
    )


def url_examples() -> str:
    """URLs of the installed databases, as the end of a sentence."""
    urls = [url for each in installed().values() for url in each.urls]
    return (
        f"like {', '.join(urls)}"
        if urls
        else "KIND+SCHEME:LOCATION#COLLECTION, of a database whose package is installed"
    )


def sink_packages() -> list[str]:
    """Distributions of the installed databases and of their clients."""
    points = entry_points(group=GROUP)
    named = [point.dist.name for point in points if point.dist is not None]
    return sorted({*named, *(package for one in installed().values() for package in one.packages)})


def open_sink(
    url: str,
    *,
    dimensions: Sequence[int] | None = None,
    fields: str | None = None,
    must_exist: bool = False,
    **options: object,
) -> Sink:
    """Open the sink that a URL names, through the installed package for its kind of database.

    Args:
        url: ``KIND+SCHEME:LOCATION#COLLECTION``. The package interprets scheme and location. A URL holds no keys: they
            come from environment variables, which ``millpond env`` lists.
        dimensions: The widths to store; by default those of the collection, and in a new one the width that ``embed``
            returns (full, for nearly every model).
        fields: The layout of the stored fields: ``plain``, ``langchain`` or ``llama_index``; by default that of the
            collection, and ``plain`` in a new one.
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
        raise InvalidRequestError(
            f"{head.partition('#')[0] + colon!r}... is no URL of a collection; write one {url_examples()}"
        )
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
    if fields is not None:
        options = {**options, "fields": fields}
    return cast(Sink, opener(scheme, location, collection, dimensions=dimensions, **options))
