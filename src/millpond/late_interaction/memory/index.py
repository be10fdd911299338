"""MemoryIndex: token matrices in this process."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, cast, get_args

from millpond.errors import InvalidRequestError, MissingExtraError
from millpond.late_interaction.codecs.names import MemoryCodec
from millpond.late_interaction.codecs.rows import codec_of
from millpond.late_interaction.index.arguments import TokenEngine, check_count
from millpond.late_interaction.index.base import CLOSED, LateInteractionIndex
from millpond.late_interaction.index.documents import Documents, Hit, IndexStats, Search
from millpond.late_interaction.memory import scoring
from millpond.late_interaction.memory.files import read_index, write_index
from millpond.late_interaction.memory.store import TokenStore, drift
from millpond.late_interaction.scoring.memory import HostMemory, Memory
from millpond.support.filters import Condition
from millpond.vectors.ragged import Ragged


class MemoryIndex(LateInteractionIndex):
    """Token matrices in memory, compared exactly.

    From 20,000 documents on, a call of ``add`` also trains centroids, and a search scans their codes (2 bytes a token)
    for the ``max(1024, 20 k)`` documents that it compares exactly; ``exact=True`` compares all. Training takes seconds
    to minutes, at 20,000 documents and again each time there are four times as many tokens, or when many are far
    from all centroids, as of subjects that came later; searches go on meanwhile.

    A search sees the documents of one moment, and never waits for a writer.

    Args:
        engine: As :class:`LateInteractionIndex`.
        codec: How rows are stored: ``"int8"`` (a float16 scale for each row), ``"bfloat16"`` or ``"float32"``.
        dimensions: As :class:`LateInteractionIndex`.
        pool_factor: As :class:`LateInteractionIndex`.
        device: Where rows are stored and compared: ``"cpu"``, or a GPU as torch names it, where all are compared;
            a GPU needs torch.
        threads: Most threads of a search on the CPU; ``None`` is as many as torch uses where it
            is imported, else ``OMP_NUM_THREADS``, else the processor's cores.

    Raises:
        InvalidRequestError: Besides those of :class:`LateInteractionIndex`, an unknown codec or device.
        MissingExtraError: The device needs torch, which is not installed.
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
        stored = codec_of(codec, get_args(MemoryCodec))
        self._open_store: TokenStore | None = TokenStore(stored, _memory_of(device), threads)

    def stats(self) -> IndexStats:
        """The size of the index; ``details`` has its blocks of memory, deleted documents, centroids and drift."""
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
                "trained_tokens": snapshot.trained_tokens,
                "drift": round(drift(snapshot), 4),
                "device": store.memory.device,
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

        Returns:
            The index, in memory.

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
        index = cls(engine, cast("MemoryCodec", stored.codec), **options, device=device, threads=threads)
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

    def _delete_matching(self, conditions: Mapping[str, Condition]) -> int:
        return self._store.delete_matching(conditions)

    def _stored(self, id: str) -> tuple[str, Mapping[str, Any]] | None:
        stored = self._store.document(id)
        return None if stored is None else (stored[0], copy.deepcopy(stored[1]))

    def _ids(self) -> list[str]:
        return self._store.snapshot.ids()

    def _search(self, queries: Ragged, search: Search) -> list[list[Hit]]:
        store = self._store
        snapshot, numbers = (store.snapshot, None) if search.ids is None else store.lookup(search.ids)
        return scoring.search(snapshot, numbers, queries, search, threads=store.threads)


def _memory_of(device: str) -> Memory:
    """The memory of a device: ``"cpu"``, or one of torch."""
    if device == "cpu":
        return HostMemory()
    try:
        from millpond.late_interaction.cuda import DeviceMemory, device_of
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingExtraError(
            f"device={device!r} needs torch; use device='cpu', or install it with: pip install \"millpond[torch]\""
        ) from None
    try:
        found = device_of(device)
    except (RuntimeError, TypeError, AssertionError) as error:  # the last: torch was not built with CUDA
        raise InvalidRequestError(f"device={device!r} cannot be used: {str(error).splitlines()[0]}") from None
    return HostMemory() if found.type == "cpu" else DeviceMemory(found)
