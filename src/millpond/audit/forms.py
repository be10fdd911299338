"""Form: how the numbers of stored vectors stand for a direction, and how near two directions have to be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from millpond.ingest.sinks.batch import FloatArray

FormKind = Literal["float", "uint8", "int8", "binary"]
Codes = npt.NDArray[np.uint8]

PRECISIONS = ("float32", "float16", "bfloat16", "int8", "whole numbers", "signs")
"""What a row's values were rounded to, by the number that :func:`precisions` gives."""

# Largest distance of two unit vectors that are the same but for rounding of each kind, stored or computed. Of MiniLM's
# it is 3e-7 between two backends in float32, 3e-4 in float16, 2e-3 stored and 1e-2 computed in bfloat16, 1e-2 in int8;
# of another text, prompt or pooling 0.1 and more.
LEVELS: Sequence[tuple[str, float]] = (("float32", 1e-4), ("float16", 1e-3), ("bfloat16", 2e-2), ("int8", 0.08))
LOOSE = LEVELS[-1][1]
EQUAL = 3e-3
"""Largest distance of equal vectors in :meth:`Form.table`, which computes it from a cosine in float32."""

_SIGNS = 0.3  # of binary vectors: one sign in fifty
_PREFIX = 16  # columns by which most rows are known not to be rounded
_UNIT = 0.01


