"""FolderIndex: the units of a folder, as its files are now, searched by meaning and by words."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from millpond.errors import InvalidRequestError
from millpond.ingest.units.split import language_of, split
from millpond.ingest.units.unit import Unit
from millpond.late_interaction.plaid.storage.lock import WriteLock
from millpond.mcp.folder.store import NewUnit, Snapshot, StoredFile, StoredUnit, UnitStore
from millpond.mcp.folder.vectors import VectorTable
from millpond.mcp.folder.walk import Content, Listing, list_files, read_file
from millpond.mcp.folder.words import expression, words_of_name
from millpond.support.filters import check_filter, matches_filter

if TYPE_CHECKING:
    from collections.abc import Callable

    from millpond.engine.engine import Engine

logger = logging.getLogger(__name__)

FORMAT = 1
"""Of the units and what is embedded of them; with another one, folders are read anew."""

_BATCH_FILES, _BATCH_CHARACTERS = 64, 1 << 18  # of one transaction
_CANDIDATES = 100  # of each ranking
_FUSION = 60  # reciprocal ranks: 1 / (60 + rank), as in the databases


@dataclass(frozen=True, kw_only=True)
class FoundUnit:
    """A unit of an answer."""

    unit: StoredUnit
    score: float  # fused
    cosine: float | None  # of the question's vector and the unit's; None if only words found it


class FolderIndex:
    """The index of a folder.

    Args:
        root: The folder.
        store: The file of the index.
        engine: Waits for the engine, and returns it.
    """

    def __init__(self, root: Path, store: UnitStore, engine: Callable[[], Engine]) -> None:
        self.root = root
        self.store = store
        self.skipped: Counter[str] = Counter()
        self.done, self.total = 0, 0  # files of the update that is running
        self._engine = engine
        self._lock = WriteLock(store.path.with_suffix(".lock"))
        self._table = VectorTable()
        self._searching = threading.Lock()
        self._stopped = False
        self._files: tuple[dict[str, StoredFile], tuple[str, int]] = {}, ("", -1)

    def update(self) -> None:
        """Bring the index up to date with the folder: what is changed, new and deleted since the last time."""
        if not self.root.is_dir():  # an unmounted disk is no folder of deleted files
            raise InvalidRequestError(f"the folder {str(self.root)!r} is not there; start again where it is")
        stored, before = self._stored()
        listing = list_files(self.root)
        if _changed(listing, stored) or stored.keys() - listing.files.keys():
            with self._lock.held(threading.TIMEOUT_MAX):
                stored, state = self._stored()
                if state != before:  # another process has done it meanwhile, or more
                    listing = list_files(self.root)
                self._update(listing, stored)
            stored, _ = self._stored()
        skipped = listing.skipped.copy()
        skipped.update(file.skipped for file in stored.values() if file.skipped is not None)
        self.skipped = skipped

    def stop(self) -> None:
        """End an update after the batch of files that it is at; the next process goes on from there."""
        self._stopped = True

    def _stored(self) -> tuple[dict[str, StoredFile], tuple[str, int]]:
        """The files that were read, which are read again only after a change, and the state that they are of."""
        with self.store.reading() as snapshot:
            state = snapshot.state()
            if state != self._files[1]:
                self._files = snapshot.files(), state
        return self._files

    def _update(self, listing: Listing, stored: Mapping[str, StoredFile]) -> None:
        changed = _changed(listing, stored)
        self.done, self.total = 0, len(changed)
        gone = stored.keys() - listing.files.keys()
        for batch in _batches(self._contents(changed, gone), self._count):
            if self._stopped:
                return
            same = {path: new for path, new in batch.items() if path in stored and stored[path].digest == new.digest}
            if same:
                self.store.touch(same)
            if len(same) < len(batch):
                self._write({path: new for path, new in batch.items() if path not in same})
        if gone:  # last: their vectors are those of files that were moved
            self.store.forget(gone)
        if self.total >= _BATCH_FILES:
            logger.info("%s: %d files are indexed", self.root, self.total)

    def _count(self) -> None:
        self.done += 1

    def _contents(self, paths: Iterable[str], gone: set[str]) -> Iterator[tuple[str, Content]]:
        for path in paths:
            content = read_file(self.root, path)
            if content is None:
                gone.add(path)
            else:
                yield path, content

    def _write(self, contents: Mapping[str, Content]) -> None:
        """Split, embed and store files; a text that is stored already, as of a moved file, is not embedded again."""
        units = {path: list(split(path, content.text)) for path, content in contents.items()}
        texts = {path: [embedded_text(path, unit) for unit in found] for path, found in units.items()}
        digests = {
            path: [blake2b(text.encode(), digest_size=16).digest() for text in all_] for path, all_ in texts.items()
        }
        wanted = {digest: text for path in texts for digest, text in zip(digests[path], texts[path], strict=True)}
        vectors = self.store.vectors(list(wanted))
        new = [digest for digest in wanted if digest not in vectors]
        if new:
            log = logging.getLogger("millpond.engine.schedule.truncation")
            log.disabled, before = (
                True,
                log.disabled,
            )  # a unit that is longer than the model reads is found by its words
            try:
                rows = self._engine().embed([wanted[digest] for digest in new], role="document", normalize=True)
            finally:
                log.disabled = before
            vectors.update(zip(new, np.asarray(rows.embeddings, np.float32), strict=True))
        self.store.write(
            {
                path: (
                    content,
                    [
                        NewUnit(unit, digest, vectors[digest])
                        for unit, digest in zip(units[path], digests[path], strict=True)
                    ],
                )
                for path, content in contents.items()
            }
        )

    def search(self, question: str, *, k: int, filter: Mapping[str, object] | None = None) -> list[FoundUnit]:
        """The best units for a question, as of the last update: two rankings, fused by reciprocal rank."""
        conditions = check_filter(filter or {})
        query = np.asarray(self._engine().embed([question], role="query", normalize=True).embeddings[0], np.float32)
        most = max(_CANDIDATES, 2 * k)
        with self._searching, self.store.reading() as snapshot:
            self._table.refresh(snapshot)
            allowed = _allowed(snapshot, conditions) if conditions else None
            accepted = None if allowed is None else (lambda rows: np.isin(rows, allowed))
            near = self._table.nearest(query, most, accepted)
            asked = expression(question)
            by_words = [] if asked is None else snapshot.ranked_by_words(asked, most if allowed is None else 1 << 30)
            if allowed is not None:
                members = set(allowed.tolist())
                by_words = [each for each in by_words if each[0] in members][:most]
            scores = fuse([[row for row, _ in near], [row for row, _ in by_words]])
            best = sorted(scores, key=lambda row: (-scores[row], row))[:k]
            units = snapshot.units(best)
        cosines = dict(near)
        return [FoundUnit(unit=units[row], score=scores[row], cosine=cosines.get(row)) for row in best]

    def unit(self, id: str) -> StoredUnit | None:
        """A unit by its id."""
        path, _, lines = id.rpartition(":")
        lines, _, part = lines.partition("#")
        first, dash, last = lines.partition("-")
        if not (path and dash and first.isdecimal() and last.isdecimal() and (part or "0").isdecimal()):
            return None
        if max(len(first), len(last), len(part)) > 9:
            return None
        with self.store.reading() as snapshot:
            return snapshot.unit(path, int(first), int(last), int(part or 0))

    def size(self) -> tuple[int, int]:
        """Files and units."""
        with self.store.reading() as snapshot:
            return snapshot.sizes()


def metadata_of(unit: StoredUnit) -> dict[str, Any]:
    """What a filter compares: path, the folders above it, kind, name, language and lines."""
    parents = unit.path.split("/")[:-1]
    return {
        "path": unit.path,
        "folder": ["/".join(parents[: depth + 1]) for depth in range(len(parents))],
        "language": language_of(unit.path),
        "kind": unit.kind,
        "name": unit.name,
        "first_line": unit.first,
        "last_line": unit.last,
    }


def embedded_text(path: str, unit: Unit) -> str:
    """What the model reads of a unit: the words of its name, where it is, and its text."""
    return "\n".join(each for each in (" ".join(words_of_name(unit.name)), path, unit.head, unit.text) if each)


def fuse(rankings: Sequence[Sequence[int]]) -> dict[int, float]:
    """The sum of the reciprocal ranks of each row."""
    scores: dict[int, float] = {}
    for ranking in rankings:
        for rank, row in enumerate(ranking, start=1):
            scores[row] = scores.get(row, 0.0) + 1 / (_FUSION + rank)
    return scores


def _changed(listing: Listing, stored: Mapping[str, StoredFile]) -> list[str]:
    return [
        path
        for path, stamp in listing.files.items()
        if (known := stored.get(path)) is None or not known.is_proven_by(stamp)
    ]


def _batches(items: Iterable[tuple[str, Content]], count: Callable[[], None]) -> Iterator[dict[str, Content]]:
    """Files of a transaction; ``count`` is called for each file when its batch is done."""
    batch: dict[str, Content] = {}
    size = 0
    for path, content in items:
        batch[path] = content
        size += len(content.text)
        if len(batch) == _BATCH_FILES or size > _BATCH_CHARACTERS:
            yield batch
            for _ in batch:
                count()
            batch, size = {}, 0
    if batch:
        yield batch


def _allowed(snapshot: Snapshot, conditions: Mapping[str, Any]) -> Any:
    """The rows of the units that a filter accepts."""
    rows = [unit.row for unit in snapshot.all_units() if matches_filter(metadata_of(unit), conditions)]
    return np.array(rows, np.int64)
