"""LateInteractionIndex: what indexes of token matrices have in common, in memory, on disk and in a database."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np

from millpond.blank import is_blank
from millpond.errors import InvalidRequestError
from millpond.fingerprint import ModelIdentity
from millpond.metadata import Scalar, check_filter, check_str, describe, json_object
from millpond.outputs import TokenEmbeddingOutput
from millpond.progress import draw_bar
from millpond.ragged import Ragged
from millpond.spec import ModelSpec
from millpond.tasks import Role

Filter = Mapping[str, object]

# Texts encoded at a time: their float32 rows are in memory together, about 100 KiB a text at 128 dimensions.
_PIECE = 512


class TokenEngine(Protocol):
    """The part of :class:`millpond.Engine` that an index needs."""

    @property
    def spec(self) -> ModelSpec:
        """The description of the checkpoint."""
        ...

    def token_embed(
        self, texts: Sequence[str], *, role: Role | None = None, normalize: bool | None = None
    ) -> TokenEmbeddingOutput:
        """As :meth:`millpond.Engine.token_embed`."""
        ...


@dataclass(frozen=True, kw_only=True)
class Hit:
    """One result of a search.

    Attributes:
        id: The caller's id of the document.
        score: MaxSim: the sum over the query's tokens of the best similarity to one of the document's.
        exact: Whether the score was computed from the stored rows themselves (int8, bfloat16 or float32); ``False`` if
            from residual codes of 2 or 4 bits.
        text: The document's text; ``""`` if it was added as embeddings without one.
        metadata: The document's metadata.
    """

    id: str
    score: float
    exact: bool
    text: str
    metadata: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class AddReport:
    """What ``add`` did.

    Attributes:
        added: Documents whose id was new.
        replaced: Documents whose id the index had, or that came earlier in the same call.
        blank: Documents left out since their text is empty or blank; an older document of the same id was deleted.
        truncated: Documents that were longer than the model reads, and were cut.
    """

    added: int = 0
    replaced: int = 0
    blank: int = 0
    truncated: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Documents:
    """Documents ready to be stored; every id occurs once.

    Attributes:
        ids: Their ids.
        texts: Their texts; ``""`` where there is none.
        metadata: Their metadata as JSON objects.
        embeddings: float32 ``[tokens_i, width]`` rows of length 1, pooled and cut to the index's width.
    """

    ids: Sequence[str]
    texts: Sequence[str]
    metadata: Sequence[Mapping[str, Any]]
    embeddings: Ragged

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, kw_only=True)
class StoredDocument:
    """A document of an index.

    Attributes:
        id: Its id.
        text: Its text; ``""`` if it was added as embeddings without one.
        metadata: Its metadata as a JSON object.
    """

    id: str
    text: str
    metadata: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class IndexStats:
    """The size of an index.

    Attributes:
        documents: Documents that a search can find.
        tokens: Their token rows.
        width: Columns of a row; 0 as long as nothing was added.
        codec: How rows are stored.
        bytes: Bytes of the rows, codes and tables, without texts and metadata.
        details: What only this kind of index has: segments, deleted documents and so on.
    """

    documents: int
    tokens: int
    width: int
    codec: str
    bytes: int
    details: Mapping[str, Any] = field(default_factory=dict, hash=False)


class LateInteractionIndex(ABC):
    """Token matrices of documents under the caller's ids, searched by MaxSim.

    A subclass stores rows: it implements ``_upsert``, ``_delete``, ``_search``, ``_stored``, ``__len__`` and ``stats``.
    The base checks arguments, encodes texts, cuts and pools rows. Methods may be called from several threads.

    Args:
        engine: An engine that serves ``token_embed``; ``None`` for an index that is given embeddings only.
        width: Columns to keep of every row; ``None`` keeps all.
        pool_factor: Mean tokens of a document that become one row (hierarchical token pooling); 1 keeps every token.

    Raises:
        TypeError: ``engine`` is not an engine.
        UnsupportedTaskError: The checkpoint has no token vectors.
        InvalidRequestError: ``width`` or ``pool_factor`` is out of range.
    """

    def __init__(self, engine: TokenEngine | None, *, width: int | None = None, pool_factor: int = 1) -> None:
        self._engine = _checked_engine(engine)
        for name, value in (("width", width), ("pool_factor", pool_factor)):
            if value is not None and (type(value) is not int or value < 1):
                raise InvalidRequestError(f"{name}={value!r} must be an int from 1")
        self._width = width
        self._pool_factor = pool_factor

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
        ids, objects = _checked_documents(ids, texts, metadata, of="texts")
        for index, text in enumerate(texts):
            check_str(f"the text at index {index}", text)
        last = {id: index for index, id in enumerate(ids)}  # its insertion order is that of first occurrences
        blank = [index for index in last.values() if is_blank(texts[index])]
        kept = [index for index in last.values() if not is_blank(texts[index])]
        added = replaced = truncated = 0
        with draw_bar(show=show_progress, total=len(kept), unit=" texts") as bar:
            for start in range(0, len(kept), _PIECE):
                piece = kept[start : start + _PIECE]
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
        if not isinstance(embeddings, Ragged):
            raise TypeError(
                f"embeddings are of type {type(embeddings).__name__}; pass a Ragged, as token_embed(...).embeddings is "
                "(or build one with Ragged.from_matrices)"
            )
        ids, objects = _checked_documents(ids, embeddings, metadata, of="embeddings")
        if texts is not None:
            if isinstance(texts, str) or len(texts) != len(ids):
                raise InvalidRequestError(f"texts must be a list of {len(ids)} texts, one for each id")
            for index, text in enumerate(texts):
                check_str(f"the text at index {index}", text)
        _check_finite("embeddings", embeddings)
        last = list({id: index for index, id in enumerate(ids)}.values())
        added = 0
        for start in range(0, len(last), _PIECE):
            piece = last[start : start + _PIECE]
            matrices = [embeddings[index] for index in piece]
            rows = Ragged.from_matrices(matrices, width=embeddings.flat.shape[1])
            added += self._upsert(
                Documents(
                    ids=[ids[index] for index in piece],
                    texts=[texts[index] if texts is not None else "" for index in piece],
                    metadata=[objects[index] for index in piece],
                    embeddings=self._prepare_documents(_normalized(rows)),
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
        if (ids is None) == (filter is None):
            raise InvalidRequestError("delete takes either ids or filter; pass one of them")
        if ids is not None:
            return self._delete(list(dict.fromkeys(_checked_ids(ids))))
        conditions = _checked_filter(filter)
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
        _check_queries(queries)
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
        _check_queries(queries)
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
        if not isinstance(queries, Ragged):
            raise TypeError(f"queries are of type {type(queries).__name__}; pass a Ragged of token matrices")
        search = self._checked_search(k=k, filter=filter, ids=ids, candidates=candidates, exact=exact)
        _check_finite("queries", queries)
        return self._search(self._prepare_queries(_normalized(queries)), search) if len(queries) else []

    # ------------------------------------------------------------------------------------------------- maintenance

    def compact(self) -> None:  # noqa: B027 - an index without anything to give back has nothing to override
        """Give back the space of deleted documents; nothing to do by default."""

    def check(self) -> list[str]:
        """What is wrong with the stored data, in words that name the file; empty if nothing is."""
        return []

    @abstractmethod
    def stats(self) -> IndexStats:
        """The size of the index."""

    @abstractmethod
    def __len__(self) -> int:
        """The number of documents."""

    def get(self, id: str) -> StoredDocument | None:
        """A document as it was added; ``None`` if the index does not have it."""
        stored = self._stored(id)
        return None if stored is None else StoredDocument(id=id, text=stored[0], metadata=stored[1])

    def __contains__(self, id: object) -> bool:
        """Whether the index has a document of this id."""
        return isinstance(id, str) and self._stored(id) is not None

    def close(self) -> None:  # noqa: B027 - nor one without files
        """Release files and connections; the engine stays open."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --------------------------------------------------------------------------------- implemented by each index

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

    # ----------------------------------------------------------------------------------------------------------

    def _required_engine(self, method: str) -> TokenEngine:
        if self._engine is None:
            raise InvalidRequestError(
                f"this index has no engine to encode texts; use {method}_embeddings, or pass an engine when opening it"
            )
        return self._engine

    def _identity(self) -> ModelIdentity | None:
        """The identity of the engine's model, to store with the index; ``None`` without an engine."""
        return None if self._engine is None else ModelIdentity.of(self._engine.spec)

    def _prepare_documents(self, embeddings: Ragged) -> Ragged:
        """Rows of length 1 as they are stored: cut to the width, pooled."""
        return embeddings

    def _prepare_queries(self, embeddings: Ragged) -> Ragged:
        """Rows of length 1 as they are compared: cut to the width."""
        return embeddings

    def _checked_search(
        self,
        *,
        k: int,
        filter: Filter | None,
        ids: Sequence[str] | None,
        candidates: int | None,
        exact: bool,
    ) -> SearchOptions:
        if type(k) is not int or k < 1:
            raise InvalidRequestError(f"k={k!r} must be an int from 1")
        if candidates is not None and (type(candidates) is not int or candidates < k):
            raise InvalidRequestError(
                f"candidates={candidates!r} must be an int from k={k}; leave it out for the index's own number"
            )
        if not isinstance(exact, bool):
            raise InvalidRequestError(f"exact={exact!r} must be True or False")
        return SearchOptions(
            k=k,
            conditions=_checked_filter(filter),
            ids=None if ids is None else list(dict.fromkeys(_checked_ids(ids))),
            candidates=candidates,
            exact=exact,
        )


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """The checked options of a search.

    Attributes:
        k: Most hits for each query.
        conditions: For each metadata key its accepted values; empty for no filter.
        ids: Distinct ids of the only documents to search; ``None`` for all.
        candidates: Documents to keep for exact scoring; ``None`` for the index's own number.
        exact: Score every document that matches.
    """

    k: int
    conditions: Mapping[str, tuple[Scalar, ...]]
    ids: Sequence[str] | None = None
    candidates: int | None = None
    exact: bool = False


