"""Scan: one pass over every row, with the tests that need no model, and a random sample of the rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.audit.forms import Form, precisions, trailing_zeros
from millpond.audit.rows import Row, TextField
from millpond.ingest.sinks.batch import FloatArray
from millpond.ingest.sinks.raw_rows import RawPage, RawRows, VectorField

Bools = npt.NDArray[np.bool_]

_SEED = 20_261_124  # of the random order: the same collection has the same sample
_FIRST_ROWS = 64  # by which the field of the text is found


@dataclass(frozen=True, kw_only=True, eq=False)
class Scan:
    """What is known of every row.

    Attributes:
        ids: ``n`` ids, in the order of the database.
        norms: ``[n]`` float32.
        present: ``[n]``, which rows have a vector.
        finite: ``[n]``, which have no NaN and no infinity.
        zeros: ``[n]``, how many zeros end each vector.
        precision: ``[n]``, as :func:`~millpond.audit.forms.precisions`.
        blank: ``[n]``, which have no text, or an empty one.
        stale: ``[n]``, whose text has another hash than the one that millpond stored with it.
        vector_hash: ``[n]``, equal for equal vectors.
        text_hash: ``[n]``, equal for equal texts.
        sample: Rows in a random order.
        text: Where the text is; ``None`` if no field looks like texts.
    """

    ids: list[str]
    norms: FloatArray
    present: Bools
    finite: Bools
    zeros: npt.NDArray[np.int32]
    precision: npt.NDArray[np.uint8]
    blank: Bools
    stale: Bools
    vector_hash: npt.NDArray[np.uint64]
    text_hash: npt.NDArray[np.int64]
    sample: list[Row] = field(repr=False)
    text: TextField | None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def vectors(self) -> Bools:
        """``[n]``: which rows have a vector with a direction."""
        return self.present & self.finite & (self.norms > 0)

    def duplicates(self) -> dict[int, list[int]]:
        """For each row whose vector another row with another text has: those rows."""
        places = np.flatnonzero(self.vectors)
        order = places[np.argsort(self.vector_hash[places], kind="stable")]
        hashes = self.vector_hash[order]
        starts = np.flatnonzero(np.append(True, hashes[1:] != hashes[:-1])) if len(order) else order
        sizes = np.diff(np.append(starts, len(order)))
        found: dict[int, list[int]] = {}
        for start, size in zip(starts[sizes > 1].tolist(), sizes[sizes > 1].tolist(), strict=True):
            group = order[start : start + size]
            if len(np.unique(self.text_hash[group])) > 1:
                found |= dict.fromkeys(group.tolist(), group.tolist())
        return found


def scan(
    rows: RawRows,
    vectors: VectorField,
    *,
    text: str | None,
    hashed: bool,
    sample: int,
    advance: Callable[[int], object] = lambda rows: None,
) -> Scan:
    """Go through every row once.

    Args:
        rows: The collection.
        vectors: The vectors to look at.
        text: The field of the text; ``None`` for a guess.
        hashed: Whether millpond made the collection.
        sample: Most rows of the sample.
        advance: Called with the number of rows that were read.

    Returns:
        What is known of every row.

    Raises:
        SinkError: The database does not answer.
        InvalidRequestError: No row has such a field.
    """
    columns: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
    ids: list[str] = []
    found: TextField | None = None
    chosen = _Sample(sample)
    for page in rows.pages(vectors):
        if not ids:
            found = TextField.find(page.fields[:_FIRST_ROWS], text, hashed=hashed)
        texts = [None if found is None else found.of(each) for each in page.fields]
        hashes = [""] * len(page) if found is None else [found.hash_of(each) for each in page.fields]
        for name, values in _tests(page, texts, hashes).items():
            columns[name].append(values)
        chosen.offer(page, texts, first=len(ids))
        ids += page.ids
        advance(len(page))
    joined = {name: np.concatenate(parts) if parts else np.zeros(0, _COLUMNS[name]) for name, parts in columns.items()}
    return Scan(ids=ids, sample=chosen.rows(), text=found, **joined)


def read_rows(rows: RawRows, vectors: VectorField, wanted: Iterable[str], text: TextField | None) -> list[Row]:
    """Rows by their ids, in a pass over all of them: any database has that."""
    ids = set(wanted)
    return (
        list(chosen_rows(rows, vectors, text, lambda page, _: np.array([row_id in ids for row_id in page.ids])))
        if ids
        else []
    )


def chosen_rows(
    rows: RawRows, vectors: VectorField, text: TextField | None, choose: Callable[[RawPage, int], Bools]
) -> Iterator[Row]:
    """The rows that ``choose(page, place of its first row)`` is true of, in a pass over all of them."""
    first = 0
    for page in rows.pages(vectors):
        for index in np.flatnonzero(choose(page, first)).tolist():
            yield _row(page, index, None if text is None else text.of(page.fields[index]), first)
        first += len(page)


def every_row(rows: RawRows, vectors: VectorField, text: TextField | None) -> Iterator[Row]:
    """Every row, in the order of the database."""
    return chosen_rows(rows, vectors, text, lambda page, _: np.ones(len(page), dtype=np.bool_))


_COLUMNS: Mapping[str, Any] = {
    "norms": np.float32,
    "present": np.bool_,
    "finite": np.bool_,
    "zeros": np.int32,
    "precision": np.uint8,
    "blank": np.bool_,
    "stale": np.bool_,
    "vector_hash": np.uint64,
    "text_hash": np.int64,
}


def _tests(page: RawPage, texts: list[str | None], hashes: list[str]) -> dict[str, Any]:
    """The columns of a page."""
    rows = page.vectors
    with np.errstate(over="ignore", invalid="ignore"):
        squares = np.einsum("nd,nd->n", rows, rows, dtype=np.float32)
    finite = np.isfinite(squares)
    for index in np.flatnonzero(~finite):  # large numbers have no square in float32
        finite[index] = np.isfinite(rows[index]).all()
    return {
        "norms": np.sqrt(np.where(np.isfinite(squares), squares, 0)),
        "present": page.present,
        "finite": finite,
        "zeros": trailing_zeros(rows),
        "precision": precisions(rows),
        "blank": np.array([not text for text in texts], dtype=np.bool_),
        "stale": np.array([bool(known) and known != _hash(text) for text, known in zip(texts, hashes, strict=True)]),
        "vector_hash": _hashes(rows),
        "text_hash": np.array([hash(text) for text in texts], dtype=np.int64),
    }


def _hash(text: str | None) -> str:
    return sha256((text or "").encode(errors="surrogatepass")).hexdigest()


def _hashes(rows: FloatArray) -> npt.NDArray[np.uint64]:
    """``[n]``: a hash of the bits of each row, by multiplication with odd numbers modulo 2**64; -0 is 0."""
    odd = np.random.default_rng(_SEED).integers(0, 1 << 63, rows.shape[1], dtype=np.uint64) * np.uint64(2) + np.uint64(
        1
    )
    bits = np.ascontiguousarray(rows + np.float32(0)).view(np.uint32)
    return np.asarray(np.einsum("nd,d->n", bits, odd, dtype=np.uint64, casting="unsafe"), dtype=np.uint64)


class _Sample:
    """The rows with the least of random numbers: each row has the same chance, and the order is random."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._random = np.random.default_rng(_SEED)
        self._kept: list[tuple[float, Row]] = []
        self._limit = np.inf

    def offer(self, page: RawPage, texts: list[str | None], *, first: int) -> None:
        """The rows of a page."""
        drawn = self._random.random(len(page))
        for index in np.flatnonzero(drawn < self._limit).tolist():
            self._kept.append((float(drawn[index]), _row(page, index, texts[index], first)))
        if len(self._kept) >= 2 * self._size:
            self._trim()

    def rows(self) -> list[Row]:
        """The sample."""
        self._trim()
        return [row for _, row in self._kept]

    def _trim(self) -> None:
        self._kept = sorted(self._kept, key=lambda item: item[0])[: self._size]
        if len(self._kept) == self._size and self._kept:
            self._limit = self._kept[-1][0]


def _row(page: RawPage, index: int, text: str | None, first: int) -> Row:
    return Row(
        index=first + index,
        id=page.ids[index],
        text=text,
        vector=page.vectors[index].copy(),
        fields=page.fields[index],
    )


def modal_zeros(scan: Scan, form: Form) -> int:
    """How many zeros may end a vector: the padding of all, and an accident or two."""
    return form.width - form.used + max(2, form.width // 16)
