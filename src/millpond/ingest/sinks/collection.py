"""CollectionSink: the part of a sink that is the same for every database."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Self

from millpond.errors import (
    FingerprintMismatchError,
    InvalidRequestError,
    MillpondError,
    SinkError,
    SinkRejectedError,
    SinkUnavailableError,
)
from millpond.ingest.arguments import check_engine
from millpond.ingest.record import Record
from millpond.ingest.sinks.batch import WriteBatch, request_sizes, slices
from millpond.ingest.sinks.driver import CollectionDriver, NativeFilter, find, inexact, matching
from millpond.ingest.sinks.manifest import CollectionManifest, sparse_spec
from millpond.ingest.sinks.parents import Expand, best_of_each, check_expand, with_parents
from millpond.ingest.sinks.preparation import create_or_check, prepare_copy
from millpond.ingest.sinks.reader import CollectionReader
from millpond.ingest.sinks.routes import Route, merged, routes
from millpond.ingest.sinks.search import MAX_RESULTS, Hit, plan_search
from millpond.values.spec import ModelSpec

if TYPE_CHECKING:
    from millpond.engine.engine import Engine


class CollectionSink(CollectionReader[NativeFilter], Generic[NativeFilter]):
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
        super().__init__(driver, dimensions=dimensions, fields=fields, hybrid=hybrid)
        self._failed_write: str | None = None  # of an embedded database, whose later writes would be lost
        self._prepared: CollectionSink[NativeFilter] | None = None  # the sink of the collection that prepare chose

    def prepare(
        self,
        spec: ModelSpec,
        *,
        sparse: ModelSpec | None = None,
        chunked: bool = False,
        context: str | None = None,
    ) -> None:
        """Create the collection, or check that it was created with this model, these widths and this field layout.

        Of a collection that exists a sink takes what it was not given: the widths, and the field layout.

        Args:
            spec: The model of the vectors.
            sparse: The model of a hybrid sink's sparse vectors; by default the same one.
            chunked: Whether records are cut into chunks.
            context: What the vectors of chunks know beside their own text, as in :class:`~millpond.ingest.Chunking`.

        Raises:
            UnsupportedTaskError: The sink is hybrid, and the model makes no sparse vectors.
            FingerprintMismatchError: The collection was built by another model, or not by millpond.
            InvalidRequestError: It has other widths or another field layout, or the model does not have these widths.
        """
        chosen = sparse_spec(spec, sparse) if self.hybrid else None
        own = CollectionManifest.of(
            spec,
            dimensions=self.dimensions,
            fields=self._fields or "plain",
            sparse=chosen,
            chunked=chunked,
            context=context,
        )

        def check(stored: CollectionManifest, own: CollectionManifest) -> None:
            stored.check_write(own, spec, collection=self.collection, sparse=chosen)

        form, self._read = (self.dimensions, self._fields), time.monotonic()
        self._manifest = create_or_check(self._connection, self._driver, own, form, check, skip=self._takes_no_part)
        self._prepared = self
        if self._takes_no_part(self._manifest):
            self._prepared = self._serving_alike()
            self._prepared.prepare(spec, sparse=sparse, chunked=chunked, context=context)

    def prepare_copy(self, source: CollectionManifest) -> None:
        """Create the collection for rows of another one, or check that it may take them, as :meth:`prepare` does.

        Args:
            source: The manifest of the other collection, of which a new one has what the sink was not given.

        Raises:
            FingerprintMismatchError: Another model filled this collection, or millpond did not make it.
            InvalidRequestError: It has a width that the other one lacks, or another form.
        """
        form, self._read = (self.dimensions, self._fields), time.monotonic()
        self._manifest = prepare_copy(
            self._connection, self._driver, source, form, sparse=self.hybrid, skip=self._takes_no_part
        )
        self._prepared = self
        if self._takes_no_part(self._manifest):
            self._prepared = self._serving_alike()
            self._prepared.prepare_copy(source)

    def _takes_no_part(self, stored: CollectionManifest) -> bool:
        """Whether another collection answers by this one's name."""
        succession = stored.succession
        return self.follows and succession is not None and succession.serving != self.collection

    def _serving_alike(self) -> Self:
        """The sink of the collection that answers by this one's name, with what was asked of this one."""
        sink = self.serving()
        sink.dimensions, sink._fields, sink.hybrid = self.dimensions, self._fields, self.hybrid
        return sink

    def create(self, manifest: CollectionManifest) -> None:
        """Create a collection with this manifest, unless it exists, and make it ready to be written to.

        Args:
            manifest: The manifest.

        Raises:
            SinkError: The database refuses.
        """
        self._read = time.monotonic()
        self._manifest = create_or_check(self._connection, self._driver, manifest, (None, None), lambda *_: None)
        self._prepared = self

    def drop(self) -> None:
        """Delete the collection itself, with all of its rows.

        Raises:
            SinkError: The database refuses, or this kind of sink cannot.
        """
        self._change(self._driver.drop, "deleting the collection")
        self._manifest = self._prepared = None

    def move_aliases(self, to: str, *, but: str) -> None:
        """Let the database's own aliases of this collection name another one: programs that read by them see either.

        Args:
            to: The other collection, in the same database.
            but: The alias that stays.

        Raises:
            SinkError: The database does not answer, or refuses.
        """
        self._connection.request("moving aliases", lambda: self._driver.move_aliases(to, but=but))

    def check(self, record: Record) -> None:
        """Raise InvalidRequestError for a record that no request could carry, or that the database cannot store.

        Args:
            record: The record.

        Raises:
            InvalidRequestError: The message says what is too large or not valid.
        """
        sink = self if self._prepared is None else self._prepared
        manifest = sink._manifest
        sink._driver.check(record, self.dimensions or () if manifest is None else manifest.dimensions)

    def write(self, batch: WriteBatch) -> None:
        """Upsert the rows, in requests that the database accepts, and wait until it has acknowledged them.

        Args:
            batch: Rows with a vector of each of the collection's widths.

        Raises:
            InvalidRequestError: The collection is not prepared, or has other widths.
            FingerprintMismatchError: It was migrated since it was prepared.
            SinkUnavailableError: It is being migrated, and takes no changes for some seconds.
            SinkError: The database runs in this process and failed in an earlier write.
        """
        if self._manifest is None:
            raise InvalidRequestError(f"collection {self.collection!r} is not prepared; call prepare(spec) first")
        sink = self._changed()
        if sink is not (self if self._prepared is None else self._prepared):
            raise FingerprintMismatchError(
                f"collection {self.collection!r} was migrated to {sink.open().model} ({sink.collection!r}) since this "
                "run began; run it again with that model: what was written before is there"
            )
        sink._write_here(batch)

    def _write_here(self, batch: WriteBatch) -> None:
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
        return self._changed()._delete_here(ids, filter)

    def _delete_here(self, ids: Sequence[str] | None, filter: Mapping[str, object] | NativeFilter | None) -> None:
        manifest = self.own()
        if ids is not None:
            own = [row_id for each in ids for row_id in self._driver.row_ids(each, manifest)]
            return self._delete_rows_here([*self.chunks_from(dict.fromkeys(ids, 1)), *own])
        native = self._driver.condition(filter, manifest)
        if native is None or not self._driver.has_condition(native):
            raise InvalidRequestError(f"filter={filter!r} has no condition and would delete every record")
        if (conditions := inexact(self._driver, filter)) is not None:
            return self._delete_rows_here(matching(self._driver, native, conditions, manifest))
        self._change(lambda: self._driver.delete(native, manifest), "a delete by filter")
        self._change(self._driver.flush)

    def delete_rows(self, row_ids: Sequence[Any]) -> None:
        """Delete rows by their own ids (those that do not exist are ignored), and wait for the acknowledgement.

        Args:
            row_ids: The ids that the rows have in the database.

        Raises:
            InvalidRequestError: The collection does not exist.
        """
        self._changed()._delete_rows_here(row_ids)

    def _delete_rows_here(self, row_ids: Sequence[Any]) -> None:
        manifest = self.own()
        for part in self._parts(row_ids):
            words = f"a delete of {len(part)} {self._connection.row}s"
            self._change(partial(self._driver.delete, part, manifest), words)
        self._change(self._driver.flush)

    def search(
        self,
        engine: Engine,
        question: str,
        *,
        k: int = 10,
        coarse_to_fine: bool | None = None,
        candidates: int | None = None,
        filter: Mapping[str, object] | NativeFilter | None = None,
        hybrid: bool = False,
        sparse_engine: Engine | None = None,
        expand: Expand | None = None,
    ) -> list[Hit]:
        """The records nearest to a question.

        Args:
            engine: The engine that filled the collection; it embeds the question with the role ``query``.
            question: One question.
            k: Most hits to return; fewer if fewer records match.
            coarse_to_fine: Find candidates by the smallest width and score them by the largest, or (``False``) search
                the largest width alone; by default the former, unless the database compares every row in this process
                (:attr:`exhaustive`), where the latter is faster.
            candidates: How many candidates, ``max(100, 10 * k)`` by default.
            filter: A dict that has for each metadata key a value, a list of which one must match, or a range like
                ``{"gte": 2020, "lt": 2024}``; or the database's own filter.
            hybrid: Fuse the ranking with that of the sparse vectors, by reciprocal rank.
            sparse_engine: The engine of the sparse vectors, by default ``engine``.
            expand: ``"parent"`` returns ``k`` documents in place of chunks, each once at the rank of its best chunk:
                with that chunk's score and metadata, and the text of all chunks joined by their characters, so that
                ``text[chunk_start:chunk_end]`` is the chunk. As many chunks as needed are fetched.

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
        check_expand(expand)
        limit = self._driver.max_results
        for name, value in (("k", k), ("candidates", candidates)):
            if limit is not None and isinstance(value, int) and value > limit:
                raise InvalidRequestError(f"{name}={value} is more than {self.database} hands out ({limit})")
        route, *others = routes(self, engine.spec)
        options: dict[str, Any] = {
            "coarse_to_fine": coarse_to_fine,
            "candidates": candidates,
            "filter": filter,
            "hybrid": hybrid,
            "sparse_engine": sparse_engine,
        }

        def found(asked: int) -> list[Hit]:
            own = candidates if asked == k or candidates is None else max(candidates, asked)
            search: Any = partial(self._search, engine, question, **{**options, "candidates": own})
            return merged(route, others[0], search, asked, own) if others else search(route, asked)

        if expand is None:
            return found(k)
        return with_parents(self, best_of_each(found, k, limit or MAX_RESULTS))

    def check_searches(self, spec: ModelSpec) -> None:
        """Raise unless a question of this model finds the collection's rows: it filled them, or a bridge leads there.

        Args:
            spec: The model.

        Raises:
            FingerprintMismatchError: It is another model, or has other settings.
        """
        routes(self, spec)

    def _search(
        self,
        engine: Engine,
        question: str,
        route: Route[CollectionSink[Any]],
        k: int,
        *,
        coarse_to_fine: bool | None,
        candidates: int | None,
        filter: Mapping[str, object] | NativeFilter | None,
        hybrid: bool,
        sparse_engine: Engine | None,
    ) -> list[Hit]:
        sink = route.sink
        manifest, driver = sink.own(), sink._driver
        sparse = None
        if hybrid and not driver.ranks_texts():
            sparse = engine if sparse_engine is None else sparse_engine
            check_engine(sparse)
            manifest.check_sparse(sparse.spec, collection=self.collection)
        asked = self.dimensions
        if sink is not self and not set(asked or ()) <= set(manifest.dimensions):
            asked = None  # the widths of the collection that was migrated
        plan = plan_search(
            engine,
            question,
            widths=manifest.widths_to_search(asked, collection=self.collection),
            k=k,
            coarse_to_fine=not driver.exhaustive if coarse_to_fine is None else coarse_to_fine,
            candidates=candidates,
            sparse_engine=sparse,
            hybrid=hybrid,
            mapping=route.mapping,
        )
        return find(driver, plan, driver.condition(filter, manifest), inexact(driver, filter), manifest)

    def _changed(self) -> Self:
        """The sink of the collection that takes changes by this name, as it is stored now."""
        sink = self.serving(fresh=True)
        succession = None if self._manifest is None or not self.follows else self._manifest.succession
        if succession is not None and succession.wait:
            raise SinkUnavailableError(
                f"collection {self.collection!r} is being migrated to another model, and takes no changes for at most "
                f"{succession.wait:.0f} s, until its last rows are copied",
                retry_after=min(succession.wait, 1.0),
            )
        return sink

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
        manifest = self.own()
        if self._failed_write is not None:
            raise SinkError(
                f"{self.database} at {self._connection.where} takes no more writes from this sink, since "
                f"one failed ({self._failed_write}) and what follows might be lost; close it, open it again and verify"
            )
        if tuple(sorted(batch.vectors)) != manifest.dimensions:
            raise InvalidRequestError(
                f"the batch holds the widths {sorted(batch.vectors)}, the collection {list(manifest.dimensions)}"
            )
        if (batch.sparse is not None) != self.hybrid:
            wanted = "with sparse vectors" if self.hybrid else "without sparse vectors"
            raise InvalidRequestError(f"the sink of collection {self.collection!r} takes batches {wanted}")

    def _change(self, change: Callable[[], None], words: str = "") -> None:
        """Make a change, as a request if it has words, and note its failure in an embedded database."""
        try:
            self._connection.request(words, change) if words else change()
        except BaseException as error:
            refused = isinstance(error, SinkRejectedError) or not isinstance(error, SinkError)  # before it was written
            if self.embedded and not (isinstance(error, MillpondError) and refused):
                self._failed_write = str(error) or repr(error)
            raise
