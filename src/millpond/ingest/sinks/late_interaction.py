"""CollectionIndex: the part of a late-interaction index that is the same for every database."""

from __future__ import annotations

import json
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from millpond.errors import InvalidRequestError, SinkError
from millpond.ingest.record import content_hash, point_id
from millpond.ingest.sinks.batch import slices
from millpond.ingest.sinks.client import Connection
from millpond.ingest.sinks.index_manifest import IndexManifest, Prefetch, check_prefetch
from millpond.late_interaction.index.arguments import TokenEngine
from millpond.late_interaction.index.base import LateInteractionIndex
from millpond.late_interaction.index.documents import Documents, Hit, IndexStats, Search
from millpond.support.filters import Condition
from millpond.vectors.ragged import Ragged

Answer = TypeVar("Answer")
FloatArray = npt.NDArray[np.float32]

# Ids in one request: 4 MB of JSON.
_MAX_IDS = 50_000


@dataclass(frozen=True, kw_only=True, eq=False)
class IndexRow:
    """One document as it is written."""

    point: str  # its database id
    fields: Mapping[str, Any]  # those of `plain`, `tokens` (how many) and `added` (larger for later documents)
    matrix: FloatArray  # float32 `[tokens, width]`
    prefetch: FloatArray  # float32 `[prefetch_width]`, by which it becomes a candidate; zeros without tokens


@dataclass(frozen=True, kw_only=True, eq=False)
class IndexQuery:
    """What one request searches for."""

    matrix: FloatArray  # float32 `[tokens, width]`, at least one token
    prefetch: FloatArray  # float32 `[prefetch_width]`
    k: int  # most hits
    candidates: int | None  # documents that the prefetch keeps; `None` scores every document that matches
    conditions: Mapping[str, Condition]  # the filter on metadata, as `Search` has it
    points: Sequence[str] | None  # database ids of the only documents to search; `None` for all


class Found(NamedTuple):
    """A hit with its place among hits of equal score."""

    hit: Hit
    added: int


class IndexDriver(ABC):
    """The requests that an index makes of one collection of a database.

    A subclass sets :attr:`connection`, names its limits and implements the abstract methods; :class:`CollectionIndex`
    makes requests of these calls.
    """

    codecs: ClassVar[tuple[str, ...]]
    prefetches: ClassVar[tuple[Prefetch | None, ...]]
    least_candidates: ClassVar[int]  # of a search that names no number
    float_bytes: ClassVar[int] = 4  # bytes of one float in a request
    connection: Connection

    @abstractmethod
    def create(self, manifest: IndexManifest) -> None:
        """Create the collection, and the manifest as metadata."""

    @abstractmethod
    def existing(self, points: Sequence[str]) -> int:
        """How many rows have one of these database ids."""

    @abstractmethod
    def write(self, rows: Sequence[IndexRow], manifest: IndexManifest) -> None:
        """Store rows, replacing those whose id exists, and wait for the acknowledgement."""

    @abstractmethod
    def remove(self, points: Sequence[str]) -> None:
        """Delete the rows with these database ids."""

    @abstractmethod
    def delete_matching(self, conditions: Mapping[str, Condition]) -> int:
        """Delete rows by metadata; returns how many there were."""

    @abstractmethod
    def count(self) -> int:
        """How many rows the collection holds, counting every acknowledged write."""

    @abstractmethod
    def listed(self) -> list[tuple[int, str]]:
        """``added`` and ``id`` of every row."""

    @abstractmethod
    def stored(self, point: str) -> tuple[str, Mapping[str, Any]] | None:
        """Text and metadata of the row with this database id."""

    @abstractmethod
    def query(self, queries: Sequence[IndexQuery], manifest: IndexManifest) -> list[list[Found]]:
        """The best ``k`` documents of each query, in any order; of equal scores at the end, those added first."""

    @abstractmethod
    def stats(self, manifest: IndexManifest) -> IndexStats:
        """The size of the collection."""

    @abstractmethod
    def check(self, manifest: IndexManifest) -> list[str]:
        """What is wrong with the stored rows."""

    def prepare(self, manifest: IndexManifest) -> None:
        """Make an existing collection, whose manifest is checked, ready to be used, by requests of its own."""
        return

    def flush(self) -> None:
        """Make acknowledged changes durable, once after the requests of a write or delete."""
        return

    def check_document(self, fields: Mapping[str, Any], matrix: FloatArray, size: int) -> None:
        """Raise InvalidRequestError for a document that the database cannot store."""
        return

    @contextmanager
    def reading(self, ids: str) -> Iterator[None]:
        """Turn an error from reading stored documents into a SinkError that names them, not the database."""
        try:
            yield
        except (LookupError, TypeError, ValueError) as error:
            raise SinkError(
                f"collection {self.connection.collection!r} holds rows that cannot be read (document {ids}: "
                f"{type(error).__name__}: {error}); check() names them; delete or add them again"
            ) from error


