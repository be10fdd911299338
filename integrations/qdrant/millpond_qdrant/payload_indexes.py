"""Indexes of payload keys, by which a server filters faster."""

from __future__ import annotations

from collections.abc import Mapping

from qdrant_client import models

from millpond.errors import InvalidRequestError
from millpond.ingest.sinks.fields import FieldLayout
from millpond_qdrant.filters import payload_path


def check_indexes(indexes: Mapping[str, str] | None, form: FieldLayout) -> dict[str, models.PayloadSchemaType]:
    """The payload's paths of metadata keys, and the types of their indexes.

    Raises:
        InvalidRequestError: An unknown type, or a key that has no path.
    """
    if indexes is not None and not isinstance(indexes, Mapping):
        raise InvalidRequestError(f"indexes={indexes!r} must be a dict of metadata keys, like {{'year': 'integer'}}")
    known = {schema.value: schema for schema in models.PayloadSchemaType}
    wanted = {}
    for key, kind in (indexes or {}).items():
        if not isinstance(key, str) or kind not in known:
            raise InvalidRequestError(
                f"indexes: {key!r}: {kind!r} is no index of Qdrant; choose one of {', '.join(known)}"
            )
        wanted[payload_path(key, form, what="indexes")] = known[kind]
    return wanted


def missing_indexes(
    wanted: Mapping[str, models.PayloadSchemaType],
    stored: Mapping[str, models.PayloadIndexInfo],
    *,
    collection: str,
) -> dict[str, models.PayloadSchemaType]:
    """Those that a collection lacks.

    Raises:
        InvalidRequestError: It has one of another type.
    """
    for path, kind in wanted.items():
        if path in stored and (has := stored[path].data_type) is not kind:
            raise InvalidRequestError(
                f"collection {collection!r} has an index of the type {has.value!r} on {path!r}, and this sink asks for "
                f"{kind.value!r}; leave it out of indexes, or delete the other with "
                f"client.delete_payload_index({collection!r}, {path!r})"
            )
    return {path: kind for path, kind in wanted.items() if path not in stored}
