"""LateInteractionIndex: what indexes of token matrices have in common, in memory, on disk and in a database."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self, Unpack

from millpond.errors import InvalidRequestError
from millpond.late_interaction.encoding.token_pooling import pool_tokens, pooled_rows
from millpond.late_interaction.index.arguments import (
    Filter,
    SearchOptions,
    TokenEngine,
    check_matrices,
    check_queries,
    checked_engine,
    checked_filter,
    checked_metadata,
    checked_search,
    checked_strings,
    unit_rows,
)
from millpond.late_interaction.index.documents import AddReport, Documents, Hit, IndexStats, Search, StoredDocument
from millpond.late_interaction.index.row_encoding import RowEncoding
from millpond.late_interaction.scoring import explanation
from millpond.late_interaction.scoring.explanation import TokenMatch
from millpond.support.blank import is_blank
from millpond.support.filters import Condition
from millpond.support.metadata import check_str
from millpond.support.progress import draw_bar
from millpond.support.text_names import named
from millpond.values.fingerprint import ModelIdentity
from millpond.vectors.ragged import Ragged

CLOSED = "this index is closed; open it again"
# Documents stored at a time, and their characters or rows: float32 rows of all of them are in memory together.
_PIECE, _PIECE_CHARACTERS, _PIECE_ROWS = 512, 1 << 19, 1 << 17


class LateInteractionIndex(ABC):
    """Token matrices of documents under the caller's ids, searched by MaxSim.

    A subclass stores rows: it implements ``_upsert``, ``_delete``, ``_delete_matching``, ``_search``, ``_stored``,
    ``_ids``, ``__len__`` and ``stats``. It stores ``self._encoding.settings`` with the first rows, passes them to
    ``self._encoding.restore`` when it opens stored rows, and begins what it implements of the public methods with
    ``self._check_open()``. The base checks arguments, encodes texts, cuts and pools rows. Methods may be called from
    several threads.

    Args:
        engine: An engine that serves ``token_embed``; ``None`` for an index that is given embeddings only.
        dimensions: Columns to keep of every row; ``None`` keeps all, or those that the index was built with. A
            checkpoint trained for it (Matryoshka) is cut, other rows are projected to the principal directions (PCA) of
            those that are added first.
        pool_factor: Mean tokens of a document that become one row (hierarchical token pooling); 1 keeps every token.
            ``None`` is the factor that the index was built with, and 1 for a new one.

    Raises:
        TypeError: ``engine`` is not an engine.
        UnsupportedTaskError: The checkpoint has no token vectors.
        InvalidRequestError: ``dimensions`` or ``pool_factor`` is out of range.
    """

    def __init__(
        self, engine: TokenEngine | None, *, dimensions: int | None = None, pool_factor: int | None = None
    ) -> None:
        self._engine = checked_engine(engine)
        spec = None if self._engine is None else self._engine.spec
        self._encoding = RowEncoding(spec, dimensions=dimensions, pool_factor=pool_factor)
        self._closed = False

    @property
    def engine(self) -> TokenEngine | None:
        """The engine that encodes texts; ``None`` for an index that is given embeddings only."""
        return self._engine

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

        Returns:
            How many documents were added, replaced, left out as blank, and cut.

        Raises:
            TypeError: ``ids`` or ``texts`` is a bare str.
            InvalidRequestError: Lists of different lengths, or an id, text or metadata that cannot be stored.
            FingerprintMismatchError: The index was built by another model.
        """
        engine = self._required_engine("add")
        ids, texts = checked_strings("id", ids), checked_strings("text", texts)
        _check_lengths(ids, texts, of="texts")
        columns = (ids, texts, checked_metadata(metadata, len(ids)))
        last = {id: index for index, id in enumerate(ids)}  # its insertion order is that of first occurrences
        blank = [index for index in last.values() if is_blank(texts[index])]
        kept = [index for index in last.values() if not is_blank(texts[index])]
        added = replaced = truncated = 0
        with draw_bar(show=show_progress, total=len(kept), unit=" texts") as bar, self._adding():
            for piece in _pieces(kept, [len(text) for text in texts], _PIECE_CHARACTERS):
                with named([ids[index] for index in piece]):  # a warning of cut texts has their ids
                    output = engine.token_embed([texts[index] for index in piece], role="document", normalize=True)
                new = self._upsert(_documents(columns, piece, self._encoding.documents(output.embeddings)))
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

        Returns:
            How many documents were added and replaced.

        Raises:
            TypeError: ``embeddings`` is not a Ragged, or a list is a bare str.
            InvalidRequestError: Lists of different lengths, another width than the index has, or values that are not
                finite.
        """
        self._check_open()
        check_matrices("embeddings", embeddings)
        ids = checked_strings("id", ids)
        _check_lengths(ids, embeddings, of="embeddings")
        if texts is not None and (isinstance(texts, str | bytes) or len(texts) != len(ids)):
            raise InvalidRequestError(f"texts must be a list of {len(ids)} texts, one for each id")
        texts = [""] * len(ids) if texts is None else checked_strings("text", texts)
        columns = (ids, texts, checked_metadata(metadata, len(ids)))
        self._encoding.check("embeddings", embeddings)
        if len(embeddings.flat):
            self._encoding.decide(embeddings)  # a projection is fitted on all of them
        last = list({id: index for index, id in enumerate(ids)}.values())
        added = 0
        with self._adding():
            for piece in _pieces(last, embeddings.lengths.tolist(), _PIECE_ROWS):
                matrices = [embeddings[index] for index in piece]
                rows = Ragged.from_matrices(matrices, width=embeddings.flat.shape[1])
                unit = Ragged(flat=unit_rows(rows.flat), offsets=rows.offsets)
                added += self._upsert(_documents(columns, piece, self._encoding.documents(unit)))
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
            return self._delete(list(dict.fromkeys(checked_strings("id", ids))))
        conditions = checked_filter(filter)
        if not conditions:
            raise InvalidRequestError(f"filter={filter!r} has no condition and would delete every document")
        return self._delete_matching(conditions)

    # ------------------------------------------------------------------------------------------------------ search

    def search(self, queries: Sequence[str], **options: Unpack[SearchOptions]) -> list[list[Hit]]:
        """The documents that match each query best.

        Args:
            queries: A list of queries.
            options: ``k``, ``filter``, ``ids``, ``candidates`` and ``exact``:
                :class:`~millpond.late_interaction.SearchOptions`.

        Returns:
            For each query at most ``k`` hits, best first; of equal scores the document added earlier comes first.

        Raises:
            TypeError: ``queries`` is a bare str, or an option is unknown.
            InvalidRequestError: A blank query, or an argument out of range.
            FingerprintMismatchError: The index was built by another model.
        """
        engine = self._required_engine("search")
        check_queries(queries)
        search = checked_search(**options)
        if not len(queries):
            return []
        embeddings = engine.token_embed(list(queries), role="query", normalize=True).embeddings
        return self._search(self._encoding.queries(embeddings), search)

    async def asearch(self, queries: Sequence[str], **options: Unpack[SearchOptions]) -> list[list[Hit]]:
        """As :meth:`search`, in a thread, for an event loop.

        Args:
            queries: A list of queries.
            options: As :meth:`search`.

        Returns:
            For each query at most ``k`` hits, best first.

        Raises:
            TypeError: As :meth:`search`.
            InvalidRequestError: As :meth:`search`.
            FingerprintMismatchError: The index was built by another model.
        """
        return await asyncio.to_thread(self.search, queries, **options)

    def search_embeddings(self, queries: Ragged, **options: Unpack[SearchOptions]) -> list[list[Hit]]:
        """As :meth:`search`, for queries whose token matrices the caller has.

        Args:
            queries: Matrices ``[tokens_i, d]``; rows are L2-normalized. A query without rows has no hits.
            options: As :meth:`search`.

        Returns:
            For each query at most ``k`` hits, best first.

        Raises:
            TypeError: ``queries`` is not a Ragged, or an option is unknown.
            InvalidRequestError: Values that are not finite, rows of another width, or an option out of range.
        """
        self._check_open()
        check_matrices("queries", queries)
        search = checked_search(**options)
        self._encoding.check("queries", queries)
        if not len(queries.flat):
            return [[] for _ in queries]
        rows = Ragged(flat=unit_rows(queries.flat), offsets=queries.offsets)
        return self._search(self._encoding.queries(rows), search)

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
        projected = self._encoding.queries(native)  # cut, and not pooled
        factor = self._encoding.pool_factor or 1
        return explanation.explain(
            engine.token_spans([query], role="query")[0],
            self._encoding.queries(query_rows).flat,
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
        """A document as it was added.

        Args:
            id: Its id.

        Returns:
            Id, text and metadata; ``None`` if the index does not have it.

        Raises:
            InvalidRequestError: The index is closed.
        """
        self._check_open()
        stored = self._stored(id)
        return None if stored is None else StoredDocument(id=id, text=stored[0], metadata=stored[1])

    @property
    def model(self) -> ModelIdentity | None:
        """The model that computed the stored rows; ``None`` if they were added as embeddings, or there are none."""
        settings = self._encoding.settings
        return None if settings is None else settings.model

    def ids(self) -> list[str]:
        """The ids of all documents.

        Returns:
            A list, those added earlier first.

        Raises:
            InvalidRequestError: The index is closed.
        """
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

    def __exit__(self, *error: object) -> None:
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
    def _delete_matching(self, conditions: Mapping[str, Condition]) -> int:
        """Delete documents by metadata; returns how many there were."""

    @abstractmethod
    def _search(self, queries: Ragged, search: Search) -> list[list[Hit]]:
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


def _check_lengths(ids: Sequence[str], contents: Sequence[Any] | Ragged, *, of: str) -> None:
    if len(ids) != len(contents):
        raise InvalidRequestError(f"{len(ids)} ids for {len(contents)} {of}; pass one id for each")


def _documents(columns: Iterable[Sequence[Any]], piece: Sequence[int], embeddings: Ragged) -> Documents:
    """Some of the ids, texts and metadata, with their rows."""
    ids, texts, metadata = ([column[index] for index in piece] for column in columns)
    return Documents(ids=ids, texts=texts, metadata=metadata, embeddings=embeddings)


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
