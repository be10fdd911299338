"""CollectionDriver: the requests that a sink makes of one collection of a database."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

from millpond.errors import InvalidRequestError, SinkError
from millpond.ingest.record import Record, point_id
from millpond.ingest.sinks.batch import WriteBatch, record_bytes
from millpond.ingest.sinks.client import Connection
from millpond.ingest.sinks.fields import FIELD_LAYOUTS, FieldLayout
from millpond.ingest.sinks.manifest import CollectionManifest
from millpond.ingest.sinks.protocol import StoredRow
from millpond.ingest.sinks.raw_rows import RawPage, VectorField
from millpond.ingest.sinks.search import Hit, SearchPlan
from millpond.support.filters import Condition, check_filter, matches_filter

NativeFilter = TypeVar("NativeFilter")


class CollectionDriver(ABC, Generic[NativeFilter]):
    """What a database adds to :class:`~millpond.ingest.CollectionSink`, which makes requests of these calls.

    A subclass sets :attr:`connection` and implements the abstract methods; the others have a default.
    """

    hybrids: ClassVar[bool] = False  # whether it stores sparse vectors
    max_results: ClassVar[int | None] = None  # of one search
    trusted: ClassVar[float] = 60.0  # seconds after which the manifest is read again: it may name a successor by then
    layouts: ClassVar[Sequence[FieldLayout]] = FIELD_LAYOUTS  # that it stores
    connection: Connection

    @abstractmethod
    def create(self, manifest: CollectionManifest) -> None:
        """Create the collection: cosine vectors ``vector_name(width)`` for each width, and the manifest as metadata.

        Args:
            manifest: The manifest of the collection.
        """

    @abstractmethod
    def upsert(self, batch: WriteBatch) -> None:
        """Store rows, replacing those whose id exists, and wait for the acknowledgement.

        Args:
            batch: Rows that one request can carry.
        """

    @abstractmethod
    def query(self, plan: SearchPlan, condition: NativeFilter | None, manifest: CollectionManifest) -> Sequence[Hit]:
        """The hits of a search, best first: ``plan.coarse``, unless ``None``, selects what ``plan.full`` ranks.

        Args:
            plan: The vectors of the question and the stages of the search.
            condition: Which rows to search; ``None`` for all.
            manifest: The manifest of the collection.

        Returns:
            At most ``plan.k`` hits.
        """

    @abstractmethod
    def delete(self, which: Sequence[Any] | NativeFilter, manifest: CollectionManifest) -> None:
        """Delete the rows with these database ids, or those that a condition matches.

        Args:
            which: Database ids, or a condition.
            manifest: The manifest of the collection.
        """

    @abstractmethod
    def count(self) -> int:
        """How many rows the collection holds, counting every acknowledged write."""

    @abstractmethod
    def condition(
        self, filter: Mapping[str, object] | NativeFilter | None, manifest: CollectionManifest
    ) -> NativeFilter | None:
        """The database's own form of a filter, ``None`` for no condition.

        That of a dict matches at least what :func:`~millpond.ingest.matches_filter` does with its conditions.

        Args:
            filter: What :func:`~millpond.ingest.check_filter` takes, or the database's own filter; ``None`` for no
                condition.
            manifest: The manifest of the collection.

        Returns:
            The filter, or ``None``.

        Raises:
            InvalidRequestError: The filter is of another type.
        """

    def is_exact(self, conditions: Mapping[str, Condition]) -> bool:
        """Whether the native form of these conditions matches no other rows.

        Where it does, each hit is tested again in this process, and :meth:`matching` is needed to delete.

        Args:
            conditions: What :func:`~millpond.ingest.check_filter` returned.

        Returns:
            ``True``, unless a driver says otherwise.
        """
        return True

    def matching(
        self, condition: NativeFilter, manifest: CollectionManifest
    ) -> Iterator[Sequence[tuple[Any, Mapping[str, Any]]]]:
        """Pages of database ids and metadata of the rows that a condition matches.

        Args:
            condition: The database's own filter.
            manifest: The manifest of the collection.

        Returns:
            An iterator of pages; a page is a list of (id, metadata).

        Raises:
            SinkError: The sink cannot list its rows, which is the default.
        """
        raise SinkError(f"this sink of {self.connection.database} cannot list its rows")

    def fetch(
        self, row_ids: Sequence[str], widths: Sequence[int], manifest: CollectionManifest
    ) -> Mapping[str, StoredRow]:
        """Those of these rows that exist, at most ``max_rows``, with their vectors of these widths.

        Args:
            row_ids: Row ids, at most ``max_rows``.
            widths: The widths of the vectors to read; empty for none.
            manifest: The manifest of the collection.

        Returns:
            For each row id that exists, the row with its vectors ``[width]``.

        Raises:
            SinkError: The sink cannot read rows back, which is the default.
        """
        raise SinkError(f"this sink of {self.connection.database} cannot read rows back")

    def read(
        self, row_ids: Sequence[str], widths: Sequence[int], manifest: CollectionManifest
    ) -> Mapping[str, StoredRow]:
        """As :meth:`fetch`, with texts and metadata, by which rows are compared with their records.

        Args:
            row_ids: Row ids, at most ``max_rows``.
            widths: The widths of the vectors to read; empty for none.
            manifest: The manifest of the collection.

        Returns:
            For each row id that exists, the row; by default without texts and metadata, which are then not compared.
        """
        return self.fetch(row_ids, widths, manifest)

    def store_manifest(self, manifest: CollectionManifest) -> None:
        """Replace the manifest in the collection's metadata: it holds the run that changed the collection last.

        Args:
            manifest: The manifest of the collection.

        Raises:
            SinkError: The sink cannot, which is the default: a restored copy is then noticed by missing rows only.
        """
        raise SinkError(f"this sink of {self.connection.database} cannot change what its collection notes")

    def drop(self) -> None:
        """Delete the collection.

        Raises:
            SinkError: The sink cannot, which is the default.
        """
        raise SinkError(f"this sink of {self.connection.database} cannot delete its collection")

    def move_aliases(self, to: str, *, but: str) -> None:
        """Let the aliases of the collection name another one; by default the database has none.

        Args:
            to: The other collection, in the same database.
            but: The alias that stays.
        """

    def scan(self, manifest: CollectionManifest) -> Iterator[Sequence[tuple[str, str]]]:
        """Pages of row ids and record ids, over the whole collection.

        Args:
            manifest: The manifest of the collection.

        Returns:
            An iterator of pages; a page is a list of (row id, record id).

        Raises:
            SinkError: The sink cannot list its rows, which is the default.
        """
        raise SinkError(f"this sink of {self.connection.database} cannot list its rows")

    def raw_fields(self) -> Sequence[VectorField]:
        """The fields of dense vectors of a collection that need not have a manifest.

        Returns:
            The fields, in any order.

        Raises:
            SinkError: The sink cannot read what others wrote, which is the default.
        """
        raise SinkError(f"this sink of {self.connection.database} cannot read collections that others made")

    def raw_pages(self, field: VectorField) -> Iterator[RawPage]:
        """Pages of all rows as they are stored, with the vectors of one field, without a manifest.

        Args:
            field: One of :meth:`raw_fields`.

        Returns:
            An iterator of pages, in an order that stays while nothing is written.

        Raises:
            SinkError: The sink cannot read what others wrote, which is the default.
        """
        raise SinkError(f"this sink of {self.connection.database} cannot read collections that others made")

    def size(self) -> int:
        """How many rows the collection holds, or nearly, without loading it.

        Returns:
            The number of rows; by default :meth:`count`.
        """
        return self.count()

    def datatype_of(self, manifest: CollectionManifest) -> str | None:
        """The data type of the stored vectors.

        Args:
            manifest: The manifest of the collection.

        Returns:
            Its name, as the sink's option ``datatype`` has it; ``None`` if it is not known, which is the default.
        """
        return None

    def prepare(self, manifest: CollectionManifest) -> None:
        """Make the collection ready to be written to, by requests of its own, once its manifest is checked.

        Args:
            manifest: The manifest of the collection.
        """

    def load(self) -> None:
        """Make an existing collection ready to be read, by requests of its own."""

    def flush(self) -> None:
        """Make acknowledged changes durable, once after the requests of a write or delete."""

    @property
    def exhaustive(self) -> bool:
        """Whether a search compares every row in this process: then stages cost more than one search by the full width.

        It is how a search goes that is not told; ``False`` unless a driver says otherwise.
        """
        return False

    def check(self, record: Record, widths: Sequence[int]) -> None:
        """Raise InvalidRequestError for a record that no request could carry.

        Args:
            record: The record.
            widths: The widths to store; empty if they are not known yet.

        Raises:
            InvalidRequestError: Text and metadata have more bytes than a request may have.
        """
        limit = self.connection.max_bytes
        if (size := record_bytes(record)) > limit:
            raise InvalidRequestError(
                f"{size} bytes of text and metadata; a {self.connection.row} takes at most {limit}"
            )

    def has_condition(self, condition: NativeFilter) -> bool:
        """Whether a condition has one; without, it matches every row.

        Args:
            condition: The database's own filter.

        Returns:
            ``False`` if it matches every row.
        """
        return bool(condition)

    def row_ids(self, record_id: str, manifest: CollectionManifest) -> Sequence[Any]:
        """The database ids that a record may have; a database adds that of a row whose :class:`Hit` has its own id.

        Args:
            record_id: The id of the record.
            manifest: The manifest of the collection.

        Returns:
            Database ids, at least one.
        """
        return [point_id(record_id)]

    def ranks_texts(self) -> bool:
        """Whether the database makes sparse vectors of the texts itself, for a hybrid search without an engine."""
        return False

    @contextmanager
    def reading(self, row_id: str, manifest: CollectionManifest) -> Iterator[None]:
        """Turn an error from reading a stored row into a SinkError that names the row, not the database.

        Args:
            row_id: The id of the row.
            manifest: The manifest of the collection.

        Returns:
            A context manager for the block that reads the row.

        Raises:
            SinkError: The fields of the row do not have the layout of the manifest.
        """
        try:
            yield
        except (LookupError, TypeError, ValueError) as error:
            at = self.connection
            raise SinkError(
                f"collection {at.collection!r} holds the {at.row} {row_id!r}, whose fields do not have the layout "
                f"{manifest.fields!r} ({type(error).__name__}: {error}); delete it in {at.database}, or write it again"
            ) from error


def inexact(driver: CollectionDriver[NativeFilter], filter: object) -> dict[str, Condition] | None:
    """The conditions of a dict that the database's own filter only approximates; ``None`` if it is exact."""
    conditions = check_filter(filter) if isinstance(filter, Mapping) else {}
    return None if driver.is_exact(conditions) else conditions


