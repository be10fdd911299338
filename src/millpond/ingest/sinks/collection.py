"""CollectionSink: the part of a sink that is the same for every database."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from millpond.errors import InvalidRequestError, MillpondError, SinkError, SinkRejectedError, UnsupportedTaskError
from millpond.ingest.arguments import check_engine
from millpond.ingest.record import Record, point_id
from millpond.ingest.sinks.batch import WriteBatch, record_bytes, slices
from millpond.ingest.sinks.client import CollectionClient
from millpond.ingest.sinks.manifest import CollectionManifest
from millpond.ingest.sinks.payload import FieldLayout, check_fields
from millpond.ingest.sinks.protocol import StoredRow, check_widths
from millpond.ingest.sinks.search import Hit, SearchPlan, plan_search
from millpond.spec import ModelSpec

if TYPE_CHECKING:
    from millpond.engine.engine import Engine

NativeFilter = TypeVar("NativeFilter")

# Bytes of one sparse entry in a request, at the most: the token id and the weight, in JSON.
_SPARSE_BYTES = 32
# Chunks of a record that are looked for at a time, to delete them all.
_CHUNKS = 64


class CollectionSink(CollectionClient, Generic[NativeFilter]):
    """One collection of a database: ingest writes to it, and it can be searched.

    A subclass names the database, its limits and its client, and implements the requests: ``_exists``, ``_create``,
    ``_read_manifest``, ``_upsert``, ``_query``, ``_delete``, ``_count``, ``_fetch`` and ``_scan``, with ``_to_native``
    for filters and ``_describe_error`` and ``_classify`` for the client's errors. It may also override ``_encode``,
    ``_decode``, ``_has_condition``, ``_prepare``, ``_load``, ``_flush``, ``_row_ids``, ``_release`` and ``check``.

    Args:
        location: Where the database is; not read if the caller passed a client.
        collection: Name of the collection.
        dimensions: The widths to store and search; ``None`` stores the width that ``embed`` returns, and searches
            every width that the collection has.
        fields: The layout of the stored fields.
        owned: Whether this object opens the client, so that :meth:`close` closes it; ``False`` if the caller passed it.
        hybrid: Store sparse vectors beside the dense ones, for searches that fuse both.

    Raises:
        InvalidRequestError: A name, location, width or field layout that is not valid.
    """

    max_results: ClassVar[int | None] = None  # of one search
    hybrids: ClassVar[bool] = False  # whether the database's sink stores sparse vectors

    def __init__(
        self,
        location: str | os.PathLike[str] | None,
        collection: str,
        *,
        dimensions: Sequence[int] | None,
        fields: str,
        owned: bool = True,
        hybrid: bool = False,
    ) -> None:
        super().__init__(location, collection, owned=owned)
        if hybrid not in (False, True):
            raise InvalidRequestError(f"hybrid={hybrid!r} must be True or False for {self.database}")
        if hybrid and not self.hybrids:
            raise InvalidRequestError(
                f"hybrid=True: this sink of {self.database} stores no sparse vectors; leave it out"
            )
        self._hybrid = bool(hybrid)
        self._failed_write: str | None = None  # of an embedded database, whose later writes would be lost
        self._dimensions = check_widths(dimensions)
        self._fields = check_fields(fields)
        self._manifest: CollectionManifest | None = None

    @property
    def dimensions(self) -> tuple[int, ...] | None:
        """The widths passed at construction, ascending; ``None`` stands for the width that ``embed`` returns."""
        return self._dimensions

    @property
    def hybrid(self) -> bool:
        """Whether sparse vectors are stored beside the dense ones."""
        return self._hybrid

    @property
    def embedded(self) -> bool:
        """Whether the database runs inside this process: then nothing is written after a write that failed.

        The log of such a database may end in a torn record, behind which later writes are lost at the next start.
        """
        return False

    @property
    def manifest(self) -> CollectionManifest | None:
        """What the collection stores of its model and its form; ``None`` before it is opened."""
        return self._manifest

    @property
    def fusible(self) -> bool:
        """Whether the opened collection can be searched with ``hybrid=True``."""
        return self._manifest is not None and self._manifest.sparse is not None

    def open(self) -> CollectionManifest:
        """Open a collection that exists, to read it; :meth:`prepare` also creates one.

        Raises:
            InvalidRequestError: No such collection.
            FingerprintMismatchError: millpond did not create it.
            SinkError: The database does not answer, or refuses.
        """
        return self._opened()

    def prepare(self, spec: ModelSpec, *, sparse: ModelSpec | None = None, chunked: bool = False) -> None:
        """Create the collection, or check that it was created with this model, these widths and this field layout.

        Args:
            spec: The model of the vectors.
            sparse: The model of a hybrid sink's sparse vectors; by default the same one.
            chunked: Whether records are cut into chunks.

        Raises:
            UnsupportedTaskError: The sink is hybrid, and the model makes no sparse vectors.
            FingerprintMismatchError: The collection was built by another model, or not by millpond.
            InvalidRequestError: It has other widths or another field layout, or the model does not have these widths.
            SinkError: The database does not answer, or refuses.
        """
        sparse = self._sparse_spec(spec, sparse)
        own = CollectionManifest.of(
            spec, dimensions=self._dimensions, fields=self._fields, sparse=sparse, chunked=chunked
        )
        if not self._found():
            try:
                with self._request("creating the collection"):
                    self._create(own)
            except SinkError:
                if not self._found():  # else another process was faster, and its collection is checked next
                    raise
        stored = self._stored_manifest()
        stored.check_write(own, spec, collection=self._collection, sparse=sparse)
        self._prepare(stored)
        self._load()
        self._manifest = stored

    def check(self, record: Record) -> None:
        """Raise InvalidRequestError for a record that no request could carry."""
        if (size := record_bytes(record)) > self.max_bytes:
            raise InvalidRequestError(f"{size} bytes of text and metadata; a {self.row} takes at most {self.max_bytes}")

    def write(self, batch: WriteBatch) -> None:
        """Upsert the rows, in requests that the database accepts, and wait until it has acknowledged them.

        Raises:
            InvalidRequestError: The collection is not prepared, or has other widths.
            SinkError: The database does not answer, or refuses, or runs in this process and failed in an earlier write.
        """
        if self._manifest is None:
            raise InvalidRequestError(f"collection {self._collection!r} is not prepared; call prepare(spec) first")
        if self._failed_write is not None:
            raise SinkError(
                f"{self.database} at {self._where} takes no more writes from this {self.kind}, since one failed "
                f"({self._failed_write}) and what follows might be lost; close it, open it again and verify"
            )
        if tuple(sorted(batch.vectors)) != self._manifest.dimensions:
            raise InvalidRequestError(
                f"the batch holds the widths {sorted(batch.vectors)}, the collection {list(self._manifest.dimensions)}"
            )
        if (batch.sparse is not None) != self._hybrid:
            wanted = "with sparse vectors" if self._hybrid else "without sparse vectors"
            raise InvalidRequestError(f"the {self.kind} of collection {self._collection!r} takes batches {wanted}")
        vector_bytes = self.float_bytes * sum(batch.vectors)
        sizes = [vector_bytes + record_bytes(record) for record in batch.records]
        if batch.sparse is not None:
            sizes = [size + _SPARSE_BYTES * len(row) for size, row in zip(sizes, batch.sparse, strict=True)]
        for rows in slices(sizes, max_rows=self.max_rows, max_bytes=self.max_bytes):
            part = batch.part(rows)
            encoded = self._encode(part)
            with self._changing(), self._request(f"an upsert of {len(part)} {self.row}s"):
                self._upsert(encoded)
        with self._changing():
            self._flush()

    def delete(
        self, ids: Sequence[str] | None = None, *, filter: Mapping[str, object] | NativeFilter | None = None
    ) -> None:
        """Delete records by id or by metadata, and wait until the database has acknowledged it.

        Args:
            ids: Ids of ingested records, or of hits; those that the collection does not hold are ignored.
            filter: What :meth:`search` takes, instead of ``ids``. It must have a condition.

        Raises:
            InvalidRequestError: No such collection, both or neither argument, or a filter without a condition.
            FingerprintMismatchError: millpond did not create the collection.
            SinkError: The database does not answer, or refuses.
        """
        if (ids is None) == (filter is None):
            raise InvalidRequestError("delete takes either ids or filter; pass one of them")
        if isinstance(ids, str):
            raise InvalidRequestError(f"ids={ids!r} is one str; pass a list of ids")
        manifest = self._opened()
        if ids is None:
            native = self._to_native(filter, manifest.fields)
            if native is None or not self._has_condition(native):
                raise InvalidRequestError(f"filter={filter!r} has no condition and would delete every record")
            with self._changing(), self._request("a delete by filter"):
                self._delete(native, manifest.fields)
            with self._changing():
                self._flush()
        else:
            chunks = self.chunks_from(dict.fromkeys(ids, 1))
            self.delete_rows([*chunks, *(row_id for each in ids for row_id in self._row_ids(each))])

    def delete_rows(self, row_ids: Sequence[Any]) -> None:
        """Delete rows by their own ids, and wait until the database has acknowledged it.

        Raises:
            InvalidRequestError: No such collection.
            FingerprintMismatchError: millpond did not create the collection.
            SinkError: The database does not answer, or refuses.
        """
        manifest = self._opened()
        for start in range(0, len(row_ids), self.max_rows):
            part = row_ids[start : start + self.max_rows]
            with self._changing(), self._request(f"a delete of {len(part)} {self.row}s"):
                self._delete(part, manifest.fields)
        with self._changing():
            self._flush()

    def fetch(self, row_ids: Sequence[str], *, widths: Sequence[int] = ()) -> dict[str, StoredRow]:
        """Those of these rows that exist, with their vectors of some widths.

        Args:
            row_ids: Ids of rows, as :func:`~millpond.ingest.point_id` makes them.
            widths: Which vectors to read.

        Raises:
            InvalidRequestError: No such collection.
            SinkError: The database does not answer, or refuses.
        """
        manifest = self._opened()
        rows: dict[str, StoredRow] = {}
        for start in range(0, len(row_ids), self.max_rows):
            part = row_ids[start : start + self.max_rows]
            with self._request(f"a look at {len(part)} {self.row}s"):
                rows.update(self._fetch(part, tuple(widths), manifest.fields))
        return rows

    def chunks_from(self, first: Mapping[str, int]) -> list[str]:
        """Row ids of records' chunks from a number on, the last ones first; none if the collection holds no chunks.

        They are looked for by their own ids, until one is absent. Whoever deletes them in this order leaves no gap, and
        can be interrupted.

        Args:
            first: For each record's id, the number of the first chunk.
        """
        if not self._opened().chunked:
            return []
        found: list[list[str]] = []
        pending = dict(first)
        window = 1  # most records have no other chunk
        while pending:
            rows = {
                record_id: [point_id(record_id, number) for number in range(start, start + window)]
                for record_id, start in pending.items()
            }
            stored = self.fetch([row_id for row_ids in rows.values() for row_id in row_ids])
            for row_ids in rows.values():
                found.append([row_id for row_id in reversed(row_ids) if row_id in stored])
            pending = {
                record_id: pending[record_id] + window
                for record_id, row_ids in rows.items()
                if not stored.keys().isdisjoint(row_ids)
            }
            window = _CHUNKS
        return [row_id for row_ids in reversed(found) for row_id in row_ids]

    def scan(self) -> Iterator[tuple[str, str]]:
        """The row id and the record id of every row; of a framework's own row both are the row's id.

        Raises:
            InvalidRequestError: No such collection.
            SinkError: The database does not answer, or refuses.
        """
        manifest = self._opened()
        pages = self._scan(manifest.fields)
        while True:
            with self._request("a scan"):
                page = next(pages, None)
            if page is None:
                return
            yield from page

    def count(self) -> int:
        """How many rows the collection holds; 0 before it is created."""
        if not self._found():
            return 0
        self._load()
        with self._request("a count"):
            return self._count()

    def search(
        self,
        engine: Engine,
        question: str,
        *,
        k: int = 10,
        coarse_to_fine: bool = True,
        candidates: int | None = None,
        filter: Mapping[str, object] | NativeFilter | None = None,
        hybrid: bool = False,
        sparse_engine: Engine | None = None,
    ) -> list[Hit]:
        """The records nearest to a question.

        Args:
            engine: The engine that filled the collection; it embeds the question with the role ``query``.
            question: One question.
            k: Most hits to return; fewer if fewer records match.
            coarse_to_fine: Find candidates by the smallest width and score them by the largest; ``False`` searches the
                largest width alone.
            candidates: How many candidates, ``max(100, 10 * k)`` by default.
            filter: A dict of metadata values that must match (of a list, one of them), or the database's own filter.
            hybrid: Fuse the ranking with that of the sparse vectors, by reciprocal rank.
            sparse_engine: The engine of the sparse vectors, by default ``engine``.

        Returns:
            At most ``k`` hits, best first; scores are cosine at the largest width, or fused ones. A row that a
            framework wrote without the vector of this width, where the database stores such rows, is scored by the
            largest one that it has.

        Raises:
            FingerprintMismatchError: Another model filled the collection.
            InvalidRequestError: No such collection, or an argument out of range.
            SinkError: The database does not answer, or refuses, or a row that is found was not written in the
                collection's field layout.
        """
        check_engine(engine)
        if self.max_results is not None:
            for name, value in (("k", k), ("candidates", candidates)):
                if isinstance(value, int) and value > self.max_results:
                    raise InvalidRequestError(
                        f"{name}={value} is more than {self.database} hands out ({self.max_results})"
                    )
        manifest = self._opened()
        manifest.check_model(engine.spec, collection=self._collection)
        if hybrid:
            sparse_engine = self._sparse_engine(manifest, engine if sparse_engine is None else sparse_engine)
        widths = manifest.widths_to_search(self._dimensions, collection=self._collection)
        native = self._to_native(filter, manifest.fields)
        plan = plan_search(
            engine,
            question,
            widths=widths,
            k=k,
            coarse_to_fine=coarse_to_fine,
            candidates=candidates,
            sparse_engine=sparse_engine if hybrid else None,
            hybrid=hybrid,
        )
        with self._request("a search"):
            rows = self._query(plan, native, manifest.fields)
        return [self._decode(row, manifest.fields) for row in rows]

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self._where!r}, {self._collection!r}, dimensions={self._dimensions}, "
            f"{self._fields!r})"
        )

    # ------------------------------------------------------------------------------- implemented by each database

    def _fetch(self, row_ids: Sequence[str], widths: Sequence[int], fields: FieldLayout) -> Mapping[str, StoredRow]:
        """Those of these rows that exist, at most ``max_rows``, with their vectors of these widths."""
        raise SinkError(f"this {self.kind} of {self.database} cannot read rows back")

    def _scan(self, fields: FieldLayout) -> Iterator[Sequence[tuple[str, str]]]:
        """Pages of row ids and record ids, over the whole collection."""
        raise SinkError(f"this {self.kind} of {self.database} cannot list its rows")

    @abstractmethod
    def _create(self, manifest: CollectionManifest) -> None:
        """Create the collection: cosine vectors ``vector_name(width)`` for each width, and the manifest as metadata."""

    @abstractmethod
    def _upsert(self, rows: Any) -> None:
        """Store what :meth:`_encode` returned, replacing rows whose id exists, and wait for the acknowledgement."""

    @abstractmethod
    def _query(self, plan: SearchPlan, native: NativeFilter | None, fields: FieldLayout) -> Sequence[Any]:
        """Run the stages of a search: ``plan.coarse``, unless it is ``None``, selects rows that ``plan.full`` ranks.

        Returns:
            The rows for :meth:`_decode`, best first.
        """

    @abstractmethod
    def _delete(self, which: Sequence[str] | NativeFilter, fields: FieldLayout) -> None:
        """Delete the rows with these database ids, or those that a filter matches."""

    @abstractmethod
    def _count(self) -> int:
        """How many rows the collection holds, counting every acknowledged write."""

    @abstractmethod
    def _to_native(
        self, filter: Mapping[str, object] | NativeFilter | None, fields: FieldLayout
    ) -> NativeFilter | None:
        """The database's own filter; ``None`` or an empty one for no condition. InvalidRequestError for other types."""

    def _has_condition(self, native: NativeFilter) -> bool:
        """Whether a filter has a condition; one without would match every row. By default, whether it is truthy."""
        return bool(native)

    def _encode(self, batch: WriteBatch) -> Any:
        """The rows of one request as the client takes them; by default the batch itself."""
        return batch

    def _decode(self, row: Any, fields: FieldLayout) -> Hit:
        """A row that :meth:`_query` found as a hit, read inside :meth:`_reading`; by default the row is the hit."""
        hit: Hit = row
        return hit

    def _prepare(self, manifest: CollectionManifest) -> None:
        """Make the collection ready to be written to, once it exists and its manifest is checked."""

    def _load(self) -> None:
        """Make an existing collection ready to be read."""

    def _flush(self) -> None:
        """Make acknowledged changes durable, once after the requests of a write or delete."""

    def _row_ids(self, record_id: str) -> Sequence[Any]:
        """The database ids that a record may have; a database adds that of a row whose :class:`Hit` has its own id."""
        return [point_id(record_id)]

    # ----------------------------------------------------------------------------------------------------------

    def _sparse_spec(self, spec: ModelSpec, sparse: ModelSpec | None) -> ModelSpec | None:
        """The model of the sparse vectors; ``None`` for a sink that stores none."""
        if not self._hybrid:
            return None
        chosen = spec if sparse is None else sparse
        if "sparse_embed" not in chosen.tasks:
            raise UnsupportedTaskError(
                f"hybrid=True needs sparse vectors, and {chosen.name} serves {', '.join(sorted(chosen.tasks))}; pass "
                "the engine of a sparse model (SPLADE, or BGE-M3) as sparse_engine, or leave hybrid out"
            )
        return chosen

    def _sparse_engine(self, manifest: CollectionManifest, engine: Engine) -> Engine | None:
        """The engine of a question's sparse vector, checked; ``None`` if the database makes it of the text."""
        check_engine(engine)
        manifest.check_sparse(engine.spec, collection=self._collection)
        return engine

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Note the failure of a change of an embedded database."""
        try:
            yield
        except BaseException as error:
            refused = isinstance(error, SinkRejectedError) or not isinstance(error, SinkError)  # before it was written
            if self.embedded and not (isinstance(error, MillpondError) and refused):
                self._failed_write = str(error) or repr(error)
            raise

    @contextmanager
    def _reading(self, row_id: str, fields: FieldLayout) -> Iterator[None]:
        """Turn an error from reading a stored row into a SinkError that names the row, not the database."""
        try:
            yield
        except (LookupError, TypeError, ValueError) as error:
            raise SinkError(
                f"collection {self._collection!r} holds the {self.row} {row_id!r}, whose fields do not have the layout "
                f"{fields!r} ({type(error).__name__}: {error}); delete it in {self.database}, or write it again"
            ) from error

    def _stored_manifest(self) -> CollectionManifest:
        with self._request("a look at the collection"):
            data = self._read_manifest()
        return CollectionManifest.from_dict(data, collection=self._collection)

    def _opened(self) -> CollectionManifest:
        """The manifest of the collection, which is loaded on first use."""
        if self._manifest is None:
            if not self._found():
                raise InvalidRequestError(
                    f"there is no collection {self._collection!r} at {self._where}; ingest into it first"
                )
            manifest = self._stored_manifest()
            self._load()
            self._manifest = manifest
        return self._manifest