def _checked_engine(engine: TokenEngine | None) -> TokenEngine | None:
    if engine is None:
        return None
    inner = getattr(engine, "engine", engine)  # an AsyncEngine has its engine there
    if not hasattr(inner, "spec") or not hasattr(inner, "token_embed"):
        raise TypeError(
            f"engine is of type {type(engine).__name__}; pass a millpond.Engine (Engine('model') makes one), "
            "or None for an index that is given embeddings only"
        )
    checked: TokenEngine = inner
    if "token_embed" not in checked.spec.tasks:
        from millpond.errors import UnsupportedTaskError

        raise UnsupportedTaskError(
            f"{checked.spec.name} has no token vectors (it serves {', '.join(sorted(checked.spec.tasks))}); "
            "use an embedder or a ColBERT checkpoint"
        )
    return checked


def _check_queries(queries: Sequence[str]) -> None:
    if isinstance(queries, str | bytes) or not isinstance(queries, Sequence):
        raise TypeError(f"queries is of type {type(queries).__name__}; pass a list of str")
    for index, query in enumerate(queries):
        check_str(f"the query at index {index}", query)
        if is_blank(query):
            raise InvalidRequestError(f"the query at index {index} is blank; leave it out")


def _checked_ids(ids: Sequence[str]) -> list[str]:
    if isinstance(ids, str | bytes):
        raise TypeError(f"ids={ids!r} is one str; pass a list of ids")
    checked = list(ids)
    for index, id in enumerate(checked):
        check_str(f"the id at index {index}", id)
        if not id:
            raise InvalidRequestError(f"the id at index {index} is empty; every document needs one")
    return checked


