"""A collection made ready to be written to: created, or checked against what the sink would write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from millpond.errors import InvalidRequestError
from millpond.ingest.sinks.client import Connection
from millpond.ingest.sinks.driver import CollectionDriver
from millpond.ingest.sinks.fields import FieldLayout
from millpond.ingest.sinks.manifest import CollectionManifest

Form = tuple[tuple[int, ...] | None, FieldLayout | None]
"""The widths and the field layout that a sink was given; what it was not given it takes from the collection."""


def create_or_check(
    connection: Connection,
    driver: CollectionDriver[Any],
    own: CollectionManifest,
    form: Form,
    check: Callable[[CollectionManifest, CollectionManifest], None],
    *,
    skip: Callable[[CollectionManifest], bool] = lambda stored: False,
) -> CollectionManifest:
    """Create a collection, unless it exists, and make it ready.

    Args:
        connection: The collection.
        driver: The requests of the sink.
        own: The manifest of a new collection.
        form: What the sink was given.
        check: Takes the stored manifest, and that of what the sink would write; raises if they do not agree.
        skip: Takes the stored manifest; whether another collection is written to instead, and this one left alone.

    Returns:
        The stored manifest.
    """
    dimensions, fields = form
    with connection.creating():
        if not connection.found():
            connection.create(lambda: driver.create(own))
        stored = CollectionManifest.from_dict(connection.stored_manifest(), collection=connection.collection)
        if not skip(stored):
            widths = stored.dimensions if dimensions is None else own.dimensions
            check(stored, replace(own, dimensions=widths, fields=fields or stored.fields))
            driver.prepare(stored)
            driver.load()
    return stored


def prepare_copy(
    connection: Connection,
    driver: CollectionDriver[Any],
    source: CollectionManifest,
    form: Form,
    *,
    sparse: bool,
    skip: Callable[[CollectionManifest], bool],
) -> CollectionManifest:
    """Create a collection for the rows of another one, or check that it may take them.

    Args:
        connection: The collection.
        driver: The requests of the sink.
        source: The manifest of the other collection.
        form: What the sink was given.
        sparse: Whether it stores sparse vectors.
        skip: As :func:`create_or_check`.

    Returns:
        The stored manifest.

    Raises:
        FingerprintMismatchError: Another model filled the collection.
        InvalidRequestError: A width that the source lacks, a layout that the database lacks, or another form.
    """
    dimensions, fields = form
    own = source.of_copy(dimensions=dimensions, fields=fields, sparse=sparse)
    if own.fields not in driver.layouts:
        raise InvalidRequestError(
            f"the source has fields of the layout {own.fields!r}, and {connection.database} stores "
            f"{' or '.join(driver.layouts)}; pass fields={driver.layouts[0]!r}"
        )

    def check(stored: CollectionManifest, wanted: CollectionManifest) -> None:
        source.of_copy(dimensions=stored.dimensions, fields=None, sparse=False)  # it has the stored widths, too
        stored.check_copy(wanted, collection=connection.collection)

    return create_or_check(connection, driver, own, form, check, skip=skip)