@dataclass(frozen=True, kw_only=True)
class Form:
    """The form of most vectors of a collection.

    Attributes:
        kind: ``float``, whole numbers ``uint8`` or ``int8``, or ``binary`` (two values, or bits in bytes).
        width: How many numbers a row has.
        used: How many of them are not padding with zeros.
        unit: Whether rows have length 1.
        rounded: What most numbers were rounded to, of :data:`PRECISIONS`.
    """

    kind: FormKind
    width: int
    used: int
    unit: bool
    rounded: str = "float32"

    @classmethod
    def of(cls, rows: FloatArray) -> Form:
        """The form of most of some rows ``[n, width]``."""
        width = rows.shape[1]
        good = rows[np.isfinite(rows).all(axis=1) & rows.any(axis=1)]
        if not len(good):
            return cls(kind="float", width=width, used=width, unit=False)
        used = int(np.median(width - trailing_zeros(good)))
        used = used if width - used >= max(2, width // 16) else width
        head = good[:, :used]
        unit = bool(np.mean(np.abs(np.linalg.norm(head, axis=1) - 1) < _UNIT) >= 0.5)
        codes = precisions(head)
        kind: FormKind = "float"
        if np.mean(codes == PRECISIONS.index("signs")) > 0.5 or np.mean(_two_valued(head)) > 0.5:
            kind = "binary"
        elif np.mean(codes == PRECISIONS.index("whole numbers")) > 0.5 and not unit:
            whole = head[codes == PRECISIONS.index("whole numbers")]
            low, high = float(whole.min()), float(whole.max())
            kind = "uint8" if low >= 0 and high <= 255 else "int8" if low >= -128 and high <= 127 else "float"
        usual = int(np.bincount(codes, minlength=len(PRECISIONS)).argmax())
        return cls(kind=kind, width=width, used=used, unit=unit, rounded=PRECISIONS[usual])

    @property
    def loose(self) -> float:
        """The largest distance of a row that may be by a setting at all."""
        return _SIGNS if self.kind == "binary" else LOOSE

    def fits(self, dimensions: int) -> bool:
        """Whether vectors of a model as wide as this can have been stored so."""
        return self.used <= dimensions or self._is_packed(dimensions)

    def distances(self, stored: FloatArray, expected: FloatArray) -> FloatArray:
        """``[n]``: how far stored rows ``[n, width]`` are from a model's ``[n, dimensions]``, as unit vectors.

        Of binary vectors, twice the root of the share of signs that differ.
        """
        own, computed = self.directions(stored, expected.shape[1]), self.expected(expected)
        return np.asarray(np.linalg.norm(own - computed, axis=1), dtype=np.float32)

    def table(self, stored: FloatArray, expected: FloatArray) -> FloatArray:
        """``[n, m]``: as :meth:`distances`, of each row to each of ``expected [m, dimensions]``."""
        computed = self.expected(expected).astype(np.float32)
        cosines = self.directions(stored, expected.shape[1], np.float32) @ computed.T  # right to 1e-6
        return np.asarray(np.nan_to_num(np.sqrt(np.maximum(0, 2 - 2 * cosines)), nan=2.0), dtype=np.float32)

    def directions(self, stored: FloatArray, dimensions: int, dtype: Any = np.float64) -> Any:
        """Stored rows as unit vectors, for a model as wide as ``dimensions``."""
        head: Any = np.nan_to_num(stored[:, : self.used].astype(dtype), posinf=0, neginf=0)
        if self._is_packed(dimensions):
            bits = (head + (128 if self.kind == "int8" else 0)).clip(0, 255).astype(np.uint8)
            head = np.unpackbits(bits, axis=1)[:, :dimensions] * 2.0 - 1
        elif self.kind == "uint8":
            head = head - 128
        elif self.kind == "binary":
            head = np.where(head > 0, 1.0, -1.0)
        return _unit(head)

    def expected(self, rows: FloatArray) -> Any:
        """A model's rows as unit vectors in float64, cut to the stored width; of binary vectors their signs."""
        packed = self._is_packed(rows.shape[1])
        head = rows if packed else rows[:, : self.used]
        return _unit(np.where(head > 0, 1.0, -1.0) if self.kind == "binary" or packed else head.astype(np.float64))

    def words(self, dimensions: int) -> str:
        """The width and the kind, for people."""
        if self._is_packed(dimensions):
            return f"{dimensions} signs in {self.used} bytes"
        cut = f" of {dimensions}" if self.used < dimensions else ""
        padded = f", padded with zeros to {self.width}" if self.used < self.width else ""
        return f"{self.used}{cut}{padded}"

    def _is_packed(self, dimensions: int) -> bool:
        return self.kind in ("uint8", "int8") and (dimensions + 7) // 8 == self.used


def precisions(rows: FloatArray) -> Codes:
    """``[n]``: what rows ``[n, width]`` were rounded to, as an index of :data:`PRECISIONS`."""
    codes = np.zeros(len(rows), dtype=np.uint8)
    if not rows.size:
        return codes
    largest = np.maximum(rows.max(axis=1), -rows.min(axis=1))
    rounded = _rounded(rows[:, :_PREFIX], largest)
    for code, maybe in rounded:  # the coarser ones last
        (places,) = np.nonzero(maybe & (largest > 0))
        if len(places):
            exact = dict(_rounded(rows[places], largest[places]))[code]
            codes[places[exact]] = code
    return codes


def _rounded(rows: FloatArray, largest: FloatArray) -> list[tuple[int, npt.NDArray[np.bool_]]]:
    """For each precision but float32, which rows have it."""
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        half = (rows.astype(np.float16).astype(np.float32) == rows).all(axis=1)
        brain = ((np.ascontiguousarray(rows).view(np.uint32) & 0xFFFF) == 0).all(axis=1)
        eight = np.zeros(len(rows), dtype=np.bool_)
        for step in (largest[:, None] / 127, np.float32(1 / 127), np.float32(1 / 128)):
            steps = rows / step
            eight |= (np.abs(steps - np.rint(steps)) < 1e-3).all(axis=1) & (np.abs(steps) > 0.5).any(axis=1)
        whole = (np.rint(rows) == rows).all(axis=1)
        sizes = np.abs(rows)
        signs = (np.abs(sizes - sizes[:, :1]) <= 1e-6 * sizes[:, :1]).all(axis=1) & (sizes[:, 0] > 0)
    return [(1, half), (2, brain), (3, eight), (4, whole), (5, signs)]


def trailing_zeros(rows: FloatArray) -> npt.NDArray[np.int32]:
    """``[n]``: how many zeros end each row ``[n, width]``."""
    counts = np.zeros(len(rows), dtype=np.int32)
    places = np.flatnonzero(rows[:, -1] == 0) if rows.shape[1] else np.zeros(0, dtype=np.intp)
    if len(places):
        nonzero = rows[places, ::-1] != 0
        counts[places] = np.where(nonzero.any(axis=1), nonzero.argmax(axis=1), rows.shape[1])
    return counts


def _two_valued(rows: FloatArray) -> npt.NDArray[np.bool_]:
    return np.asarray(np.isin(rows, (0, 1)).all(axis=1), dtype=np.bool_)


def _unit(rows: Any) -> Any:
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-30)