class CollectionIndex(LateInteractionIndex):
    """Token matrices in one collection of a database."""

    def __init__(
        self,
        driver: IndexDriver,
        engine: TokenEngine | None,
        *,
        codec: str,
        prefetch: str | None,
        dimensions: int | None,
        pool_factor: int | None,
    ) -> None:
        super().__init__(engine, dimensions=dimensions, pool_factor=pool_factor)
        self._driver = driver
        self._connection = driver.connection
        self._codec = codec
        self._prefetch = check_prefetch(prefetch, driver.prefetches)
        self._manifest: IndexManifest | None = None
        self._numbering = threading.Lock()
        self._last_added = 0
        try:
            if codec not in driver.codecs:
                raise InvalidRequestError(f"codec={codec!r} is unknown; choose one of {', '.join(driver.codecs)}")
            self._opened()
        except BaseException:
            self.close()
            raise

    @property
    def client(self) -> Any:
        """The database's own client."""
        return self._connection.client

    def __repr__(self) -> str:
        where, collection = self._connection.where, self._connection.collection
        return f"{type(self).__name__}({where!r}, {collection!r}, prefetch={self._prefetch!r})"

    def __len__(self) -> int:
        self._check_open()
        return 0 if self._manifest is None else self._request("a count", self._driver.count)

    def stats(self) -> IndexStats:
        """The size of the index; ``bytes`` is computed from the number of rows."""
        self._check_open()
        manifest = self._manifest
        if manifest is None:
            return IndexStats(documents=0, tokens=0, dimensions=0, codec=self._codec, bytes=0)
        return self._request("a count", lambda: self._driver.stats(manifest))

    def check(self) -> list[str]:
        """A sentence for each fault: vectors that are missing, rows that cannot be read, ids that do not fit."""
        self._check_open()
        manifest = self._manifest
        return [] if manifest is None else self._request("a check", lambda: self._driver.check(manifest))

    def close(self) -> None:
        """Close the client, unless it was passed in; from then on every method raises InvalidRequestError."""
        super().close()
        self._connection.close()

    def _upsert(self, documents: Documents) -> int:
        manifest = self._manifest or self._begun(documents.embeddings.flat.shape[1])
        with self._numbering:  # larger than those of any document before: microseconds, if time allows
            first = max(time.time_ns() // 1000, self._last_added + 1)
            self._last_added = first + len(documents) - 1
        fields, sizes = [], []
        stored = zip(documents.ids, documents.texts, documents.metadata, documents.embeddings, strict=True)
        for added, (id, text, metadata, matrix) in enumerate(stored, start=first):
            row: dict[str, Any] = {"id": id, "text": text, "metadata": metadata, "content_hash": content_hash(text)}
            row |= {"tokens": len(matrix), "added": added}
            fields.append(row)
            text_bytes = len(json.dumps(row, ensure_ascii=False).encode())
            size = text_bytes + self._driver.float_bytes * (matrix.size + manifest.prefetch_width)
            self._driver.check_document(row, matrix, size)
            sizes.append(size)
        points = [point_id(id) for id in documents.ids]
        existing = self._request("a look for stored documents", lambda: self._driver.existing(points))
        for part in slices(sizes, max_rows=self._connection.max_rows, max_bytes=self._connection.max_bytes):
            matrices = documents.embeddings[part]
            encodings = manifest.encode_documents(Ragged.from_matrices(matrices, width=manifest.settings.width))
            rows = [
                IndexRow(point=point, fields=row, matrix=matrix, prefetch=encoding)
                for point, row, matrix, encoding in zip(points[part], fields[part], matrices, encodings, strict=True)
            ]
            words = f"an upsert of {len(rows)} {self._connection.row}s"
            self._request(words, partial(self._driver.write, rows, manifest))
        self._driver.flush()
        return len(points) - existing

    def _delete(self, ids: Sequence[str]) -> int:
        if self._manifest is None:
            return 0
        deleted = 0
        for start in range(0, len(ids), self._connection.max_rows):
            points = [point_id(id) for id in ids[start : start + self._connection.max_rows]]
            words = f"a delete of {len(points)} {self._connection.row}s"
            deleted += self._request(words, partial(self._driver.existing, points))
            self._request(words, partial(self._driver.remove, points))
        self._driver.flush()
        return deleted

    def _search(self, queries: Ragged, search: Search) -> list[list[Hit]]:
        manifest = self._opened()
        results: list[list[Hit]] = [[] for _ in queries]
        asked = [index for index, matrix in enumerate(queries) if len(matrix)]
        if manifest is None or not asked:
            return results
        encodings = manifest.encode_queries(queries)
        candidates = (
            search.candidates if search.candidates is not None else max(self._driver.least_candidates, 20 * search.k)
        )
        found: dict[int, list[Found]] = {index: [] for index in asked}
        for points in _parts(search.ids):
            scores_all = search.exact or manifest.prefetch is None or (points is not None and len(points) <= candidates)
            plans = [
                IndexQuery(
                    matrix=queries[index],
                    prefetch=encodings[index],
                    k=search.k,
                    candidates=None if scores_all else candidates,
                    conditions=search.conditions,
                    points=points,
                )
                for index in asked
            ]
            sizes = [
                self._driver.float_bytes * (plan.matrix.size + plan.prefetch.size) + 80 * len(points or ())
                for plan in plans
            ]
            for part in slices(sizes, max_rows=self._connection.max_rows, max_bytes=self._connection.max_bytes):
                answers = self._request("a search", partial(self._driver.query, plans[part], manifest))
                for index, answer in zip(asked[part], answers, strict=True):
                    found[index] += answer
        for index, answer in found.items():
            best = sorted(answer, key=lambda one: (-one.hit.score, one.added))
            results[index] = [one.hit for one in best[: search.k]]
        return results

    def _ids(self) -> list[str]:
        if self._manifest is None:
            return []
        return [id for _, id in sorted(self._request("a listing of the documents", self._driver.listed))]

    def _delete_matching(self, conditions: Mapping[str, Condition]) -> int:
        if self._manifest is None:
            return 0
        count = self._request("a delete by filter", lambda: self._driver.delete_matching(conditions))
        self._driver.flush()
        return count

    def _stored(self, id: str) -> tuple[str, Mapping[str, Any]] | None:
        if self._manifest is None:
            return None
        return self._request("a look for a document", lambda: self._driver.stored(point_id(id)))

    def _request(self, words: str, call: Callable[[], Answer]) -> Answer:
        super()._check_open()
        try:
            return self._connection.request(words, call)
        except SinkError:
            super()._check_open()  # closed meanwhile, which the client's error does not say
            raise

    def _check_open(self) -> None:
        """As the base; and rows are made as the collection's are, as soon as there is one."""
        super()._check_open()
        self._opened()

    def _opened(self) -> IndexManifest | None:
        """The manifest of the collection, checked when it is read for the first time; ``None`` without a collection."""
        if self._manifest is not None:
            return self._manifest
        with self._connection.creating():
            if not self._request("a look for the collection", self._connection.exists):
                return None
            name = self._connection.collection
            data = self._request("a look at the collection", self._connection.read_manifest)
            manifest = IndexManifest.from_dict(data, collection=name)
            manifest.check_options(codec=self._codec, prefetch=self._prefetch, collection=name)
            self._encoding.restore(manifest.settings, owner=f"collection {name!r}")
            self._driver.prepare(manifest)
            self._manifest = manifest
        return manifest

    def _begun(self, width: int) -> IndexManifest:
        """The manifest of the collection, which is created for documents of this width unless another object has."""
        settings = self._encoding.settings or self._encoding.settings_without_rows(width)
        opened = self._opened()
        if opened is None:
            manifest = IndexManifest.of(settings, codec=self._codec, prefetch=self._prefetch)
            with self._connection.creating():
                self._connection.create(lambda: self._driver.create(manifest))
            opened = self._opened()
        # The projections, too, as a manifest has them.
        if opened is None or replace(opened, settings=settings).to_dict() != opened.to_dict():
            done = "deleted" if opened is None else "created"
            raise SinkError(
                f"collection {self._connection.collection!r} was {done} by another process at the same time; add the "
                "documents again"
            )
        return opened


def _parts(ids: Sequence[str] | None) -> Iterator[list[str] | None]:
    """The database ids of ``ids``, as many as a request takes; ``None`` once if there are no ids."""
    if ids is None:
        yield None
        return
    for start in range(0, len(ids), _MAX_IDS):
        yield [point_id(id) for id in ids[start : start + _MAX_IDS]]