def find(
    driver: CollectionDriver[NativeFilter],
    plan: SearchPlan,
    native: NativeFilter | None,
    conditions: Mapping[str, Condition] | None,
    manifest: CollectionManifest,
) -> list[Hit]:
    """The hits of a search; of an inexact filter more, until as many meet the conditions as were asked for."""
    k, most = plan.k, driver.max_results or sys.maxsize
    while True:
        hits = list(driver.connection.request("a search", partial(driver.query, plan, native, manifest)))
        if conditions is None:
            return hits
        kept = [hit for hit in hits if matches_filter(hit.metadata, conditions)]
        if len(kept) >= k or len(hits) < plan.k:
            return kept[:k]
        if plan.k == most:
            raise InvalidRequestError(
                f"of the nearest {most} rows, as many as {driver.connection.database} hands out, {len(kept)} meet the "
                f"filter, whose ranges it only approximates, and not k={k}; add a condition, or ask for fewer"
            )
        plan = replace(plan, k=min(2 * plan.k, most), candidates=min(2 * plan.candidates, most))


def matching(
    driver: CollectionDriver[NativeFilter],
    native: NativeFilter,
    conditions: Mapping[str, Condition],
    manifest: CollectionManifest,
) -> list[Any]:
    """The database ids of the rows that meet the conditions, among those that a native filter finds."""
    pages = driver.matching(native, manifest)
    found: list[Any] = []
    while (page := driver.connection.request("a scan", lambda: next(pages, None))) is not None:
        found += [row_id for row_id, metadata in page if matches_filter(metadata, conditions)]
    return found
