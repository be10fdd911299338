"""TokenStore: packed token rows of documents in memory, changed by one thread at a time and read by many."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.late_interaction.codecs import kmeans
from millpond.late_interaction.codecs.rows import Codec
from millpond.late_interaction.kernels.centroids import Centroids, nearest, squared_distances
from millpond.late_interaction.memory.blocks import FULL_BLOCK, Batch, Block, View
from millpond.late_interaction.scoring.memory import Memory
from millpond.support.filters import Condition
from millpond.vectors.ragged import Ragged

# Documents from which on codes pay: fewer are compared whole in about the same time.
_CODED_DOCUMENTS = 20_000
# Centroids are trained anew when there are this many times the tokens that they were trained for: these take twice as
# many centroids.
_GROWTH = 4
# They are also trained anew when this share of the rows is farther from its centroid than all but a hundredth of the
# rows were after the training: rows of subjects that came later. It is measured on so many rows, each time there are a
# 64th more.
_FAR_SHARE, _FAR_QUANTILE = 0.04, 0.99
_MEASURED, _MEASURE_AGAIN = 4_096, 1 + 1 / 64
# Deleted documents and rows are kept up to this share of all, or up to so many.
_DEAD_SHARE, _DEAD_DOCUMENTS, _DEAD_ROWS = 0.2, 1_024, 1 << 16
_STEP = 1 << 16  # rows encoded at a time

# A document's place: the serial number of its block, then its number there in these bits.
_NUMBER_BITS = 40


@dataclass(frozen=True, kw_only=True, eq=False)
class Snapshot:
    """The documents at one time. It never changes."""

    views: tuple[View, ...] = ()  # their blocks, those with the documents added earlier first
    centroids: Centroids | None = None  # what the codes of the views refer to; `None` as long as they have none
    trained_tokens: int = 0  # tokens that the centroids were trained for
    # the squared distance from its centroid that a hundredth of the rows exceeded after the training; `None` without
    limit: float | None = None

    @property
    def documents(self) -> int:
        """Documents that are not deleted."""
        return sum(view.live_documents for view in self.views)

    @property
    def tokens(self) -> int:
        """Their rows."""
        return sum(view.live_rows for view in self.views)

    def ids(self) -> list[str]:
        """Their ids, in order."""
        return [id for id, _, _ in self.contents()]

    def contents(self) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
        """Id, text and metadata of each, in order."""
        for view in self.views:
            block = view.block
            for number in view.live_numbers().tolist():
                yield block.ids[number], block.texts[number], block.metadata[number]

    def batches(self) -> Iterator[Batch]:
        """The documents in order, about 65,536 rows at a time."""
        for view in self.views:
            yield from view.batches()


class TokenStore:
    """The documents of an index in memory. A reader takes :attr:`snapshot`; writers wait for each other.

    Args:
        codec: How rows are packed.
        memory: Where the rows are.
        threads: Most threads of the kernels; ``None`` is the number of this process.
    """

    def __init__(self, codec: Codec, memory: Memory, threads: int | None = None) -> None:
        self.codec = codec
        self.memory = memory
        self.threads = threads
        self.snapshot = Snapshot()
        self._places: dict[str, int] = {}
        self._writing = threading.Lock()
        self._publishing = threading.Lock()  # of snapshot and places together: never held for long
        self._training = threading.Lock()
        self._measured_tokens = 0  # when the distances were measured last

    # --------------------------------------------------------------------------------------------------------- reading

    def lookup(self, ids: Iterable[str]) -> tuple[Snapshot, dict[int, list[int]]]:
        """A snapshot, and which of the documents it has: for the serial number of a block their numbers in it."""
        with self._publishing:
            snapshot = self.snapshot
            places = [place for id in ids if (place := self._places.get(id)) is not None]
        return snapshot, _by_block(places)

    def document(self, id: str) -> tuple[str, Mapping[str, Any]] | None:
        """Text and metadata of a document."""
        snapshot, numbers = self.lookup([id])
        for view in snapshot.views:
            for number in numbers.get(view.block.serial, ()):
                return view.block.texts[number], view.block.metadata[number]
        return None

    # --------------------------------------------------------------------------------------------------------- writing

    def upsert(
        self,
        ids: Sequence[str],
        texts: Sequence[str],
        metadata: Sequence[Mapping[str, Any]],
        embeddings: Ragged,
    ) -> int:
        """Add documents of distinct ids, in place of those that have one of them; returns how many ids were new."""
        rows, scales = self.codec.pack(embeddings.flat)
        with self._writing:
            before = self.snapshot
            centroids, flat = before.centroids, embeddings.flat
            batch = Batch(
                ids=ids,
                texts=texts,
                metadata=metadata,
                lengths=embeddings.lengths,
                width=embeddings.flat.shape[1],
                rows=rows,
                scales=scales,
                codes=None if centroids is None else nearest(flat, centroids, threads=self.threads),
            )
            replaced = [place for id in ids if (place := self._places.get(id)) is not None]
            views, places = self._appended(_without(before.views, replaced), batch)
            self._publish(replace(before, views=views), places=places)
            self._compact_if_due()
        return len(ids) - len(replaced)

    def delete(self, ids: Iterable[str]) -> int:
        """Delete documents; returns how many there were."""
        with self._writing:
            return self._remove({id: place for id in ids if (place := self._places.get(id)) is not None})

    def delete_matching(self, conditions: Mapping[str, Condition]) -> int:
        """Delete documents by metadata; returns how many there were."""
        with self._writing:
            ids = []
            for view in self.snapshot.views:
                mask = view.block.table(view.documents).mask(conditions)
                matching = np.flatnonzero(mask if view.live is None else mask & view.live)
                ids += [view.block.ids[number] for number in matching.tolist()]
            return self._remove({id: self._places[id] for id in ids})

    def compact(self) -> None:
        """Give back the memory of deleted documents, one block after the other."""
        with self._writing:
            self._compact(0)

    def train(self) -> None:
        """Train centroids and encode all rows, if the documents have become that many.

        Readers never block; writers block only while centroids are swapped. Concurrent calls train once.
        """
        if not self._training.acquire(blocking=False):
            return
        try:
            snapshot = self.snapshot
            if not self._has_grown(snapshot):
                return
            tokens = sum(view.rows for view in snapshot.views)
            sample = _sample(snapshot.views, kmeans.sample_count(tokens))
            centroids = Centroids.of(kmeans.train(sample, kmeans.centroid_count(tokens), threads=self.threads))
            del sample
            encoded = {view.block.serial: (view.rows, self._codes(view, centroids)) for view in snapshot.views}
            with self._writing:
                now = self.snapshot
                views = []
                for view in now.views:  # some may have grown, others be new
                    rows, codes = encoded.get(view.block.serial, (0, None))
                    views.append(replace(view, codes=self._codes(view, centroids, first=rows, codes=codes)))
                trained = Snapshot(views=tuple(views), centroids=centroids, trained_tokens=tokens)
                self._publish(replace(trained, limit=_limit(trained)))
        finally:
            self._training.release()

    def load(self, batches: Iterable[Batch], tokens: int, centroids: Centroids | None, trained_tokens: int) -> None:
        """Fill the empty store with stored documents of distinct ids, which have ``tokens`` rows."""
        with self._writing:
            snapshot = Snapshot(centroids=centroids, trained_tokens=trained_tokens)
            all_places: dict[str, int] = {}
            for batch in batches:
                views, places = self._appended(snapshot.views, batch, expected=tokens)
                tokens -= len(batch.rows)
                snapshot = replace(snapshot, views=views)
                all_places |= places
            if self.memory.coded:
                snapshot = replace(snapshot, limit=_limit(snapshot))
            self._publish(snapshot, places=all_places)

    # -------------------------------------------------------------------------------------------- while writing is held

    def _publish(
        self, snapshot: Snapshot, *, places: Mapping[str, int] | None = None, removed: Iterable[str] = ()
    ) -> None:
        with self._publishing:
            for id in removed:
                del self._places[id]
            self._places.update(places or {})
            self.snapshot = snapshot

    def _appended(
        self, views: tuple[View, ...], batch: Batch, *, expected: int = 0
    ) -> tuple[tuple[View, ...], dict[str, int]]:
        """The views with more documents, and the places of these. Nothing is visible before it is published.

        A new block has room for as many rows as there are already, or for the ``expected`` ones.
        """
        appended = list(views)
        places: dict[str, int] = {}
        ends = np.cumsum(batch.lengths)
        start = 0
        while start < len(batch):
            rows = int(ends[start - 1]) if start else 0
            stop = start
            if appended and appended[-1].block.takes(batch):
                room = appended[-1].block.capacity - appended[-1].rows
                stop = int(np.searchsorted(ends, rows + room, side="right"))
            if stop == start:
                likely = max(expected, sum(view.rows for view in appended))
                block = Block.of(batch.width, likely, int(ends[start]) - rows, self.codec, self.memory)
                codes = None if batch.codes is None else np.empty(block.capacity, dtype=np.uint16)
                appended.append(block.view(codes))
                continue
            view = appended[-1]
            first = (view.block.serial << _NUMBER_BITS) + view.documents
            appended[-1] = view.block.append(view, batch.part(start, stop))
            places.update(zip(batch.ids[start:stop], range(first, first + stop - start), strict=True))
            start = stop
        return tuple(appended), places

    def _remove(self, places: Mapping[str, int]) -> int:
        if places:
            snapshot = self.snapshot
            self._publish(replace(snapshot, views=_without(snapshot.views, places.values())), removed=places)
            self._compact_if_due()
        return len(places)

    def _compact_if_due(self) -> None:
        views = self.snapshot.views
        rows, documents = sum(view.rows for view in views), sum(view.documents for view in views)
        dead_rows, dead = rows - self.snapshot.tokens, documents - self.snapshot.documents
        if dead_rows > max(_DEAD_SHARE * rows, _DEAD_ROWS) or dead > max(_DEAD_SHARE * documents, _DEAD_DOCUMENTS):
            self._compact(_DEAD_SHARE / 2)  # the share of all is more in some block

    def _compact(self, share: float) -> None:
        """Rewrite the blocks of which more than ``share`` is deleted. Small ones that follow each other become one.

        With a share of 0 that is also done for blocks of which nothing is deleted.
        """
        groups: list[list[View]] = []
        for view in self.snapshot.views:
            group = groups[-1] if groups else []
            if (
                group
                and (share == 0 or min(group[-1].dead_share, view.dead_share) > share)
                and sum(v.live_bytes for v in (*group, view)) <= FULL_BLOCK
            ):
                group.append(view)
            else:
                groups.append([view])
        for group in groups:
            if len(group) > 1 or group[0].dead_share > share:
                self._rewrite(group)

    def _rewrite(self, group: Sequence[View]) -> None:
        """Copy the live documents of blocks that follow each other to a new one, which takes their place."""
        capacity = sum(view.live_rows for view in group)
        widths = [view.block.width for view in group if view.rows]
        block = Block(self.codec, widths[0] if widths else group[0].block.width, capacity, self.memory)
        copy = block.view(None if group[0].codes is None else np.empty(capacity, dtype=np.uint16))
        for view in group:
            for batch in view.batches():
                copy = block.append(copy, batch)
        snapshot = self.snapshot
        serials = {view.block.serial for view in group}
        place = next(i for i, view in enumerate(snapshot.views) if view.block.serial in serials)
        views = [view for view in snapshot.views if view.block.serial not in serials]
        if copy.documents:
            views.insert(place, copy)
        first = block.serial << _NUMBER_BITS
        self._publish(
            replace(snapshot, views=tuple(views)),
            places=dict(zip(block.ids, range(first, first + copy.documents), strict=True)),
        )

    def _codes(
        self, view: View, centroids: Centroids, *, first: int = 0, codes: npt.NDArray[np.uint16] | None = None
    ) -> npt.NDArray[np.uint16]:
        """Codes ``[capacity]`` of a view's rows; those before ``first`` are there."""
        codes = np.empty(view.block.capacity, dtype=np.uint16) if codes is None else codes
        for start in range(first, view.rows, _STEP):
            rows = slice(start, min(start + _STEP, view.rows))
            codes[rows] = nearest(view.unpacked(rows), centroids, threads=self.threads)
        return codes

    def _has_grown(self, snapshot: Snapshot) -> bool:
        if not self.memory.coded or snapshot.documents < _CODED_DOCUMENTS or not snapshot.tokens:
            return False
        if snapshot.centroids is None or snapshot.tokens >= _GROWTH * snapshot.trained_tokens:
            return True
        if snapshot.tokens < _MEASURE_AGAIN * max(self._measured_tokens, snapshot.trained_tokens):
            return False
        self._measured_tokens = snapshot.tokens
        return drift(snapshot) > _FAR_SHARE


