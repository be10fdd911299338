"""RunOptions and RunParts: what a run is asked to do, and what it works with."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from millpond.errors import InvalidRequestError
from millpond.ingest.chunking import Chunker, Chunking, Context
from millpond.ingest.pipeline.dead_letter_file import DeadLetterFile
from millpond.ingest.pipeline.delivery import RetryPolicy
from millpond.ingest.pipeline.journal import CollectionEntries
from millpond.ingest.pipeline.last_run import LastRun
from millpond.ingest.record import Record
from millpond.ingest.sinks.protocol import Sink
from millpond.ingest.telemetry.trace import RunTrace

if TYPE_CHECKING:
    from millpond.engine.engine import Engine


class Splitter(Protocol):
    """Cuts long texts, as :class:`~millpond.ingest.Chunker` does."""

    @property
    def settings(self) -> str:
        """All that decides where a text is cut: with another value, every record is cut again."""

    def split(self, record: Record) -> Sequence[Record]:
        """The chunks of a record, at least one."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RunOptions:
    """The options of :func:`ingest`, which describes them."""

    journal: str | os.PathLike[str] | None = None
    resume: bool = True
    show_progress: bool = True
    keep_blank: bool = False
    dead_letters: str | os.PathLike[str] | DeadLetterFile | None = None
    chunking: Chunking | Splitter | None = None
    sync: bool = False
    sync_max: float = 0.5
    verify: bool = False
    retry: RetryPolicy | None = None
    stop: threading.Event | None = None
    trace: RunTrace | None = None

    def __post_init__(self) -> None:
        check_blank(self.keep_blank, self.chunking)

    def chunker(self, engine: Engine) -> Splitter | None:
        """What cuts the texts for an engine; ``None``: nothing."""
        return Chunker.for_engine(engine, self.chunking) if isinstance(self.chunking, Chunking) else self.chunking


def chunk_form(chunking: Chunking | Splitter | None) -> dict[str, Any]:
    """What a sink is told of the rows of a run, as arguments of its ``prepare``: nothing, if records stay whole."""
    if chunking is None:
        return {}
    context = context_of(chunking)
    return {"chunked": True} | ({} if context is None else {"context": context})


def check_blank(keep_blank: bool, chunking: Chunking | Splitter | None) -> None:
    """Raise InvalidRequestError if blank texts are to be kept, of which there are no late chunks."""
    if keep_blank and context_of(chunking) is not None:
        raise InvalidRequestError(
            "keep_blank=True embeds blank texts, which have no token for context='late' to pool; leave one of them out"
        )


def context_of(chunking: Chunking | Splitter | None) -> Context | None:
    """What the vectors of chunks know beside their own text; a splitter of one's own names nothing."""
    return chunking.context if isinstance(chunking, Chunking | Chunker) else None


@dataclass(frozen=True, kw_only=True, eq=False)
class RunParts:
    """What a run works with, beside the source."""

    options: RunOptions  # what it is asked to do
    engine: Engine
    sparse_engine: Engine | None  # the engine of the sparse vectors, of a hybrid sink
    sink: Sink
    widths: list[int]
    entries: CollectionEntries | None  # the journal's entries; `None` without a journal
    last_run: LastRun
    dead_letters: DeadLetterFile | None  # where records go that are left out; `None` keeps them nowhere
    chunker: Splitter | None  # cuts long texts; `None` leaves them whole
    rows_before: int | None  # rows of the collection; `None` if they cannot be counted
    stop: threading.Event
    trace: RunTrace
