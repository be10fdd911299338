"""CollectionIndex: the part of a late-interaction index that is the same for every database."""

from __future__ import annotations

import json
import os
import threading
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, get_args

import numpy as np
import numpy.typing as npt

from millpond.errors import FingerprintMismatchError, InvalidRequestError, SinkError
from millpond.ingest.batch import slices
from millpond.ingest.collection_client import CollectionClient
from millpond.ingest.index_manifest import IndexManifest, Prefetch
from millpond.ingest.record import point_id
from millpond.late_interaction.index import Documents, Hit, LateInteractionIndex, SearchOptions, TokenEngine
from millpond.late_interaction.muvera import Muvera
from millpond.metadata import Scalar
from millpond.ragged import Ragged

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, eq=False)
class IndexRow:
    """One document as it is written.

    Attributes:
        point: Its database id.
        id: The caller's id.
        text: Its text; ``""`` if there is none.
        metadata: Its metadata.
        matrix: float32 ``[tokens, width]``.
        prefetch: float32 ``[prefetch_width]``, by which it becomes a candidate; ``None`` without prefetch or tokens.
        added: A number that is larger for documents added later.
    """

    point: str
    id: str
    text: str
    metadata: Mapping[str, Any]
    matrix: FloatArray
    prefetch: FloatArray | None
    added: int


@dataclass(frozen=True, kw_only=True)
class IndexQuery:
    """One query with rows.

    Attributes:
        matrix: float32 ``[tokens, width]``.
        prefetch: float32 ``[prefetch_width]``; ``None`` without prefetch.
    """

    matrix: FloatArray
    prefetch: FloatArray | None


class CollectionIndex(CollectionClient, LateInteractionIndex):
    """Token matrices in one collection of a database.

    A subclass implements the requests: ``_exists``, ``_create``, ``_read_manifest``, ``_existing``, ``_write``,
    ``_remove``, ``_remove_matching``, ``_count``, ``_query`` and ``_describe_error``; it may also override
    ``_prepare``, ``_flush``, ``_release`` and ``_check_document``.

    Args:
        location: Where the database is; not read if the caller passed a client.
        collection: Name of the collection.
        engine: As :class:`LateInteractionIndex`.
        codec: How rows are stored.
        prefetch: The single vectors by which candidates are found; ``None`` scores every document.
        width: As :class:`LateInteractionIndex`.
        pool_factor: As :class:`LateInteractionIndex`.
        owned: Whether this object opens the client.
    """

    kind = "index"
    max_rows = 256

    codecs: ClassVar[tuple[str, ...]]
    max_tokens_rule: ClassVar[str]  # why a document may have too many rows, in an error message

    def __init__(
        self,
        location: str | os.PathLike[str] | None,
        collection: str,
        engine: TokenEngine | None,
        *,
        codec: str,
        prefetch: str | None,
        width: int | None,
        pool_factor: int,
        owned: bool,
    ) -> None:
        CollectionClient.__init__(self, location, collection, owned=owned)
        LateInteractionIndex.__init__(self, engine, width=width, pool_factor=pool_factor)
        if codec not in self.codecs:
            raise InvalidRequestError(f"codec={codec!r} is unknown; choose one of {', '.join(self.codecs)}")
        self._codec = codec
        self._prefetch = _check_prefetch(prefetch)
        self._manifest: IndexManifest | None = None
        self._clock = threading.Lock()
        self._last_added = 0
