"""PlaidIndex: token matrices on disk, found by centroid codes and compared by what is stored of their rows."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, get_args

import numpy as np
import numpy.typing as npt

from millpond.errors import IndexLockedError, InvalidRequestError, SourceNotFoundError
from millpond.late_interaction.codecs.names import PlaidCodec
from millpond.late_interaction.codecs.rows import codec_of
from millpond.late_interaction.index.arguments import TokenEngine
from millpond.late_interaction.index.base import LateInteractionIndex
from millpond.late_interaction.index.documents import Documents, Hit, IndexStats, Search
from millpond.late_interaction.plaid import compaction, growth, scoring, writer
from millpond.late_interaction.plaid.pending import PendingDocuments
from millpond.late_interaction.plaid.segment import Segment
from millpond.late_interaction.plaid.snapshot import Snapshot, open_snapshot
from millpond.late_interaction.plaid.storage.folder import IndexFolder, Transaction
from millpond.late_interaction.plaid.storage.lock import LOCK, WriteLock
from millpond.late_interaction.plaid.storage.manifest import CURRENT, Manifest
from millpond.support.filters import Condition
from millpond.support.similar import list_names
from millpond.vectors.ragged import Ragged

logger = logging.getLogger(__name__)

# Token rows, and bytes of texts and metadata, that an add commits together. They are in memory until then.
_COMMIT_TOKENS = 1 << 20
_COMMIT_BYTES = 1 << 28
_DEFAULT_CODEC: PlaidCodec = "4"


class PlaidIndex(LateInteractionIndex):
    """Token matrices in a folder, mapped into memory.

    Any number of threads and processes may read while one writes; a reader sees what was committed at its next call.
    ``add`` and ``delete`` are durable when they return. ``add`` commits every million token rows, and what is left at
    its end: of one that is interrupted, whole documents are stored.

    Rows are kept in int8 until an ``add`` ends with 131,072 of them or more in the index. Centroids are trained then,
    and the codec says how rows are stored from there on:

    ========== ============================== ======================================================
    codec      bytes a token of 128 columns    scores of the documents that the scan of codes keeps
    ========== ============================== ======================================================
    ``"int8"`` 132                             of the rows
    ``"4"``    68                              of centroids and residuals of 4 bits
    ``"2"``    36                              of centroids and residuals of 2 bits
    ========== ============================== ======================================================

    Rows that come later stay in int8, and a search compares all of them, until they are 4,096 or a 64th of the index.
    Then they are encoded, and those that are far from all centroids get further ones. With 2 and 4 bits rows that have
    codes keep them. With ``"int8"``, :meth:`compact` trains anew once there are twice as many rows.

    Args:
        path: The folder. It is created if it does not exist or is empty.
        engine: As :class:`LateInteractionIndex`.
        codec: How rows are stored; ``None`` is that of the index, and ``"4"`` for a new one.
        dimensions: As :class:`LateInteractionIndex`.
        pool_factor: As :class:`LateInteractionIndex`.

    Raises:
        InvalidRequestError: The path is a file or a folder of something else, or an option is invalid or not that of
            the index.
        IndexCorruptedError: A file is damaged or missing; the message names it.
        FingerprintMismatchError: The index was built by another model.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        engine: TokenEngine | None,
        codec: PlaidCodec | None = None,
        *,
        dimensions: int | None = None,
        pool_factor: int | None = None,
    ) -> None:
        super().__init__(engine, dimensions=dimensions, pool_factor=pool_factor)
        if codec is not None:
            codec_of(codec, get_args(PlaidCodec))
        self._path = Path(path)
        self._folder = IndexFolder(self._path)
        self._lock = WriteLock(self._path / LOCK)
        self._local = threading.local()
        self._restored = False
        if not self._folder.exists():
            try:
                self._path.mkdir(parents=True, exist_ok=True)
            except (FileExistsError, NotADirectoryError):
                raise InvalidRequestError(
                    f"{self._path} is a file or lies in one; an index is a folder, pass another path"
                ) from None
            with self._lock.held():
                self._folder.create(
                    Manifest(payload=codec or _DEFAULT_CODEC, width=dimensions, pool_factor=pool_factor)
                )
        self._snapshot = open_snapshot(self._folder)
        self._take_options(codec)
        self._restore_settings(self._snapshot)
        self._sweep()

    @classmethod
    def open(cls, path: str | os.PathLike[str], engine: TokenEngine | None = None) -> Self:
        """Open an index that exists, with its own options.

        Args:
            path: The folder.
            engine: As :class:`PlaidIndex`.

        Returns:
            The index.

        Raises:
            SourceNotFoundError: There is none at this path.
        """
        if not IndexFolder(Path(path)).exists():
            beside = list_names(Path(path).name, _indexes_beside(Path(path)))
            known = f"; beside it there are {beside}" if beside else ""
            raise SourceNotFoundError(f"{path} has no index; build it first{known}")
        return cls(path, engine)

    @property
    def path(self) -> Path:
        """The folder."""
        return self._path

    @property
    def codec(self) -> str:
        """How rows are stored."""
        return self._refresh().manifest.payload

    # ------------------------------------------------------------------------------------------------- maintenance

    def compact(self) -> None:
        """Make one segment of all, without deleted documents.

        Trains centroids if there are enough rows for the first ones, or, with codec ``"int8"``, twice as many as at the
        last training, or many far from their centroids. Rows without codes get them. Others may read meanwhile;
        writers wait.

        Raises:
            IndexLockedError: Another process writes the index.
            OSError: The disk is full or cannot be written; the index is as before.
        """
        with self._writing() as (transaction, snapshot):
            manifest = snapshot.manifest
            has_drifted = not manifest.row_codec.bits and growth.is_drifted(snapshot)
            if compaction.is_trainable(manifest) or compaction.is_outgrown(manifest) or has_drifted:
                transaction.commit(writer.train(transaction, snapshot))
            elif not compaction.is_compact(manifest):
                transaction.commit(writer.encode(transaction, snapshot, [range(len(snapshot.segments))]))
        self._refresh()

    def check(self) -> list[str]:
        """Read every file, and say which are damaged: a sentence for each, empty if none is.

        If none is, and a fifth of the rows are far from their centroids, a sentence says so and what mends it.

        Returns:
            A list of sentences.
        """
        self._check_open()
        found = self._folder.check()
        snapshot = None if found else self._refresh()
        if snapshot is not None and growth.is_drifted(snapshot):
            found.append(self._far_rows(growth.drift(snapshot)))
        return found

    def _far_rows(self, share: float) -> str:
        repair = "call compact()" if self.codec == "int8" else "build it anew, or add those that came late again"
        return (
            f"{share:.0%} of the rows of {self._path} are farther from their centroids than 99 % of those that the "
            f"centroids were trained on: searches miss documents; {repair}"
        )

    def stats(self) -> IndexStats:
        """The size of the index.

        ``details`` has ``segments``, ``deleted_documents``, ``centroids``, ``trained_tokens`` (rows of the index when
        centroids were trained) and ``drift``: the share of rows farther from their centroids than 99 % of those were.
        """
        snapshot = self._refresh()
        manifest = snapshot.manifest
        arrays = [
            array
            for segment in snapshot.segments
            for array in (*segment.file.columns.token_arrays.values(), segment.file.columns.offsets)
        ]
        trained = snapshot.trained
        tables = 0 if manifest.codec is None else manifest.codec.bytes
        return IndexStats(
            documents=manifest.documents,
            tokens=manifest.tokens,
            dimensions=0 if snapshot.settings is None else snapshot.settings.width,
            codec=manifest.payload,
            bytes=sum(array.nbytes for array in arrays) + tables,
            details={
                "segments": len(snapshot.segments),
                "deleted_documents": sum(segment.deleted_documents for segment in manifest.segments),
                "centroids": 0 if trained is None else len(trained.centroids),
                "trained_tokens": manifest.trained_tokens,
                "drift": round(growth.drift(snapshot), 4),
                "bytes_on_disk": sum(entry.bytes for entry in manifest.files()),
            },
        )

    def __len__(self) -> int:
        return self._refresh().manifest.documents

    def close(self) -> None:
        """Release the files; the engine stays open. Every later call raises InvalidRequestError."""
        super().close()
        # A search that has just begun takes the files again, and lets them go when it ends.
        self._snapshot = replace(self._snapshot, current=b"", segments=(), trained=None)

    # ------------------------------------------------------------------------------------------------------ changes

    @contextmanager
    def _adding(self) -> Iterator[None]:
        self._local.pending = PendingDocuments(self._snapshot.manifest.row_codec)
        try:
            yield
        finally:
            pending = self._local.pending
            del self._local.pending
            if len(pending):
                self._commit(pending)
        self._tidy()

    def _upsert(self, documents: Documents) -> int:
        # First: the settings of another process, which the next line may take, made no row here.
        settings = self._encoding.settings
        snapshot = self._refresh()
        found = snapshot.find(documents.ids)
        known = sum(int(np.count_nonzero(some >= 0)) for some in found)
        pending: PendingDocuments = self._local.pending
        if not pending.fits(settings):
            raise self._other_rows()
        pending.add(documents, settings)
        if pending.tokens >= _COMMIT_TOKENS or pending.text_bytes >= _COMMIT_BYTES:
            # First: what cannot be committed is not tried again.
            self._local.pending = PendingDocuments(snapshot.manifest.row_codec)
            self._commit(pending)
        return len(documents) - known

    def _delete(self, ids: Sequence[str]) -> int:
        return self._delete_found(lambda snapshot: [some[some >= 0] for some in snapshot.find(ids)])

    def _delete_matching(self, conditions: Mapping[str, Condition]) -> int:
        def matching(segment: Segment) -> npt.NDArray[np.int64]:
            mask = segment.file.metadata.mask(conditions)
            return np.flatnonzero(mask if segment.live is None else mask & segment.live)

        return self._delete_found(lambda snapshot: [matching(segment) for segment in snapshot.segments])

    def _delete_found(self, find: Callable[[Snapshot], list[npt.NDArray[np.int64]]]) -> int:
        """Delete live documents of each segment; returns how many there were."""
        with self._writing() as (transaction, snapshot):
            documents = find(snapshot)
            deleted = sum(map(len, documents))
            if deleted:
                transaction.commit(writer.delete(transaction, snapshot, documents))
        self._refresh()
        return deleted

    def _commit(self, pending: PendingDocuments) -> None:
        with self._writing() as (transaction, snapshot):
            if not pending.fits(snapshot.settings):
                raise self._other_rows()
            transaction.commit(writer.append(transaction, snapshot, pending))
        self._refresh()

    def _other_rows(self) -> InvalidRequestError:
        return InvalidRequestError(
            f"another process added the first rows to index {self._path} meanwhile, of another width or with another "
            "projection to its width; add these documents again"
        )

    def _tidy(self) -> None:
        """After an add: train the first centroids, or make one segment of many small ones."""
        manifest = self._refresh().manifest
        try:
            while (
                compaction.is_trainable(manifest)
                or compaction.uncoded_runs(manifest)
                or compaction.due_segments(manifest) is not None
            ):
                with self._writing() as (transaction, snapshot):
                    manifest = snapshot.manifest
                    due, uncoded = compaction.due_segments(manifest), compaction.uncoded_runs(manifest)
                    if compaction.is_trainable(manifest):
                        transaction.commit(writer.train(transaction, snapshot))
                    elif uncoded:
                        transaction.commit(writer.encode(transaction, snapshot, uncoded))
                    elif due is not None:
                        transaction.commit(writer.merge(transaction, snapshot, due))
                manifest = self._refresh().manifest
        except (OSError, IndexLockedError) as error:
            # The documents are stored; the next add tries again.
            logger.warning("index %s was not compacted: %s", self._path, error)

    @contextmanager
    def _writing(self) -> Iterator[tuple[Transaction, Snapshot]]:
        """Hold the write lock, with the newest state; what is written is removed again after an error."""
        self._check_open()
        with self._lock.held():
            snapshot = self._refresh()
            transaction = Transaction(self._folder, snapshot.manifest)
            with transaction.rolled_back_on_error():
                yield transaction, snapshot

    def _sweep(self) -> None:
        """Remove what processes left that died while they wrote."""
        if not self._folder.orphans(self._snapshot.manifest):
            return
        try:
            with self._lock.held(seconds=0):
                self._folder.remove(self._folder.orphans(self._refresh().manifest))
        except (IndexLockedError, OSError):
            pass  # they are a living writer's, or the folder is read-only

    # ------------------------------------------------------------------------------------------------------ reading

    def _search(self, queries: Ragged, search: Search) -> list[list[Hit]]:
        return scoring.search(self._refresh(), queries, search)

    def _ids(self) -> list[str]:
        snapshot = self._refresh()
        return [
            segment.file.id(document)
            for segment in snapshot.segments
            for document in range(segment.entry.documents)
            if segment.live is None or segment.live[document]
        ]

    def _stored(self, id: str) -> tuple[str, Mapping[str, Any]] | None:
        snapshot = self._refresh()
        for segment, documents in zip(snapshot.segments, snapshot.find([id]), strict=True):
            if documents[0] >= 0:
                return segment.file.text(int(documents[0])), segment.file.object(int(documents[0]))
        return None

    def _refresh(self) -> Snapshot:
        """The state that is committed now."""
        super()._check_open()
        known = self._snapshot
        snapshot = open_snapshot(self._folder, known)
        if snapshot is not known:
            self._restore_settings(snapshot)
            self._snapshot = snapshot
        return snapshot

    def _check_open(self) -> None:
        super()._check_open()
        # Another process may have added the first rows, which say how queries are encoded.
        if self._encoding.settings is None:
            self._refresh()

    def _take_options(self, codec: PlaidCodec | None) -> None:
        """Options that were not named are those that the index was created with."""
        manifest = self._snapshot.manifest
        if manifest.saved:
            raise InvalidRequestError(f"{self._path} was saved by MemoryIndex; open it with MemoryIndex.open")
        if codec not in (None, manifest.payload):
            raise InvalidRequestError(
                f"codec={codec!r} is not the codec of index {self._path}, which has {manifest.payload!r}; leave it "
                "out, or build another one"
            )
        if manifest.settings is None:  # else these have the options
            encoding = self._encoding
            encoding.dimensions = encoding.dimensions or manifest.width
            encoding.pool_factor = encoding.pool_factor or manifest.pool_factor

    def _restore_settings(self, snapshot: Snapshot) -> None:
        """Take the settings of stored rows, once there are some."""
        if snapshot.settings is not None and not self._restored:
            self._encoding.restore(snapshot.settings, owner=f"index {self._path}")
            self._restored = True


def _indexes_beside(path: Path) -> list[str]:
    """Names of the indexes in the folder of a path."""
    with suppress(OSError):
        return [each.name for each in path.absolute().parent.iterdir() if (each / CURRENT).is_file()]
    return []
