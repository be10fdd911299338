"""copy: vectors, texts and metadata from one collection to another, of any database, without computing anything."""

from __future__ import annotations

import os
import threading
from typing import Any

from millpond.errors import InvalidRequestError
from millpond.ingest.copying.copy_run import CopyRun
from millpond.ingest.copying.options import CopyOptions
from millpond.ingest.copying.report import CopyReport
from millpond.ingest.pipeline.dead_letter_file import DeadLetterFile
from millpond.ingest.pipeline.delivery import RetryPolicy
from millpond.ingest.sinks.collection import CollectionSink
from millpond.ingest.sinks.manifest import CollectionManifest
from millpond.ingest.sinks.stored_rows import rows_manifest


def copy(
    source: CollectionSink[Any],
    target: CollectionSink[Any],
    *,
    dense_only: bool = False,
    sync: bool = False,
    sync_max: float = 0.5,
    rows_per_second: float | None = None,
    dead_letters: str | os.PathLike[str] | DeadLetterFile | None = None,
    show_progress: bool = True,
    retry: RetryPolicy | None = None,
    stop: threading.Event | None = None,
) -> CopyReport:
    """Copy the rows of a collection to another one: vectors, texts and metadata. No model is loaded.

    A new target has the source's model, widths, field layout and chunks, unless the sink was given others. Rows keep
    their ids. What the target holds already is left out, so a copy that was stopped or killed goes on when it is made
    again. Rows that the target does not take are logged, counted and kept as dead letters; the others are written.

    Args:
        source: The collection to read; millpond made it.
        target: The collection to write: a new one, or one of the same model.
        dense_only: Leave the sparse vectors of a hybrid collection out.
        sync: Delete the rows of the target that the source does not have, at the end; those that a framework wrote
            under ids of its own stay.
        sync_max: The largest share of the rows that the target held before that ``sync`` may delete, from 0 to 1.
        rows_per_second: Most rows to read in a second; ``None`` for no limit.
        dead_letters: A file for the records that are left out, which :func:`~millpond.ingest.ingest` reads.
        show_progress: Draw a progress bar, if standard error is a terminal or this is a notebook.
        retry: How long to wait for a database that does not answer.
        stop: Once it is set, the copy reads no more, and returns.

    Returns:
        The counts.

    Raises:
        InvalidRequestError: An option is not valid, a collection does not exist, or the target has another form;
            nothing was written.
        FingerprintMismatchError: Millpond did not make the source, or another model filled the target; nothing was
            written.
        SinkError: A database refuses or does not answer, or ``sync`` would delete more than ``sync_max`` allows.
        TypeError: ``source`` or ``target`` is no sink of a collection.
    """
    options = CopyOptions(
        dense_only=dense_only,
        sync=sync,
        sync_max=sync_max,
        rows_per_second=rows_per_second,
        dead_letters=dead_letters,
        show_progress=show_progress,
        retry=retry,
        stop=stop,
    )
    for name, sink in (("source", source), ("target", target)):
        if not isinstance(sink, CollectionSink):
            raise TypeError(f"{name} is of type {type(sink).__name__}; pass the sink of a collection, as open_sink's")
    manifest = rows_manifest(source, verb="copied")
    if source.is_same(target):
        raise InvalidRequestError(f"source and target are the same collection: {source.target}; name another target")
    check_sparse(manifest, target.hybrid, dense_only=dense_only)
    file = options.dead_letters
    letters = file if isinstance(file, DeadLetterFile | None) else DeadLetterFile(file)
    run = CopyRun(source, target, manifest, options, letters)
    try:
        return run.copy()
    finally:
        if letters is not None:
            letters.close(complete=True)


def check_sparse(manifest: CollectionManifest, hybrid: bool, *, dense_only: bool) -> None:
    """Raise InvalidRequestError unless a target stores just those kinds of vectors that are copied.

    Args:
        manifest: The manifest of the source.
        hybrid: Whether the target's sink stores sparse vectors.
        dense_only: Whether sparse vectors are left out.
    """
    sparse = manifest.sparse is not None and not dense_only
    if sparse and not hybrid:
        raise InvalidRequestError(
            "the source holds sparse vectors too, and the target's sink stores none; open it with hybrid=True, or pass "
            "dense_only=True to leave them out"
        )
    if hybrid and not sparse:
        raise InvalidRequestError("hybrid=True: no sparse vectors are copied; open the target's sink without it")
