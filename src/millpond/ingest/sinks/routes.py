"""Routes: which collections a question of a model searches, while another model takes over and afterwards."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from millpond.errors import FingerprintMismatchError, InvalidRequestError
from millpond.ingest.chunking import CHUNK_KEYS
from millpond.ingest.record import point_id
from millpond.ingest.sinks.search import Hit
from millpond.ingest.sinks.succession import Succession
from millpond.values.spec import ModelSpec
from millpond.vectors.linear_map import LinearMap

if TYPE_CHECKING:
    from millpond.ingest.sinks.reader import CollectionReader

logger = logging.getLogger(__name__)

Sink = TypeVar("Sink", bound="CollectionReader[Any]")
# How many times more rows of the old collection are asked for, where most of them are in the new one already.
_MOST = 32


@dataclass(frozen=True, kw_only=True)
class Route(Generic[Sink]):
    """A collection that is searched, and the way of a question's vector to it."""

    sink: Sink
    mapping: LinearMap | None = None  # from the question's model to the collection's; `None`: it is the same one


class Search(Protocol):
    """Searches one collection."""

    def __call__(self, route: Route[Any], k: int, *, candidates: int | None) -> list[Hit]:
        """At most ``k`` hits, best first."""


def routes(sink: Sink, spec: ModelSpec) -> list[Route[Sink]]:
    """The collections that a question of a model searches: the first one has the say of the rows that both have.

    The collection that the model filled is searched, whichever serves by now: a reader of the old model goes on until
    its collection is dropped. While a migration runs, a question of the new model finds by its bridge what is not there
    yet; after the old collection is dropped, a question of the old model finds the new one by the bridge back.

    Raises:
        FingerprintMismatchError: No way leads from the model to the collection.
    """
    own = sink.own()
    succession = own.succession if sink.follows else None
    if succession is None:
        own.check_model(spec, collection=sink.collection)
        return [Route(sink=sink)]
    serving = sink if succession.serving == sink.collection else sink.named(succession.serving)
    manifest = serving.own()
    if manifest.fingerprint == spec.fingerprint:
        return [Route(sink=serving)]
    other = _other(sink, succession, spec)
    if other is not None and succession.phase == "live":
        if succession not in sink.warned:
            sink.warned.add(succession)
            logger.warning(
                "collection %r was migrated to %s, and is searched here by its former model, in the former collection, "
                "which gets no more changes and will be dropped; open the engine of %s",
                sink.collection,
                manifest.model,
                manifest.model,
            )
        return [Route(sink=other)]
    if other is not None and succession.recall is not None:
        return [Route(sink=other), Route(sink=serving, mapping=sink.bridge(succession.new).forward)]
    if succession.recall is not None and spec.fingerprint == succession.former:
        return [Route(sink=serving, mapping=sink.bridge(succession.new).back)]
    try:
        manifest.check_model(spec, collection=sink.collection)
    except FingerprintMismatchError as error:
        if other is not None:
            error.add_note(
                "The collection is being migrated to this model, and has no bridge: until it has cut over, search with "
                "the former model, or run millpond migrate run --bridge."
            )
        raise
    return [Route(sink=serving)]


def merged(new: Route[Any], old: Route[Any], search: Search, k: int, candidates: int | None) -> list[Hit]:
    """The hits of two collections, best first: a row that the new one has is scored by it alone.

    Args:
        new: The collection that is filled.
        old: The one that has all rows, and other vectors.
        search: Searches one of them.
        k: Most hits.
        candidates: Of each search; ``None`` for its default.

    Returns:
        The hits, with the scores of the new model, or as they would be about.
    """
    found = search(new, k, candidates=candidates)
    asked, limit = k, old.sink.max_results or k * _MOST
    while True:
        hits = search(old, asked, candidates=None if candidates is None else max(candidates, asked))
        known = new.sink.fetch([_row_id(hit) for hit in hits])
        rest = [hit for hit in hits if _row_id(hit) not in known]
        if len(rest) >= k or len(hits) < asked or asked >= min(limit, k * _MOST):
            break
        asked = min(4 * asked, limit, k * _MOST)
    mapping = old.mapping
    others = rest if mapping is None else [replace(hit, score=mapping.score(hit.score)) for hit in rest]
    return sorted([*found, *others], key=lambda hit: hit.score, reverse=True)[:k]


def _other(sink: Sink, succession: Succession, spec: ModelSpec) -> Sink | None:
    """The collection that does not serve, if this model filled it."""
    if not succession.other:
        return None
    other = sink.named(succession.other)
    try:
        return other if other.own().fingerprint == spec.fingerprint else None
    except InvalidRequestError:  # it is not made yet, or was dropped just now
        return None


def _row_id(hit: Hit) -> str:
    number = hit.metadata.get(CHUNK_KEYS[0])
    return point_id(hit.id, number if type(number) is int and number > 0 else 0)
