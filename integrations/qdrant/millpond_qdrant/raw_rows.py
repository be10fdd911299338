"""Points of any collection, by whomever they were written."""

from __future__ import annotations

from collections.abc import Iterator

from qdrant_client import QdrantClient, models

from millpond.ingest.sinks.raw_rows import RawPage, VectorField, stacked

_POINTS = 1000  # of one page


def raw_fields(info: models.CollectionInfo) -> list[VectorField]:
    """The dense vectors of a collection, named or not, without matrices of tokens."""
    vectors = info.config.params.vectors or {}
    named = vectors if isinstance(vectors, dict) else {"": vectors}
    return [
        VectorField(
            name=name,
            width=params.size,
            distance=str(params.distance.value),
            datatype="float32" if params.datatype is None else str(params.datatype.value),
        )
        for name, params in named.items()
        if params.multivector_config is None
    ]


def raw_pages(client: QdrantClient, collection: str, field: VectorField) -> Iterator[RawPage]:
    """Pages of points with their payloads and one of their vectors."""
    offset: models.ExtendedPointId | None = None
    while True:
        points, offset = client.scroll(
            collection,
            limit=_POINTS,
            offset=offset,
            with_payload=True,
            with_vectors=[field.name] if field.name else True,
        )
        found = [point.vector.get(field.name) if isinstance(point.vector, dict) else point.vector for point in points]
        vectors, present = stacked(found, field.width)
        yield RawPage(
            ids=[str(point.id) for point in points],
            fields=[point.payload or {} for point in points],
            vectors=vectors,
            present=present,
        )
        if offset is None:
            return