def _checked_documents(
    ids: Sequence[str],
    contents: Sequence[Any] | Ragged,
    metadata: Sequence[Mapping[str, Any] | None] | None,
    *,
    of: str,
) -> tuple[list[str], list[dict[str, Any]]]:
    """The ids, and the metadata as JSON objects of their own."""
    if isinstance(contents, str | bytes):
        raise TypeError(f"{of} is one {type(contents).__name__}; pass a list")
    checked = _checked_ids(ids)
    if len(checked) != len(contents):
        raise InvalidRequestError(f"{len(checked)} ids for {len(contents)} {of}; pass one id for each")
    if metadata is None:
        return checked, [{} for _ in checked]
    if isinstance(metadata, Mapping) or len(metadata) != len(checked):
        raise InvalidRequestError(f"metadata must be a list of {len(checked)} mappings, one for each id")
    objects = []
    for index, item in enumerate(metadata):
        if item is not None and not isinstance(item, Mapping):
            raise InvalidRequestError(f"metadata[{index}] is {describe(item)}; it must be a mapping or None")
        objects.append(json_object(f"metadata[{index}]", item) if item is not None else {})
    return checked, objects


def _checked_filter(filter: Filter | None) -> dict[str, tuple[Scalar, ...]]:
    if filter is None:
        return {}
    if not isinstance(filter, Mapping):
        raise InvalidRequestError(f"filter is of type {type(filter).__name__}; pass a dict of metadata values")
    return check_filter(filter)


def _check_finite(name: str, matrices: Ragged) -> None:
    if matrices.flat.dtype.kind != "f":
        raise InvalidRequestError(f"{name} hold {matrices.flat.dtype}; pass floats")
    finite = np.isfinite(matrices.flat).all(axis=1)  # [tokens]
    if not finite.all():
        index = int(np.searchsorted(matrices.offsets, int(np.argmin(finite)), side="right")) - 1
        raise InvalidRequestError(f"the matrix at index {index} of {name} holds NaN or infinity; leave it out")


def _normalized(rows: Ragged) -> Ragged:
    """Float32 rows of length 1; a row of zeros stays one."""
    flat = rows.flat.astype(np.float32)
    flat /= np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), np.finfo(np.float32).tiny)
    return Ragged(flat=flat, offsets=rows.offsets)
