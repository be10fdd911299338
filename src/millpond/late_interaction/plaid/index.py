"""PlaidIndex: token matrices on disk, found by centroid codes and compared by what is stored of their rows."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np

from millpond.errors import IndexLockedError, InvalidRequestError, SourceNotFoundError
from millpond.fingerprint import ModelIdentity
from millpond.late_interaction.index import Documents, Hit, IndexStats, LateInteractionIndex, SearchOptions
from millpond.late_interaction.index_arguments import TokenEngine
from millpond.late_interaction.plaid import compaction, scoring, writer
from millpond.late_interaction.plaid.check import check_folder
from millpond.late_interaction.plaid.folder import IndexFolder, Transaction
from millpond.late_interaction.plaid.lock import LOCK, WriteLock
from millpond.late_interaction.plaid.manifest import PAYLOADS, Manifest, Payload
from millpond.late_interaction.plaid.pending import PendingDocuments
from millpond.late_interaction.plaid.snapshot import Snapshot, open_snapshot
from millpond.metadata import Scalar
from millpond.ragged import Ragged

logger = logging.getLogger(__name__)

# Token rows, and bytes of texts and metadata, that an add commits together. They are in memory until then.
_COMMIT_TOKENS = 1 << 20
_COMMIT_BYTES = 1 << 28
_DEFAULT_PAYLOAD: Payload = "4"


class PlaidIndex(LateInteractionIndex):
    """Token matrices in a folder, mapped into memory.

    Any number of threads and processes may read while one writes; a reader sees what was committed at its next call.
    ``add`` and ``delete`` are durable when they return. ``add`` commits every million token rows, and what is left at
    its end: of one that is interrupted, whole documents are stored.

    Rows are kept in int8 until an ``add`` ends with 131,072 of them or more in the index. Centroids are trained then,
    and the payload says how rows are stored from there on:

    ========== ============================== ======================================================
    payload    bytes a token of 128 columns    scores of the documents that the scan of codes keeps
    ========== ============================== ======================================================
    ``"int8"`` 132                             of the rows
    ``"4"``    68                              of centroids and residuals of 4 bits
    ``"2"``    36                              of centroids and residuals of 2 bits
    ========== ============================== ======================================================

    With 2 and 4 bits the rows themselves are gone, and the centroids stay those of the first training: build a large
    index by one ``add``. With ``"int8"``, :meth:`compact` trains anew once there are eight times as many rows.

    Args:
        path: The folder. It is created if it does not exist or is empty.
        engine: As :class:`LateInteractionIndex`.
        payload: How rows are stored. An index that exists keeps its own, and another one than the default must be it.
        width: As :class:`LateInteractionIndex`; of an index that exists as ``payload``.
        pool_factor: As :class:`LateInteractionIndex`; of an index that exists as ``payload``.

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
        payload: Payload = _DEFAULT_PAYLOAD,
        *,
        width: int | None = None,
        pool_factor: int = 1,
    ) -> None:
        super().__init__(engine, width=width, pool_factor=pool_factor)
        if payload not in PAYLOADS:
            raise InvalidRequestError(f"payload={payload!r} must be one of {', '.join(map(repr, PAYLOADS))}")
        self._path = Path(path)
        self._folder = IndexFolder(self._path)
        self._lock = WriteLock(self._path / LOCK)
        self._local = threading.local()
        self._closed = False
        if not self._folder.exists():
            self._path.mkdir(parents=True, exist_ok=True)
            with self._lock.held():
                self._folder.create(
                    Manifest(payload=payload, width=width, pool_factor=pool_factor, identity=(None if self._engine is None else ModelIdentity.of(self._engine.spec)))
                )
        self._snapshot = open_snapshot(self._folder)
        manifest = self._snapshot.manifest
        for name, value, default, stored in (
            ("payload", payload, _DEFAULT_PAYLOAD, manifest.payload),
            ("width", width, None, manifest.width),
            ("pool_factor", pool_factor, 1, manifest.pool_factor),
        ):
            if value not in (default, stored):
                raise InvalidRequestError(
                    f"{name}={value!r} is not that of index {self._path}, which has {stored!r}; leave it out, or pass "
                    "another path"
                )
        self._width, self._pool_factor = manifest.width, manifest.pool_factor
        self._check_identity(manifest)
        self._sweep()

    @classmethod
    def open(cls, path: str | os.PathLike[str], engine: TokenEngine | None = None) -> Self:
        """Open an index that exists, with its own options.

        Raises:
            SourceNotFoundError: There is none at this path.
        """
        if not IndexFolder(Path(path)).exists():
            raise SourceNotFoundError(f"{path} has no index; build it first")
        return cls(path, engine)

    @property
    def path(self) -> Path:
        """The folder."""
        return self._path

    @property
    def payload(self) -> Payload:
        """How rows are stored."""
        return self._refresh().manifest.payload

    # ------------------------------------------------------------------------------------------------- maintenance

    def compact(self) -> None:
        """Make one segment of all, without deleted documents.

        Trains centroids if there are enough rows for the first ones, or, with payload ``"int8"``, eight times as many
        as at the last training. Others may read meanwhile; writers wait.

        Raises:
            IndexLockedError: Another process writes the index.
            OSError: The disk is full or cannot be written; the index is as before.
        """
        with self._writing() as (transaction, snapshot):
            manifest = snapshot.manifest
            if not compaction.is_compact(manifest):
                if compaction.is_trainable(manifest) or compaction.is_outgrown(manifest):
                    manifest = writer.train(transaction, snapshot)
                else:
                    manifest = writer.merge(transaction, snapshot, range(len(snapshot.segments)))
                transaction.commit(manifest)
        self._refresh()

    def check(self) -> list[str]:
        """Read every file, and say which are damaged: a sentence for each, empty if none is."""
        return check_folder(self._path)

    def stats(self) -> IndexStats:
        """The size of the index; ``details`` has ``segments``, ``deleted_documents``, ``centroids`` and ``payload``."""
        snapshot = self._refresh()
        manifest = snapshot.manifest
        arrays = [
            array
            for segment in snapshot.segments
            for array in (*segment.file.columns.token_arrays.values(), segment.file.columns.offsets)
        ]
        codec = snapshot.codec
        tables = 0 if manifest.codec is None else manifest.codec.bytes
        return IndexStats(
            documents=manifest.documents,
            tokens=manifest.tokens,
            width=manifest.columns,
            codec=manifest.payload,
            bytes=sum(array.nbytes for array in arrays) + tables,
            details={
                "segments": len(snapshot.segments),
                "deleted_documents": sum(segment.deleted_documents for segment in manifest.segments),
                "centroids": 0 if codec is None else len(codec.centroids),
                "pool_factor": manifest.pool_factor,
                "bytes_on_disk": sum(entry.bytes for entry in manifest.files()),
            },
        )

    def __len__(self) -> int:
        return self._refresh().manifest.documents

    def close(self) -> None:
        """Release the files; the engine stays open."""
        self._closed = True

    # ------------------------------------------------------------------------------------------------------ changes

    @contextmanager
    def _adding(self) -> Iterator[None]:
        self._local.pending = PendingDocuments()
        try:
            yield
        finally:
            pending = self._local.pending
            del self._local.pending
            if len(pending):
                self._commit(pending)
        self._tidy()

    def _upsert(self, documents: Documents) -> int:
        snapshot = self._refresh()
        self._check_columns(snapshot, documents.embeddings)
        found = snapshot.find(documents.ids)
        known = sum(int(np.count_nonzero(some >= 0)) for some in found)
        pending: PendingDocuments = self._local.pending
        pending.add(documents)
        if pending.tokens >= _COMMIT_TOKENS or pending.text_bytes >= _COMMIT_BYTES:
            self._local.pending = PendingDocuments()  # first: what cannot be committed is not tried again
            self._commit(pending)
        return len(documents) - known

    def _delete(self, ids: Sequence[str]) -> int:
        with self._writing() as (transaction, snapshot):
            documents = [some[some >= 0] for some in snapshot.find(ids)]
            deleted = sum(map(len, documents))
            if deleted:
                transaction.commit(writer.delete(transaction, snapshot, documents))
        self._refresh()
        return deleted

    def _delete_matching(self, conditions: Mapping[str, Sequence[Scalar]]) -> int:
        with self._writing() as (transaction, snapshot):
            documents = []
            for segment in snapshot.segments:
                mask = segment.file.metadata.mask(conditions)
                documents.append(np.flatnonzero(mask if segment.live is None else mask & segment.live))
            deleted = sum(map(len, documents))
            if deleted:
                transaction.commit(writer.delete(transaction, snapshot, documents))
        self._refresh()
        return deleted

    def _commit(self, pending: PendingDocuments) -> None:
        with self._writing() as (transaction, snapshot):
            if snapshot.manifest.columns not in (0, pending.columns_of_a_row):
                raise self._wrong_columns(pending.columns_of_a_row, snapshot)
            transaction.commit(writer.append(transaction, snapshot, pending, (None if self._engine is None else ModelIdentity.of(self._engine.spec))))
        self._refresh()

    def _tidy(self) -> None:
        """After an add: train the first centroids, or make one segment of many small ones."""
        manifest = self._refresh().manifest
        try:
            while compaction.is_trainable(manifest) or compaction.due_segments(manifest) is not None:
                with self._writing() as (transaction, snapshot):
                    manifest = snapshot.manifest
                    due = compaction.due_segments(manifest)
                    if compaction.is_trainable(manifest):
                        transaction.commit(writer.train(transaction, snapshot))
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

    def _search(self, queries: Ragged, search: SearchOptions) -> list[list[Hit]]:
        snapshot = self._refresh()
        self._check_columns(snapshot, queries)
        return [
            [
                Hit(
                    id=match.segment.file.id(match.document),
                    score=match.score,
                    exact=match.segment.file.columns.rows is not None,
                    text=match.segment.file.text(match.document),
                    metadata=match.segment.file.object(match.document),
                )
                for match in matches
            ]
            for matches in scoring.search(snapshot, queries, search)
        ]

    def _stored(self, id: str) -> tuple[str, Mapping[str, Any]] | None:
        snapshot = self._refresh()
        for segment, documents in zip(snapshot.segments, snapshot.find([id]), strict=True):
            if documents[0] >= 0:
                return segment.file.text(int(documents[0])), segment.file.object(int(documents[0]))
        return None

    def _refresh(self) -> Snapshot:
        """The state that is committed now."""
        self._check_open()
        known = self._snapshot
        snapshot = open_snapshot(self._folder, known)
        if snapshot is not known:
            if snapshot.manifest.identity != known.manifest.identity:
                self._check_identity(snapshot.manifest)
            self._snapshot = snapshot
        return snapshot

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidRequestError(f"index {self._path} is closed; open it again")

    def _check_identity(self, manifest: Manifest) -> None:
        if self._engine is not None and manifest.identity is not None:
            manifest.identity.check(self._engine.spec, owner=f"index {self._path}", another="another path")

    def _check_columns(self, snapshot: Snapshot, embeddings: Ragged) -> None:
        columns = snapshot.manifest.columns
        if columns and embeddings.flat.shape[1] != columns:
            raise self._wrong_columns(embeddings.flat.shape[1], snapshot)

    def _wrong_columns(self, columns: int, snapshot: Snapshot) -> InvalidRequestError:
        return InvalidRequestError(
            f"rows have {columns} columns, and those of index {self._path} have {snapshot.manifest.columns}; "
            "use the model that it was built with, or another path"
        )
