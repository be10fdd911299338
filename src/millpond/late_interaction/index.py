"""LateInteractionIndex: what indexes of token matrices have in common, in memory, on disk and in a database."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from millpond.blank import is_blank
from millpond.errors import InvalidRequestError
from millpond.fingerprint import ModelIdentity
from millpond.late_interaction import explanation, projection
from millpond.late_interaction.documents import (
    AddReport,
    Documents,
    Hit,
    IndexStats,
    SearchOptions,
    StoredDocument,
)
from millpond.late_interaction.explanation import TokenMatch
from millpond.late_interaction.index_arguments import (
    Filter,
    check_count,
    check_matrices,
    check_queries,
    checked_engine,
    checked_filter,
    checked_ids,
    checked_metadata,
    checked_texts,
    unit_rows,
)
from millpond.late_interaction.index_arguments import TokenEngine as TokenEngine
from millpond.late_interaction.index_settings import IndexSettings
from millpond.late_interaction.projection import Projection
from millpond.late_interaction.token_pooling import pool_tokens, pooled_rows
from millpond.metadata import Scalar, check_str
from millpond.progress import draw_bar
from millpond.ragged import Ragged

CLOSED = "this index is closed; open it again"
# Documents stored at a time, and their characters or rows: float32 rows of all of them are in memory together.
_PIECE, _PIECE_CHARACTERS, _PIECE_ROWS = 512, 1 << 19, 1 << 17
# Rows that a projection is fitted on.
_SAMPLE_ROWS = 1 << 16


class LateInteractionIndex(ABC):
    """Token matrices of documents under the caller's ids, searched by MaxSim.

    A subclass stores rows: it implements ``_upsert``, ``_delete``, ``_delete_matching``, ``_search``, ``_stored``,
    ``_ids``, ``__len__`` and ``stats``. It stores :meth:`_settings` with the first rows, passes them to
    :meth:`_restore` when it opens stored rows, and begins what it implements of the public methods with
    ``self._check_open()``. The base checks arguments, encodes texts, cuts and pools rows. Methods may be called from
    several threads.

    Args:
        engine: An engine that serves ``token_embed``; ``None`` for an index that is given embeddings only.
        width: Columns to keep of every row; ``None`` keeps all, or those that the index was built with. A checkpoint
            trained for it (Matryoshka) is cut, other rows are projected to the principal directions (PCA) of those
            that are added first.
        pool_factor: Mean tokens of a document that become one row (hierarchical token pooling); 1 keeps every token.
            ``None`` is the factor that the index was built with, and 1 for a new one.

    Raises:
        TypeError: ``engine`` is not an engine.
        UnsupportedTaskError: The checkpoint has no token vectors.
        InvalidRequestError: ``width`` or ``pool_factor`` is out of range.
    """

    def __init__(self, engine: TokenEngine | None, *, width: int | None = None, pool_factor: int | None = None) -> None:
        self._engine = checked_engine(engine)
        check_count("width", width, optional=True)
        check_count("pool_factor", pool_factor, optional=True)
        self._width = width
        self._pool_factor = pool_factor
        self._closed = False
        self._rows: _RowFormat | None = None  # of the rows that were added first
        self._rows_lock = threading.Lock()

    # --------------------------------------------------------------------------------------------------- documents

    def add(
        self,
        ids: Sequence[str],
        texts: Sequence[str],
        metadata: Sequence[Mapping[str, Any] | None] | None = None,
        *,
        show_progress: bool = False,
    ) -> AddReport:
        """Encode and store documents; those whose id is in the index are replaced.

        Everything is checked before anything is stored. Texts are then encoded and stored in pieces: after an error
        (or Ctrl-C) the pieces before it are in the index, and adding all of them again is safe. Empty and blank texts
        are left out and counted, as ``ingest`` does.

        Args:
            ids: An id for each text. Of equal ids the last one counts.
            texts: The texts.
            metadata: A mapping for each text, stored as JSON; ``None`` for none.
            show_progress: Draw a bar in a terminal or notebook.

        Raises:
            TypeError: ``ids`` or ``texts`` is a bare str.
            InvalidRequestError: Lists of different lengths, or an id, text or metadata that cannot be stored.
            FingerprintMismatchError: The index was built by another model.
        """
        engine = self._required_engine("add")
        ids, texts = checked_ids(ids), checked_texts(texts)
        _check_lengths(ids, texts, of="texts")
        objects = checked_metadata(metadata, len(ids))
        last = {id: index for index, id in enumerate(ids)}  # its insertion order is that of first occurrences
        blank = [index for index in last.values() if is_blank(texts[index])]
        kept = [index for index in last.values() if not is_blank(texts[index])]
        added = replaced = truncated = 0
        with draw_bar(show=show_progress, total=len(kept), unit=" texts") as bar, self._adding():
            for piece in _pieces(kept, [len(text) for text in texts], _PIECE_CHARACTERS):
                output = engine.token_embed([texts[index] for index in piece], role="document", normalize=True)
                new = self._upsert(
                    Documents(
                        ids=[ids[index] for index in piece],
                        texts=[texts[index] for index in piece],
                        metadata=[objects[index] for index in piece],
                        embeddings=self._prepare_documents(output.embeddings),
                    )
                )
                added, replaced = added + new, replaced + len(piece) - new
                truncated += int(output.truncated.sum())
                bar.update(len(piece))
        if blank:
            self._delete([ids[index] for index in blank])
        return AddReport(added=added, replaced=replaced + len(ids) - len(last), blank=len(blank), truncated=truncated)

    def add_embeddings(
        self,
        ids: Sequence[str],
        embeddings: Ragged,
        *,
        texts: Sequence[str] | None = None,
        metadata: Sequence[Mapping[str, Any] | None] | None = None,
    ) -> AddReport:
        """Store documents whose token matrices the caller has; those whose id is in the index are replaced.

        Args:
            ids: An id for each matrix. Of equal ids the last one counts.
            embeddings: float ``[tokens_i, d]``; rows are L2-normalized. A document without rows is never found.
            texts: The texts, for hits and :meth:`explain`.
            metadata: As :meth:`add`.

        Raises:
            TypeError: ``embeddings`` is not a Ragged, or a list is a bare str.
            InvalidRequestError: Lists of different lengths, another width than the index has, or values that are not
                finite.
        """
        self._check_open()
        check_matrices("embeddings", embeddings)
        ids = checked_ids(ids)
        _check_lengths(ids, embeddings, of="embeddings")
        if texts is not None:
            if isinstance(texts, str | bytes) or len(texts) != len(ids):
                raise InvalidRequestError(f"texts must be a list of {len(ids)} texts, one for each id")
            texts = checked_texts(texts)
        objects = checked_metadata(metadata, len(ids))
        self._check_width("embeddings", embeddings)
        if len(embeddings.flat):
            self._rows_of(embeddings)  # a projection is fitted on all of them
        last = list({id: index for index, id in enumerate(ids)}.values())
        added = 0
        with self._adding():
            for piece in _pieces(last, embeddings.lengths.tolist(), _PIECE_ROWS):
                matrices = [embeddings[index] for index in piece]
                rows = Ragged.from_matrices(matrices, width=embeddings.flat.shape[1])
                added += self._upsert(
                    Documents(
                        ids=[ids[index] for index in piece],
                        texts=[texts[index] if texts is not None else "" for index in piece],
                        metadata=[objects[index] for index in piece],
                        embeddings=self._prepare_documents(Ragged(flat=unit_rows(rows.flat), offsets=rows.offsets)),
                    )
                )
        return AddReport(added=added, replaced=len(ids) - added)

    def delete(self, ids: Sequence[str] | None = None, *, filter: Filter | None = None) -> int:
        """Delete documents by id or by metadata.

        Args:
            ids: Ids; those that the index does not have are ignored.
            filter: What :meth:`search` takes, instead of ``ids``. It must have a condition.

        Returns:
            How many documents were deleted.

        Raises:
            TypeError: ``ids`` is a bare str.
            InvalidRequestError: Both or neither argument, or a filter without a condition.
        """
        self._check_open()
        if (ids is None) == (filter is None):
            raise InvalidRequestError("delete takes either ids or filter; pass one of them")
        if ids is not None:
            return self._delete(list(dict.fromkeys(checked_ids(ids))))
        conditions = checked_filter(filter)
        if not conditions:
            raise InvalidRequestError(f"filter={filter!r} has no condition and would delete every document")
        return self._delete_matching(conditions)

    # ------------------------------------------------------------------------------------------------------ search

    def search(
        self,
        queries: Sequence[str],
        *,
        k: int = 10,
        filter: Filter | None = None,
        ids: Sequence[str] | None = None,
        candidates: int | None = None,
        exact: bool = False,
    ) -> list[list[Hit]]:
        """The documents that match each query best.

        Args:
            queries: A list of queries.
            k: Most hits for each query; fewer if fewer documents match.
            filter: Metadata values that must match (of a list, one of them).
            ids: Search among these documents only: candidates of another search. Unknown ids are ignored.
            candidates: Documents that the first stage keeps for exact scoring; ``None`` is the index's own number.
            exact: Score every document that matches, without a first stage.

        Returns:
            For each query at most ``k`` hits, best first; of equal scores the document added earlier comes first.

        Raises:
            TypeError: ``queries`` is a bare str.
            InvalidRequestError: A blank query, or an argument out of range.
            FingerprintMismatchError: The index was built by another model.
        """
        engine = self._required_engine("search")
        check_queries(queries)
        search = self._checked_search(k=k, filter=filter, ids=ids, candidates=candidates, exact=exact)
        if not len(queries):
            return []
        embeddings = engine.token_embed(list(queries), role="query", normalize=True).embeddings
        return self._search(self._prepare_queries(embeddings), search)

    def check_search(
        self,
        queries: Sequence[str],
        *,
        k: int = 10,
        filter: Filter | None = None,
        ids: Sequence[str] | None = None,
        candidates: int | None = None,
        exact: bool = False,
    ) -> None:
        """Raise what :meth:`search` raises for invalid arguments, without encoding anything."""
        check_queries(queries)
        self._checked_search(k=k, filter=filter, ids=ids, candidates=candidates, exact=exact)

    async def asearch(
        self,
        queries: Sequence[str],
        *,
        k: int = 10,
        filter: Filter | None = None,
        ids: Sequence[str] | None = None,
        candidates: int | None = None,
        exact: bool = False,
    ) -> list[list[Hit]]:
        """As :meth:`search`, in a thread, for an event loop."""
        return await asyncio.to_thread(
            self.search, queries, k=k, filter=filter, ids=ids, candidates=candidates, exact=exact
        )

    def search_embeddings(
        self,
        queries: Ragged,
        *,
        k: int = 10,
        filter: Filter | None = None,
        ids: Sequence[str] | None = None,
        candidates: int | None = None,
        exact: bool = False,
    ) -> list[list[Hit]]:
        """As :meth:`search`, for queries whose token matrices ``[tokens_i, d]`` the caller has.

        Rows are L2-normalized. A query without rows has no hits.
        """
        self._check_open()
        check_matrices("queries", queries)
        search = self._checked_search(k=k, filter=filter, ids=ids, candidates=candidates, exact=exact)
        self._check_width("queries", queries)
        if not len(queries.flat):
            return [[] for _ in queries]
        rows = Ragged(flat=unit_rows(queries.flat), offsets=queries.offsets)
        return self._search(self._prepare_queries(rows), search)

    def explain(self, query: str, id: str) -> list[TokenMatch]:
        """Where each token of a query finds its best match in a document.

        Query and document are encoded again. Their similarities are those of float32 rows, so that they add up to the
        score of a hit only about as exactly as the index stores rows.

        Args:
            query: A query, as :meth:`search` takes several.
            id: The id of a document that was added with its text.

        Returns:
            A :class:`~millpond.late_interaction.TokenMatch` for each token of the query, special tokens included.

        Raises:
            TypeError: ``query`` is not a str.
            InvalidRequestError: The query is blank, the index has no engine or no such document, or the document was
                added without its text.
        """
        engine = self._required_engine("explain")
        if not isinstance(query, str):
            raise TypeError(f"explain takes one query, a str, not a {type(query).__name__}")
        check_queries([query])
        check_str("the id", id)
        stored = self._stored(id)
        if stored is None:
            raise InvalidRequestError(f"the index has no document of id {id!r}; take the id of a hit")
        text = stored[0]
        if is_blank(text):
            raise InvalidRequestError(
                f"the document {id!r} was added without its text, which has the matches; pass texts= to add_embeddings"
            )
        query_rows = engine.token_embed([query], role="query", normalize=True).embeddings
        native = engine.token_embed([text], role="document", normalize=True).embeddings
        projected = self._prepare_queries(native)  # cut, and not pooled
        factor = self._pool_factor or 1
        return explanation.explain(
            engine.token_spans([query], role="query")[0],
            self._prepare_queries(query_rows).flat,
            engine.token_spans([text], role="document")[0],
            projected.flat,
            text,
            pooled=None if factor == 1 else (pool_tokens(projected, factor).flat, pooled_rows(projected, factor)[0]),
        )

    # ------------------------------------------------------------------------------------------------- maintenance

    def compact(self) -> None:
        """Give back the space of deleted documents; nothing to do by default."""
        self._check_open()

    def check(self) -> list[str]:
        """What is wrong with the stored data, in words that name the file; empty if nothing is."""
        self._check_open()
        return []

    @abstractmethod
    def stats(self) -> IndexStats:
        """The size of the index."""

    @abstractmethod
    def __len__(self) -> int:
        """The number of documents."""

    def get(self, id: str) -> StoredDocument | None:
        """A document as it was added; ``None`` if the index does not have it."""
        self._check_open()
        stored = self._stored(id)
        return None if stored is None else StoredDocument(id=id, text=stored[0], metadata=stored[1])

    @property
    def model(self) -> ModelIdentity | None:
        """The model that computed the stored rows; ``None`` if they were added as embeddings, or there are none."""
        settings = self._settings()
        return None if settings is None else settings.model

    def ids(self) -> list[str]:
        """The ids of all documents, those added earlier first."""
        self._check_open()
        return self._ids()

    def __contains__(self, id: object) -> bool:
        """Whether the index has a document of this id."""
        self._check_open()
        return isinstance(id, str) and self._stored(id) is not None

    def close(self) -> None:
        """Release rows, files and connections; the engine stays open. Every later call raises InvalidRequestError."""
        self._closed = True

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --------------------------------------------------------------------------------- implemented by each index

    @contextmanager
    def _adding(self) -> Iterator[None]:
        """Around the pieces of one ``add``: an index may commit several of them together, the last when this ends.

        Also after an error the pieces before it are to be stored.
        """
        yield

    @abstractmethod
    def _upsert(self, documents: Documents) -> int:
        """Store documents, replacing those of equal ids; returns how many ids were new. All or none is stored."""

    @abstractmethod
    def _delete(self, ids: Sequence[str]) -> int:
        """Delete documents by distinct ids; returns how many there were."""

    @abstractmethod
    def _delete_matching(self, conditions: Mapping[str, Sequence[Scalar]]) -> int:
        """Delete documents by metadata; returns how many there were."""

    @abstractmethod
    def _search(self, queries: Ragged, search: SearchOptions) -> list[list[Hit]]:
        """Search for float32 query matrices of the index's width (of any width while the index is empty)."""

    @abstractmethod
    def _stored(self, id: str) -> tuple[str, Mapping[str, Any]] | None:
        """Text and metadata of a document."""

    @abstractmethod
    def _ids(self) -> list[str]:
        """The ids of all documents."""

    # ----------------------------------------------------------------------------------------------------------

    def _required_engine(self, method: str) -> TokenEngine:
        self._check_open()
        if self._engine is None:
            instead = "" if method == "explain" else f"use {method}_embeddings, or "
            raise InvalidRequestError(
                f"this index has no engine to encode texts; {instead}pass an engine when opening it"
            )
        return self._engine

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidRequestError(CLOSED)

    def _settings(self) -> IndexSettings | None:
        """How rows are made, to store with them; ``None`` as long as no row was added. It never changes after that."""
        rows = self._rows
        if rows is None:
            return None
        model = rows.model if self._engine is None or rows.restored else ModelIdentity.of(self._engine.spec)
        return IndexSettings(
            model=model, native=rows.native, pool_factor=self._pool_factor or 1, projection=rows.projection
        )

    def _restore(self, settings: IndexSettings, *, owner: str) -> None:
        """Take the settings that rows were stored with.

        Args:
            settings: What :meth:`_settings` returned.
            owner: The index in error messages, as ``index '/data/docs'``.

        Raises:
            FingerprintMismatchError: The engine has another model.
            InvalidRequestError: The index was opened with another width or pool_factor.
        """
        spec = None if self._engine is None else self._engine.spec
        settings.check(spec, width=self._width, pool_factor=self._pool_factor, owner=owner)
        self._width, self._pool_factor = settings.width, settings.pool_factor
        self._rows = _RowFormat(
            native=settings.native, projection=settings.projection, model=settings.model, restored=True
        )

    def _prepare_documents(self, embeddings: Ragged) -> Ragged:
        """Rows of length 1 as they are stored: cut to the width, then pooled."""
        if not len(embeddings.flat):
            return Ragged(flat=embeddings.flat[:, : self._width], offsets=embeddings.offsets)
        projection = self._rows_of(embeddings).projection
        rows = embeddings if projection is None else projection.apply(embeddings)
        return pool_tokens(rows, self._pool_factor or 1)

    def _prepare_queries(self, embeddings: Ragged) -> Ragged:
        """Rows of length 1 as they are compared: cut to the width, never pooled."""
        rows = self._rows
        return embeddings if rows is None or rows.projection is None else rows.projection.apply(embeddings)

    def _check_width(self, name: str, matrices: Ragged) -> None:
        """Refuse rows that are not as wide as those of the index (of an empty one: of its engine)."""
        width, rows = matrices.flat.shape[1], self._rows
        native, of = (
            (rows.native, "the rows of this index")
            if rows is not None
            else (None, "")
            if self._engine is None
            else (self._engine.spec.hidden_size, f"the token vectors of {self._engine.spec.name}")
        )
        if native is not None and len(matrices.flat) and width != native:
            raise InvalidRequestError(f"{name} are {width} wide, and {of} {native}; pass rows of that width")

    def _rows_of(self, first: Ragged) -> _RowFormat:
        """The format of the rows; decided by the first rows that are added, which a projection is fitted on."""
        with self._rows_lock:
            if self._rows is None:
                native = first.flat.shape[1]
                if self._width is not None and self._width > native:
                    raise InvalidRequestError(
                        f"width={self._width} is more than the rows have ({native}); choose 1 to {native}"
                    )
                self._rows = _RowFormat(native=native, projection=self._fitted(first))
            rows = self._rows
        if first.flat.shape[1] != rows.native:  # another thread or process added the first rows meanwhile
            self._check_width("embeddings", first)
        return rows

    def _fitted(self, sample: Ragged) -> Projection | None:
        width, native = self._width, sample.flat.shape[1]
        if width is None or width == native:
            return None
        if self._engine is not None and projection.is_trained(self._engine.spec, width):
            return Projection.matryoshka(native, width)
        every = -(-len(sample.flat) // _SAMPLE_ROWS)
        return Projection.fit(unit_rows(sample.flat[::every]), width)

    def _checked_search(
        self,
        *,
        k: int,
        filter: Filter | None,
        ids: Sequence[str] | None,
        candidates: int | None,
        exact: bool,
    ) -> SearchOptions:
        check_count("k", k)
        if candidates is not None and (type(candidates) is not int or candidates < k):
            raise InvalidRequestError(
                f"candidates={candidates!r} must be an int from k={k}; leave it out for the index's own number"
            )
        if not isinstance(exact, bool):
            raise InvalidRequestError(f"exact={exact!r} must be True or False")
        return SearchOptions(
            k=k,
            conditions=checked_filter(filter),
            ids=None if ids is None else list(dict.fromkeys(checked_ids(ids))),
            candidates=candidates,
            exact=exact,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class _RowFormat:
    """How the rows of an index are made of a model's rows.

    Attributes:
        native: Columns of the model's rows.
        projection: The map to the index's width; ``None`` if it is the model's.
        model: The model that the index was stored with, if it was.
        restored: Whether it was stored.
    """

    native: int
    projection: Projection | None
    model: ModelIdentity | None = None
    restored: bool = False

    @property
    def width(self) -> int:
        """Columns of a stored row."""
        return self.native if self.projection is None else self.projection.width


def _check_lengths(ids: Sequence[str], contents: Sequence[Any] | Ragged, *, of: str) -> None:
    if len(ids) != len(contents):
        raise InvalidRequestError(f"{len(ids)} ids for {len(contents)} {of}; pass one id for each")


def _pieces(indices: Sequence[int], sizes: Sequence[int], most: int) -> Iterator[list[int]]:
    """The indices in order, in lists whose sizes add up to ``most`` at most, unless it is a single one."""
    piece: list[int] = []
    total = 0
    for index in indices:
        if piece and (len(piece) == _PIECE or total + sizes[index] > most):
            yield piece
            piece, total = [], 0
        piece.append(index)
        total += sizes[index]
    if piece:
        yield piece