def drift(snapshot: Snapshot) -> float:
    """The share of rows that are farther from their centroids than 99 % were after the training."""
    if snapshot.limit is None or not snapshot.tokens:
        return 0.0
    return float((_distances(snapshot, sum(view.rows for view in snapshot.views)) > snapshot.limit).mean())


def _limit(snapshot: Snapshot) -> float | None:
    """The limit, by the oldest rows: those that the centroids were trained for."""
    distances = _distances(snapshot, snapshot.trained_tokens)
    return float(np.quantile(distances, _FAR_QUANTILE)) if len(distances) else None


def _distances(snapshot: Snapshot, first: int) -> npt.NDArray[np.float32]:
    """Squared distances of some of the first rows from their centroids; none without centroids."""
    centroids, start, found = snapshot.centroids, 0, []
    first = min(first, sum(view.rows for view in snapshot.views))
    chosen = np.unique(np.linspace(0, max(first - 1, 0), min(first, _MEASURED)).astype(np.int64))
    for view in snapshot.views if centroids is not None else ():
        some = chosen[(chosen >= start) & (chosen < start + view.rows)] - start
        start += view.rows
        if len(some) and view.codes is not None and centroids is not None:
            found.append(squared_distances(view.unpacked(some), centroids, view.codes[some]))
    return np.concatenate(found) if found else np.empty(0, dtype=np.float32)


def _by_block(places: Iterable[int]) -> dict[int, list[int]]:
    """For the serial number of a block the numbers of the documents in it."""
    numbers: dict[int, list[int]] = {}
    for place in places:
        numbers.setdefault(place >> _NUMBER_BITS, []).append(place & ((1 << _NUMBER_BITS) - 1))
    return numbers


def _without(views: tuple[View, ...], places: Iterable[int]) -> tuple[View, ...]:
    """The views after the documents at ``places`` were deleted."""
    numbers = _by_block(places)
    return tuple(
        view.without(np.array(numbers[view.block.serial])) if view.block.serial in numbers else view for view in views
    )


def _sample(views: Sequence[View], count: int) -> npt.NDArray[np.float32]:
    """About ``count`` random rows, the same for the same views."""
    ends = np.cumsum([view.rows for view in views])
    chosen = np.unique(np.random.default_rng(0).integers(ends[-1], size=count))
    bounds = np.searchsorted(chosen, ends)
    starts = ends - [view.rows for view in views]
    parts = np.split(chosen, bounds[:-1])
    return np.concatenate(
        [view.unpacked(part - start) for view, part, start in zip(views, parts, starts, strict=True) if len(part)]
    )
