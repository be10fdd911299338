"""MemoryIndex: token matrices in this process."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import numpy.typing as npt
import torch

from millpond.errors import InvalidRequestError
from millpond.late_interaction.codecs.rows import MEMORY_CODECS, MemoryCodec, codec_of
from millpond.late_interaction.index.arguments import TokenEngine, check_count
from millpond.late_interaction.index.base import CLOSED, LateInteractionIndex
from millpond.late_interaction.index.documents import SEARCH_TURNS, Documents, Hit, IndexStats, Search
from millpond.late_interaction.kernels.centroids import similarities
from millpond.late_interaction.kernels.compiled import thread_count
from millpond.late_interaction.kernels.exact import score, score_on_device
from millpond.late_interaction.kernels.scan import Codes, candidates_of, table
from millpond.late_interaction.memory.blocks import IndexArray, View
from millpond.late_interaction.memory.files import read_index, write_index
from millpond.late_interaction.memory.store import Snapshot, TokenStore
from millpond.metadata import Scalar
from millpond.vectors.ragged import Ragged

# Documents that the codes keep for exact scoring: so many, or so many for each hit.
_CANDIDATES, _CANDIDATES_PER_HIT = 1_024, 20
# Scores computed before the best are taken: 64 MiB of float32.
_SCORES = 1 << 24


class MemoryIndex(LateInteractionIndex):
    """Token matrices in memory, compared exactly.

    From 20,000 documents on, a call of ``add`` also trains centroids, and a search scans their codes (2 bytes a token)
    for the ``max(1024, 20 k)`` documents that it compares exactly; ``exact=True`` compares all. Training takes seconds
    to minutes, at 20,000 documents and again each time there are four times as many tokens; searches go on meanwhile.

    A search sees the documents of one moment, and never waits for a writer.

    Args:
        engine: As :class:`LateInteractionIndex`.
        codec: How rows are stored: ``"int8"`` (a float16 scale for each row), ``"bfloat16"`` or ``"float32"``.
        dimensions: As :class:`LateInteractionIndex`.
        pool_factor: As :class:`LateInteractionIndex`.
        device: Where rows are stored and compared: ``"cpu"``, or a GPU as torch names it, where all are compared.
        threads: Most threads of a search on the CPU; ``None`` is as many as torch uses.

    Raises:
        InvalidRequestError: Besides those of :class:`LateInteractionIndex`, an unknown codec or device.
    """

    def __init__(
        self,
        engine: TokenEngine | None,
        codec: MemoryCodec = "int8",
        *,
        dimensions: int | None = None,
        pool_factor: int | None = None,
        device: str = "cpu",
        threads: int | None = None,
    ) -> None:
        super().__init__(engine, dimensions=dimensions, pool_factor=pool_factor)
        check_count("threads", threads, optional=True)
        self._open_store: TokenStore | None = TokenStore(codec_of(codec, MEMORY_CODECS), _device(device), threads)

    def stats(self) -> IndexStats:
        """The size of the index; ``details`` has its blocks of memory, deleted documents and centroids."""
        store = self._store
        snapshot = store.snapshot
        views, centroids = snapshot.views, snapshot.centroids
        return IndexStats(
            documents=snapshot.documents,
            tokens=snapshot.tokens,
            dimensions=0 if self._encoding.settings is None else self._encoding.settings.width,
            codec=store.codec.name,
            bytes=sum(view.bytes for view in views) + (0 if centroids is None else centroids.rows.nbytes),
            details={
                "blocks": len(views),
                "deleted": sum(view.documents - view.live_documents for view in views),
                "centroids": 0 if centroids is None else len(centroids),
                "device": str(store.device),
            },
        )

    def __len__(self) -> int:
        """The number of documents."""
        return self._store.snapshot.documents

    def compact(self) -> None:
        """Give back the memory of deleted documents; done without a call when a fifth is deleted."""
        self._store.compact()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the index to a folder, in place of the index that may be there.

        The folder has the index as it was before or as it is now, whenever it is read and if the process is killed.
        Other threads may search and change the index meanwhile: what is saved are the documents of one moment.

        Args:
            path: A folder that has a saved index, is empty or does not exist.

        Raises:
            InvalidRequestError: The path is a file or a folder with other files.
            OSError: The files cannot be written.
        """
        store = self._store
        made = self._encoding.settings
        options = {"dimensions": self._encoding.dimensions, "pool_factor": self._encoding.pool_factor}
        write_index(Path(path), store.snapshot, store.codec, made, **options)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        engine: TokenEngine | None,
        *,
        dimensions: int | None = None,
        pool_factor: int | None = None,
        device: str = "cpu",
        threads: int | None = None,
    ) -> Self:
        """Read an index that :meth:`save` wrote. Changes of it are not written before it is saved again.

        Args:
            path: The folder.
            engine: An engine of the model that the index was built with; ``None`` if it is given embeddings only.
            dimensions: The index's columns, if they are to be checked.
            pool_factor: The index's pool factor, if it is to be checked.
            device: As :class:`MemoryIndex`; it need not be that of the index that was saved.
            threads: As :class:`MemoryIndex`.

        Raises:
            SourceNotFoundError: There is no saved index.
            FingerprintMismatchError: It was built by another model, or with other settings of it.
            InvalidRequestError: It has other dimensions or another pool factor.
            IndexCorruptedError: A file of it is damaged; the message names the file.
        """
        stored = read_index(Path(path))
        options = {"dimensions": dimensions, "pool_factor": pool_factor}
        if stored.settings is None:  # of no rows: the options that were not named are its own
            options = {"dimensions": dimensions or stored.dimensions, "pool_factor": pool_factor or stored.pool_factor}
        index = cls(engine, cast("MemoryCodec", stored.codec.name), **options, device=device, threads=threads)
        if stored.settings is not None:
            index._encoding.restore(stored.settings, owner=f"index {str(path)!r}")
        index._store.load(stored.batches, stored.tokens, stored.centroids, stored.trained_tokens)
        return index

    def close(self) -> None:
        """Release the rows."""
        super().close()
        self._open_store = None

    # -------------------------------------------------------------------------------------- what the base leaves open

    @property
    def _store(self) -> TokenStore:
        store = self._open_store
        if store is None:
            raise InvalidRequestError(CLOSED)
        return store

    def _upsert(self, documents: Documents) -> int:
        return self._store.upsert(documents.ids, documents.texts, documents.metadata, documents.embeddings)

    @contextmanager
    def _adding(self) -> Iterator[None]:
        yield
        self._store.train()

    def _delete(self, ids: Sequence[str]) -> int:
        return self._store.delete(ids)

    def _delete_matching(self, conditions: Mapping[str, Sequence[Scalar]]) -> int:
        return self._store.delete_matching(conditions)

    def _stored(self, id: str) -> tuple[str, Mapping[str, Any]] | None:
        stored = self._store.document(id)
        return None if stored is None else (stored[0], copy.deepcopy(stored[1]))

    def _ids(self) -> list[str]:
        return self._store.snapshot.ids()

    def _search(self, queries: Ragged, search: Search) -> list[list[Hit]]:
        snapshot, numbers = (self._store.snapshot, None) if search.ids is None else self._store.lookup(search.ids)
        selections = [_Selection.of(view, search, numbers) for view in snapshot.views]
        selections = [selection for selection in selections if len(selection)]
        if not selections:
            return [[] for _ in queries]
        keep = search.candidates or max(_CANDIDATES, _CANDIDATES_PER_HIT * search.k)
        if snapshot.centroids is None or search.exact or sum(map(len, selections)) <= keep:
            return self._search_all(queries, selections, search.k)
        results = []
        for query in queries:
            with SEARCH_TURNS.turn(thread_count(self._store.threads)) as threads:
                results.append(
                    self._search_candidates(query, snapshot, selections, keep, search.k, threads) if len(query) else []
                )
        return results

    def _search_candidates(
        self,
        query: npt.NDArray[np.float32],
        snapshot: Snapshot,
        selections: Sequence[_Selection],
        keep: int,
        k: int,
        threads: int,
    ) -> list[Hit]:
        """The best of the ``keep`` documents whose codes match a query best."""
        assert snapshot.centroids is not None
        found = candidates_of(
            table(similarities(query, snapshot.centroids, threads=threads), query),
            [selection.codes() for selection in selections],
            keep,
            threads=threads,
        )
        kept = [
            _Selection(view=selection.view, documents=documents)
            for selection, documents in zip(selections, found, strict=True)
            if len(documents)
        ]
        queries = Ragged(flat=query, offsets=np.array([0, len(query)]))
        return self._best_of(queries, kept, k, threads)[0]

    def _search_all(self, queries: Ragged, selections: Sequence[_Selection], k: int) -> list[list[Hit]]:
        """The best of the selected documents, all of them compared."""
        step = max(1, _SCORES // sum(map(len, selections)))  # queries at a time
        results = []
        for first in range(0, len(queries), step):
            some = Ragged.from_matrices(queries[first : first + step], width=queries.flat.shape[1])
            with SEARCH_TURNS.turn(thread_count(self._store.threads)) as threads:
                results += self._best_of(some, selections, k, threads)
        return results

    def _best_of(self, queries: Ragged, selections: Sequence[_Selection], k: int, threads: int) -> list[list[Hit]]:
        """The best of the selected documents for a few queries."""
        starts = np.cumsum([0, *(len(selection) for selection in selections)])
        scores = np.concatenate([self._scores(queries, selection, threads) for selection in selections], axis=1)
        results = []
        for row, length in zip(scores, queries.lengths, strict=True):
            best: Sequence[Any] | IndexArray = _best(row, k) if length else ()
            owners = np.searchsorted(starts, best, side="right") - 1
            results.append(
                [
                    selections[owner].hit(position - starts[owner], float(row[position]))
                    for owner, position in zip(owners, best, strict=True)
                ]
            )
        return results

    def _scores(self, queries: Ragged, selection: _Selection, threads: int) -> npt.NDArray[np.float32]:
        """MaxSim ``[q, selected documents]``."""
        if self._store.uses_kernels:
            tokens = selection.view.host_tokens
            return score(queries, tokens, documents=selection.documents, threads=threads)
        return score_on_device(queries, selection.view.device_tokens, documents=selection.documents)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Selection:
    """Documents of a view that a search may find: each has rows.

    Attributes:
        view: The view.
        documents: int64, their numbers in ascending order; ``None`` is all.
    """

    view: View
    documents: IndexArray | None

    @classmethod
    def of(cls, view: View, search: Search, numbers: Mapping[int, Sequence[int]] | None) -> Self:
        """The documents that match; ``numbers`` are those of the search's ids, by block."""
        if numbers is None and not search.conditions and view.all_searchable:
            return cls(view=view, documents=None)
        mask = view.searchable
        if search.conditions:
            mask = mask & view.block.table(view.documents).mask(search.conditions)
        if numbers is not None:
            named = np.zeros(view.documents, dtype=np.bool_)
            named[numbers.get(view.block.serial, [])] = True
            mask = mask & named
        return cls(view=view, documents=np.flatnonzero(mask))

    def __len__(self) -> int:
        return self.view.documents if self.documents is None else len(self.documents)

    def codes(self) -> Codes:
        """The codes to scan."""
        allowed = None
        if self.documents is not None:
            mask = np.zeros(self.view.documents, dtype=np.bool_)
            mask[self.documents] = True
            allowed = np.packbits(mask, bitorder="little")
        assert self.view.codes is not None
        return Codes(codes=self.view.codes[: self.view.rows], offsets=self.view.offsets, allowed=allowed)

    def hit(self, position: int, score: float) -> Hit:
        """The document at a position among those selected, as a hit."""
        block = self.view.block
        number = position if self.documents is None else self.documents[position]
        return Hit(
            id=block.ids[number],
            score=score,
            exact=True,
            text=block.texts[number],
            metadata=copy.deepcopy(block.metadata[number]),
        )


def _best(scores: npt.NDArray[np.float32], k: int) -> IndexArray:
    """The indices of the ``k`` largest scores, best first; of equal ones the first."""
    if k < len(scores):
        least = np.partition(scores, len(scores) - k)[len(scores) - k]
        above = np.flatnonzero(scores > least)
        chosen = np.concatenate((above, np.flatnonzero(scores == least)[: k - len(above)]))
    else:
        chosen = np.arange(len(scores))
    # Equal scores are in ascending order, and a stable sort leaves them there.
    best: IndexArray = chosen[np.argsort(-scores[chosen], kind="stable")]
    return best


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (
        RuntimeError,
        TypeError,
        AssertionError,
    ) as error:  # CUDA that torch was not built with is an AssertionError
        raise InvalidRequestError(f"device={name!r} cannot be used: {str(error).splitlines()[0]}") from None
    return device
