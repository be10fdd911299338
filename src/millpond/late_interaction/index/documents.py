"""What goes into an index and comes out of it: documents, searches, hits, sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from millpond.support.fair_semaphore import FairSemaphore
from millpond.support.filters import Condition
from millpond.vectors.ragged import Ragged

SEARCH_TURNS = FairSemaphore()
"""Of searches, which share the cores: without turns each starts as many threads as there are."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Documents:
    """Documents ready to be stored; every id occurs once."""

    ids: Sequence[str]
    texts: Sequence[str]  # their texts; `""` where there is none
    metadata: Sequence[Mapping[str, Any]]  # their metadata as JSON objects
    embeddings: Ragged  # float32 `[tokens_i, width]` rows of length 1, pooled and cut to the index's width

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


@dataclass(frozen=True, kw_only=True)
class Search:
    """The checked options of a search."""

    k: int  # most hits for each query
    conditions: Mapping[str, Condition]  # for each metadata key its values, or its range; empty for no filter
    ids: Sequence[str] | None = None  # distinct ids of the only documents to search; `None` for all
    candidates: int | None = None  # documents to keep for exact scoring; `None` for the index's own number
    exact: bool = False  # score every document that matches


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
class IndexStats:
    """The size of an index.

    Attributes:
        documents: Documents that a search can find.
        tokens: Their token rows.
        dimensions: Columns of a row; 0 as long as nothing was added.
        codec: How rows are stored.
        bytes: Bytes of the rows, codes and tables, without texts and metadata.
        details: What only this kind of index has: segments, deleted documents and so on.
    """

    documents: int
    tokens: int
    dimensions: int
    codec: str
    bytes: int
    details: Mapping[str, Any] = field(default_factory=dict, hash=False)
