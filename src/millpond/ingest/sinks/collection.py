"""CollectionSink: the part of a sink that is the same for every database."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from millpond.errors import InvalidRequestError, MillpondError, SinkError, SinkRejectedError
from millpond.ingest.arguments import check_engine
from millpond.ingest.record import Record
from millpond.ingest.sinks.batch import WriteBatch, request_sizes, slices
from millpond.ingest.sinks.chunk_rows import chunk_rows
from millpond.ingest.sinks.description import CollectionDescription, describe
from millpond.ingest.sinks.driver import CollectionDriver, NativeFilter, find, inexact, matching
from millpond.ingest.sinks.fields import check_fields
from millpond.ingest.sinks.manifest import CollectionManifest, sparse_spec
from millpond.ingest.sinks.preparation import create_or_check, prepare_copy
from millpond.ingest.sinks.protocol import StoredRow, check_widths
from millpond.ingest.sinks.raw_rows import RawRows
from millpond.ingest.sinks.run_note import RunNote
from millpond.ingest.sinks.search import Hit, plan_search
from millpond.values.spec import ModelSpec

if TYPE_CHECKING:
    from millpond.engine.engine import Engine

Answer = TypeVar("Answer")


class CollectionSink(Generic[NativeFilter]):
    """One collection of a database: ingest writes to it, and it can be searched.

    Every method that makes a request raises SinkError if the database refuses or does not answer, InvalidRequestError
    if there is no such collection, and FingerprintMismatchError if millpond did not create it.

    Args:
        driver: The database's requests.
        dimensions: The widths to store and search; ``None`` takes those that the collection has, and stores the width
            that ``embed`` returns in a new one.
        fields: The layout of the stored fields: ``plain``, ``langchain`` or ``llama_index``; ``None`` takes that of the
            collection, and ``plain`` for a new one.
        hybrid: Store sparse vectors beside the dense ones, for searches that fuse both.

    Attributes:
        database: Name of the database, for messages.
        collection: The collection's name.
        dimensions: The widths passed at construction, ascending; ``None`` for those of the collection.
        hybrid: Whether sparse vectors are stored beside the dense ones.
        manifest: What the collection stores of its model and its form; ``None`` before it is opened.
        max_results: Most rows that the database hands out in one search; ``None`` without such a limit.

    Raises:
        InvalidRequestError: A width or field layout that is not valid, or sparse vectors that the database lacks.
    """

    def __init__(
        self,
        driver: CollectionDriver[NativeFilter],
        *,
        dimensions: Sequence[int] | None = None,
        fields: str | None = None,
        hybrid: bool = False,
    ) -> None:
        self._driver = driver
        self._connection = driver.connection
        self.database, self.collection = self._connection.database, self._connection.collection
        if hybrid not in (False, True):
            raise InvalidRequestError(f"hybrid={hybrid!r} must be True or False for {self.database}")
        if hybrid and not driver.hybrids:
            raise InvalidRequestError(
                f"hybrid=True: this sink of {self.database} stores no sparse vectors; leave it out"
            )
        self.hybrid = bool(hybrid)
        self.max_results = driver.max_results
        self.dimensions = check_widths(dimensions)
        self.manifest: CollectionManifest | None = None
        self._failed_write: str | None = None  # of an embedded database, whose later writes would be lost
        self._fields = None if fields is None else check_fields(fields)
        self._read = 0.0  # when the manifest was, on the clock's seconds

    @property
    def client(self) -> Any:
        """The database's own client."""
        return self._connection.client

    @property
    def target(self) -> str:
        """The database and the collection, as a journal names them: the same from any folder and in any process."""
        return self._connection.target

    def is_same(self, other: CollectionSink[Any]) -> bool:
        """Whether another sink is one of the same collection."""
        return self._connection.is_same(other._connection)

    @property
    def embedded(self) -> bool:
        """Whether the database runs inside this process: then nothing is written after a write that failed.

        The log of such a database may end in a torn record, behind which later writes are lost at the next start.
        """
        return self._connection.embedded

    @property
    def fusible(self) -> bool:
        """Whether the opened collection can be searched with ``hybrid=True``."""
        return self.manifest is not None and (self.manifest.sparse is not None or self._driver.ranks_texts())

    def open(self) -> CollectionManifest:
        """The manifest of a collection that exists, which is loaded on first use; :meth:`prepare` also creates one."""
        if self.manifest is None:
            if not self._connection.found():
                raise self._connection.missing()
            manifest = self._stored_manifest()
            self._driver.load()
            self.manifest = manifest
        elif time.monotonic() - self._read > self._driver.trusted:
            self.manifest = self._stored_manifest()  # an alias may name another collection by now
        return self.manifest

    def collections(self) -> list[str]:
        """Names of all collections at this location, whoever made them, in alphabetical order."""
        return self._connection.listed()

    def describe(self) -> CollectionDescription:
        """What the database stores of the collection, which is not loaded for that."""
        return describe(self._connection, self._driver)

    def raw(self) -> RawRows:
        """Every row as the database holds it, also of a collection that millpond did not make."""
        if not self._connection.found():
            raise self._connection.missing()
        return RawRows(self._connection, self._driver)

    def prepare(self, spec: ModelSpec, *, sparse: ModelSpec | None = None, chunked: bool = False) -> None:
        """Create the collection, or check that it was created with this model, these widths and this field layout.

        Of a collection that exists a sink takes what it was not given: the widths, and the field layout.

        Args:
            spec: The model of the vectors.
            sparse: The model of a hybrid sink's sparse vectors; by default the same one.
            chunked: Whether records are cut into chunks.

        Raises:
            UnsupportedTaskError: The sink is hybrid, and the model makes no sparse vectors.
            FingerprintMismatchError: The collection was built by another model, or not by millpond.
            InvalidRequestError: It has other widths or another field layout, or the model does not have these widths.
        """
        chosen = sparse_spec(spec, sparse) if self.hybrid else None
        own = CollectionManifest.of(
            spec, dimensions=self.dimensions, fields=self._fields or "plain", sparse=chosen, chunked=chunked
        )

        def check(stored: CollectionManifest, own: CollectionManifest) -> None:
            stored.check_write(own, spec, collection=self.collection, sparse=chosen)

        self._read = time.monotonic()
        self.manifest = create_or_check(self._connection, self._driver, own, (self.dimensions, self._fields), check)

    def prepare_copy(self, source: CollectionManifest) -> None:
        """Create the collection for rows of another one, or check that it may take them, as :meth:`prepare` does.

        Args:
            source: The manifest of the other collection, of which a new one has what the sink was not given.

        Raises:
            FingerprintMismatchError: Another model filled this collection, or millpond did not make it.
            InvalidRequestError: It has a width that the other one lacks, or another form.
        """
        form, self._read = (self.dimensions, self._fields), time.monotonic()
        self.manifest = prepare_copy(self._connection, self._driver, source, form, sparse=self.hybrid)

    def check(self, record: Record) -> None:
        """Raise InvalidRequestError for a record that no request could carry, or that the database cannot store.

        Args:
            record: The record.

        Raises:
            InvalidRequestError: The message says what is too large or not valid.
        """
        self._driver.check(record, self.dimensions or () if self.manifest is None else self.manifest.dimensions)

    def write(self, batch: WriteBatch) -> None:
        """Upsert the rows, in requests that the database accepts, and wait until it has acknowledged them.

        Args:
            batch: Rows with a vector of each of the collection's widths.

        Raises:
            InvalidRequestError: The collection is not prepared, or has other widths.
            SinkError: The database runs in this process and failed in an earlier write.
        """
        self._check_batch(batch)
        sizes = request_sizes(batch, self._connection.float_bytes)
        for rows in slices(sizes, max_rows=self._connection.max_rows, max_bytes=self._connection.max_bytes):
            part = batch.part(rows)
            self._change(partial(self._driver.upsert, part), f"an upsert of {len(part)} {self._connection.row}s")
        self._change(self._driver.flush)

    def delete(
        self, ids: Sequence[str] | None = None, *, filter: Mapping[str, object] | NativeFilter | None = None
    ) -> None:
        """Delete records by id or by metadata, and wait until the database has acknowledged it.

        Args:
            ids: Ids of ingested records, or of hits; those that the collection does not hold are ignored.
            filter: What :meth:`search` takes, instead of ``ids``. It must have a condition.

        Raises:
            InvalidRequestError: Both or neither argument, or a filter without a condition.
        """
        if (ids is None) == (filter is None):
            raise InvalidRequestError("delete takes either ids or filter; pass one of them")
        if isinstance(ids, str):
            raise InvalidRequestError(f"ids={ids!r} is one str; pass a list of ids")
        manifest = self.open()
        if ids is not None:
            own = [row_id for each in ids for row_id in self._driver.row_ids(each, manifest)]
            return self.delete_rows([*self.chunks_from(dict.fromkeys(ids, 1)), *own])
        native = self._driver.condition(filter, manifest)
        if native is None or not self._driver.has_condition(native):
            raise InvalidRequestError(f"filter={filter!r} has no condition and would delete every record")
        if (conditions := inexact(self._driver, filter)) is not None:
            return self.delete_rows(matching(self._driver, native, conditions, manifest))
        self._change(lambda: self._driver.delete(native, manifest), "a delete by filter")
        self._change(self._driver.flush)

    def delete_rows(self, row_ids: Sequence[Any]) -> None:
        """Delete rows by their own ids (those that do not exist are ignored), and wait for the acknowledgement.

        Args:
            row_ids: The ids that the rows have in the database.

        Raises:
            InvalidRequestError: The collection does not exist.
        """
        manifest = self.open()
        for part in self._parts(row_ids):
            words = f"a delete of {len(part)} {self._connection.row}s"
            self._change(partial(self._driver.delete, part, manifest), words)
        self._change(self._driver.flush)

    def fetch(self, row_ids: Sequence[str], *, widths: Sequence[int] = ()) -> dict[str, StoredRow]:
        """Those of these rows that exist, by their ids, with their vectors of some widths.

        Args:
            row_ids: Any number of row ids.
            widths: The widths of the vectors to read; empty for none.

        Returns:
            For each row id that exists, the row with its vectors ``[width]``.

        Raises:
            InvalidRequestError: The collection does not exist.
        """
        return self._look(self._driver.fetch, row_ids, widths)

    def read_rows(self, row_ids: Sequence[str], *, widths: Sequence[int] = ()) -> dict[str, StoredRow]:
        """As :meth:`fetch`, with the texts and the metadata as users see them.

        Args:
            row_ids: Any number of row ids.
            widths: The widths of the vectors to read; empty for none.

        Returns:
            For each row id that exists, the row.

        Raises:
            InvalidRequestError: The collection does not exist.
        """
        return self._look(self._driver.read, row_ids, widths)

    def last_run(self) -> str:
        """The id of the run that changed the collection last, as it is stored now; empty if there is none."""
        return self._stored_manifest().run

    def note_run(self, run: str, note: RunNote | None = None) -> None:
        """Store the id of a run in the collection's metadata.

        Args:
            run: The id.
            note: What the run reads and how, which is kept with the notes of earlier runs.

        Raises:
            SinkError: The database refuses, or cannot store it.
        """
        noted = self._stored_manifest().noting(run, note)
        self._connection.request("a note of the run", lambda: self._driver.store_manifest(noted))
        self.manifest = noted

    def chunks_from(self, first: Mapping[str, int]) -> list[str]:
        """Row ids of records' chunks from a number on, the last ones first; none if the collection holds no chunks.

        They are looked for by their own ids, until one is absent. Whoever deletes them in this order leaves no gap, and
        can be interrupted.

        Args:
            first: For each record id, the number of the first chunk to look for.

        Returns:
            A list of row ids.

        Raises:
            InvalidRequestError: The collection does not exist.
        """
        return chunk_rows(self.fetch, first) if self.open().chunked else []

    def row_ids(self, record_id: str) -> list[str]:
        """The row ids that a record may have, without those of its chunks from 1 on.

        Args:
            record_id: The id of a record, or of a row that a framework wrote.

        Returns:
            A list of row ids, as a scan shows them.
        """
        return [str(each) for each in self._driver.row_ids(record_id, self.open())]

    def scan(self) -> Iterator[tuple[str, str]]:
        """The row id and the record id of every row; of a framework's own row both are the row's id."""
        pages = self._driver.scan(self.open())
        while (page := self._connection.request("a scan", lambda: next(pages, None))) is not None:
            yield from page

    def count(self) -> int:
        """How many rows the collection holds; 0 before it is created."""
        if not self._connection.found():
            return 0
        self._driver.load()
        return self._connection.request("a count", self._driver.count)

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
            filter: A dict that has for each metadata key a value, a list of which one must match, or a range like
                ``{"gte": 2020, "lt": 2024}``; or the database's own filter.
            hybrid: Fuse the ranking with that of the sparse vectors, by reciprocal rank.
            sparse_engine: The engine of the sparse vectors, by default ``engine``.

        Returns:
            At most ``k`` hits, best first; scores are cosine at the largest width, or fused ones. A row that a
            framework wrote without the vector of this width, where the database stores such rows, is scored by the
            largest one that it has.

        Raises:
            FingerprintMismatchError: Another model filled the collection.
            InvalidRequestError: An argument out of range.
            SinkError: A row that is found was not written in the collection's field layout.
        """
        check_engine(engine)
        limit = self._driver.max_results
        for name, value in (("k", k), ("candidates", candidates)):
            if limit is not None and isinstance(value, int) and value > limit:
                raise InvalidRequestError(f"{name}={value} is more than {self.database} hands out ({limit})")
        manifest = self.open()
        manifest.check_model(engine.spec, collection=self.collection)
        sparse = None
        if hybrid and not self._driver.ranks_texts():
            sparse = engine if sparse_engine is None else sparse_engine
            check_engine(sparse)
            manifest.check_sparse(sparse.spec, collection=self.collection)
        widths = manifest.widths_to_search(self.dimensions, collection=self.collection)
        condition = self._driver.condition(filter, manifest)
        plan = plan_search(
            engine,
            question,
            widths=widths,
            k=k,
            coarse_to_fine=coarse_to_fine,
            candidates=candidates,
            sparse_engine=sparse,
            hybrid=hybrid,
        )
        return find(self._driver, plan, condition, inexact(self._driver, filter), manifest)

    def close(self) -> None:
        """Close the client, unless it was passed in; from then on requests raise SinkError."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self._connection.where!r}, {self.collection!r}, dimensions={self.dimensions}, "
            f"fields={self._fields!r})"
        )

    def _check_batch(self, batch: WriteBatch) -> None:
        if self.manifest is None:
            raise InvalidRequestError(f"collection {self.collection!r} is not prepared; call prepare(spec) first")
        if self._failed_write is not None:
            raise SinkError(
                f"{self.database} at {self._connection.where} takes no more writes from this sink, since "
                f"one failed ({self._failed_write}) and what follows might be lost; close it, open it again and verify"
            )
        if tuple(sorted(batch.vectors)) != self.manifest.dimensions:
            raise InvalidRequestError(
                f"the batch holds the widths {sorted(batch.vectors)}, the collection {list(self.manifest.dimensions)}"
            )
        if (batch.sparse is not None) != self.hybrid:
            wanted = "with sparse vectors" if self.hybrid else "without sparse vectors"
            raise InvalidRequestError(f"the sink of collection {self.collection!r} takes batches {wanted}")

    def _look(
        self,
        read: Callable[[Sequence[str], Sequence[int], CollectionManifest], Mapping[str, StoredRow]],
        row_ids: Sequence[str],
        widths: Sequence[int],
    ) -> dict[str, StoredRow]:
        manifest = self.open()
        rows: dict[str, StoredRow] = {}
        for part in self._parts(row_ids):
            words = f"a look at {len(part)} {self._connection.row}s"
            rows.update(self._connection.request(words, partial(read, part, tuple(widths), manifest)))
        return rows

    def _parts(self, row_ids: Sequence[Answer]) -> Iterator[Sequence[Answer]]:
        """As many ids at a time as a request takes."""
        size = self._connection.max_rows
        return (row_ids[start : start + size] for start in range(0, len(row_ids), size))

    def _change(self, change: Callable[[], None], words: str = "") -> None:
        """Make a change, as a request if it has words, and note its failure in an embedded database."""
        try:
            self._connection.request(words, change) if words else change()
        except BaseException as error:
            refused = isinstance(error, SinkRejectedError) or not isinstance(error, SinkError)  # before it was written
            if self.embedded and not (isinstance(error, MillpondError) and refused):
                self._failed_write = str(error) or repr(error)
            raise

    def _stored_manifest(self) -> CollectionManifest:
        self._read = time.monotonic()
        return CollectionManifest.from_dict(self._connection.stored_manifest(), collection=self.collection)
