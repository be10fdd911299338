"""What a migration will do, and how far it is: rows, time and disk."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from millpond.errors import InvalidRequestError, MillpondError
from millpond.ingest.record import content_hash
from millpond.ingest.sinks.collection import CollectionSink
from millpond.ingest.sinks.protocol import StoredRow
from millpond.ingest.sinks.succession import Phase
from millpond.migrate.migration import Migration

if TYPE_CHECKING:
    from millpond.engine.engine import Engine

_SAMPLED = 64
_SCANNED = 20_000  # ids from which the sample is taken
_BYTES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "int8": 1.0, "uint8": 1.0, "bit": 0.125}


@dataclass(frozen=True, kw_only=True)
class MigrationPlan:
    """What ``millpond migrate run`` would do.

    Attributes:
        collection: The name by which the collection is used.
        model: The model of the vectors that it searches now.
        dimensions: Their widths.
        rows: How many rows there are.
        new_collection: The name, or the URL, of the collection that will serve.
        new_model: Its model.
        new_dimensions: Its widths.
        done: How many rows are there already.
        rows_per_second: How many the engine embeds here, measured with rows of the collection.
        seconds: How long the rest would take at that rate.
        vector_bytes: Bytes of the vectors that are stored now, without the database's own.
        new_vector_bytes: Bytes of those that are stored beside them, until ``finish`` drops the old ones.
        steps: What is done, in words.
    """

    collection: str
    model: str
    dimensions: tuple[int, ...]
    rows: int
    new_collection: str
    new_model: str
    new_dimensions: tuple[int, ...]
    done: int
    rows_per_second: float | None
    seconds: float | None
    vector_bytes: int
    new_vector_bytes: int
    steps: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class MigrationStatus:
    """How far a migration is.

    Attributes:
        collection: The name by which the collection is used.
        phase: What was done last; ``None`` without a migration.
        serving: The collection that answers by the name.
        model: Its model.
        other: The collection that does not serve; empty if there is none.
        other_model: Its model; empty if there is none.
        rows: How many rows the serving collection has.
        other_rows: How many rows the other one has.
        share: Which share of the rows the new collection has, from 0 to 1.
        rows_per_second: At which rate they came since the command began that fills it; ``None`` if none came.
        seconds_left: How long the rest takes at that rate.
        since: When the phase began, in seconds since 1970.
        recall: The expected recall of the bridge; ``None`` without one.
    """

    collection: str
    phase: Phase | None
    serving: str
    model: str
    other: str
    other_model: str
    rows: int
    other_rows: int
    share: float | None
    rows_per_second: float | None
    seconds_left: float | None
    since: float | None
    recall: float | None


def plan(migration: Migration, engine: Engine | None = None) -> MigrationPlan:
    """Check that a migration can be run, and say what it costs.

    Args:
        migration: The migration.
        engine: The engine of the new model, whose speed is measured; ``None`` leaves the time out.

    Returns:
        The plan.

    Raises:
        InvalidRequestError: It cannot be run; the message says why.
    """
    change = migration.change
    assert change is not None
    name = migration.check()
    old = migration.head.named(migration.old_name())
    manifest, rows = old.own(), old.count()
    form = change.manifest(manifest)
    sample = check_texts(old, source=change.records is not None)
    done = 0
    if ":" not in name and name in migration.head.collections():
        done = min(rows, migration.head.named(name).count())
    rate = None if engine is None else _rate(engine, sample)
    stored = old.describe().datatype or "float32"
    chunks = "cut anew" if change.rechunks else "kept as they are" if manifest.chunked else "none"
    source = "the source" if change.records is not None else "the collection"
    return MigrationPlan(
        collection=migration.head.collection,
        model=manifest.model,
        dimensions=manifest.dimensions,
        rows=rows,
        new_collection=name,
        new_model=form.model,
        new_dimensions=form.dimensions,
        done=done,
        rows_per_second=rate,
        seconds=None if rate is None else (rows - done) / rate,
        vector_bytes=int(rows * sum(manifest.dimensions) * _BYTES.get(stored, 4.0)),
        new_vector_bytes=int(
            rows * sum(form.dimensions) * _BYTES.get(str(change.options.get("datatype") or "float32"), 4.0)
        ),
        steps=(
            f"create {name} beside the collection, with the same rows and fields; chunks: {chunks}",
            f"embed the texts of {source} by {form.model} and write them there; searches go on in the old vectors",
            "go through the rows again until a pass finds few that were written meanwhile, then compare a sample",
            "hold writers back for one more pass, and let the name stand for the new collection, in one write",
            "keep the old collection for rollback, until finish drops it",
        ),
    )


def status(head: CollectionSink[Any]) -> MigrationStatus:
    """How far the migration of a collection is.

    Args:
        head: The sink of the collection, by the name that readers and writers use.

    Returns:
        Its status.
    """
    found = head.succession()
    serving = head if found is None else head.named(found.serving)
    other, other_model, other_rows = "", "", 0
    if found is not None and found.other:
        try:
            other, other_model = found.other, head.named(found.other).own().model
            other_rows = head.named(found.other).count()
        except MillpondError:
            other = found.other
    rows = head.count()
    share = rate = left = None
    if found is not None and other:
        new, all_rows = (rows, rows) if found.phase == "live" else (other_rows, rows)
        share = min(1.0, new / all_rows) if all_rows else 1.0
        elapsed = time.time() - found.since
        if found.phase == "filling" and new > found.rows and elapsed > 0:
            rate = (new - found.rows) / elapsed
            left = max(0, all_rows - new) / rate
    return MigrationStatus(
        collection=head.collection,
        phase=None if found is None else found.phase,
        serving=head.collection if found is None else found.serving,
        model=serving.own().model,
        other=other,
        other_model=other_model,
        rows=rows,
        other_rows=other_rows,
        share=share,
        rows_per_second=rate,
        seconds_left=left,
        since=None if found is None else found.since,
        recall=None if found is None else found.recall,
    )


def check_texts(old: CollectionSink[Any], *, source: bool) -> list[str]:
    """Some texts of a collection; raises InvalidRequestError if it does not hold them, and no source does.

    Args:
        old: The collection.
        source: Whether the records come from a source.

    Returns:
        At most 64 texts.
    """
    ids = [row_id for row_id, _ in islice(old.scan(), _SCANNED)]
    chosen = random.Random(0).sample(ids, min(len(ids), _SAMPLED))
    rows: Sequence[StoredRow] = list(old.read_rows(chosen).values()) if chosen else []
    lost = [row for row in rows if not row.text and row.content_hash not in ("", content_hash(""))]
    unread = [row for row in rows if row.text is None]
    if (lost or unread) and not source:
        raise InvalidRequestError(
            f"of {len(rows)} rows, {len(lost) + len(unread)} have no text that can be read, and a model needs it; name "
            "the source with --source"
        )
    return [row.text for row in rows if row.text]


def _rate(engine: Engine, texts: Sequence[str]) -> float | None:
    """Texts that an engine embeds a second; the first call is not measured."""
    if not texts:
        return None
    engine.embed(texts[:1], role="document")
    start = time.perf_counter()
    engine.embed(list(texts), role="document")
    return len(texts) / max(time.perf_counter() - start, 1e-9)
