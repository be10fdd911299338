"""Rotation: cosines and sines of rotary positions, in tables that grow with the longest text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.backends.native import structs
from millpond.backends.native.packing.weight_packer import Indexes, NotSupported, padded
from millpond.errors import ModelLoadError
from millpond.support.fork import ProcessLock

# Positions that a table has at first. A model may have a million, and most texts are short.
_FIRST = 512

Floats = npt.NDArray[np.float32]


class Rotation:
    """The tables of one base, float32 ``[positions, dim / 2]``.

    A larger pair of tables replaces a smaller one. The smaller one stays in memory for the calls that read it, so all
    tables together have less than twice the size of the largest.
    """

    def __init__(self, frequencies: npt.NDArray[np.floating[Any]], scale: float = 1.0) -> None:
        self.frequencies = frequencies
        # Columns without an angle are not turned, nor scaled.
        self.scales = np.where(frequencies > 0, np.float32(scale), np.float32(1))
        self.turned = 2 * int(np.count_nonzero(frequencies))  # columns of a head
        self._steps: list[structs.Step] = []
        self._tables: list[Floats] = []
        self._lock = ProcessLock()
        self.positions = 0
        self.cover(_FIRST)

    def serve(self, step: structs.Step) -> None:
        """Let a step read the tables, now and when they have grown."""
        with self._lock:
            self._steps.append(step)
            self.place(step)

    def place(self, step: structs.Step) -> None:
        """Let a step read the tables that there are."""
        step.cosines, step.sines = (table.ctypes.data for table in self._tables[-2:])

    def cover(self, positions: int) -> None:
        """Let the tables have at least so many positions; any thread may call it, during forward passes too."""
        if positions <= self.positions:
            return
        with self._lock:
            if positions <= self.positions:
                return
            count = max(positions, 2 * self.positions)
            tables = self.tables(count)
            self._tables += tables
            for step in self._steps:
                step.cosines, step.sines = (table.ctypes.data for table in tables)
            self.positions = count

    def tables(self, positions: int) -> tuple[Floats, Floats]:
        """Cosines and sines of the first positions.

        Angles have the frequencies' precision, float32 where transformers computes them; their cosines and sines are
        correctly rounded.
        """
        angles = np.arange(positions, dtype=np.float32)[:, None] * self.frequencies
        exact = angles.astype(np.float64)
        cosines, sines = (part(exact).astype(np.float32) * self.scales for part in (np.cos, np.sin))
        return cosines, sines


def rotation_of(rope: Mapping[str, Any], dim: int, *, most: int | None = None, partial: bool = False) -> Rotation:
    """The rotation of heads of ``dim`` columns by a config's ``rope_parameters``; ``most``: the model's positions.

    The halves of a head end with columns of zeros, up to those that the kernels compute. With ``partial`` before them
    are columns that are not turned, as :func:`part_first` orders a head's columns.
    """
    kind = rope.get("rope_type", "default")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise NotSupported(f"rotary positions of type {kind}")
    angles, scale = frequencies(rope, dim, most=most, partial=partial)
    if 2 * len(angles) != dim and not partial:
        raise NotSupported(f"rotary positions of {2 * len(angles)} of the {dim} columns of a head")
    return Rotation(np.pad(angles, (0, padded(dim) // 2 - len(angles))), scale)


def part_first(heads: int, dim: int, turned: int) -> Indexes:
    """The order of the columns of heads that puts the first half of those that are turned first in each half."""
    rows = np.arange(heads * dim).reshape(heads, dim)
    part, rest = np.split(rows[:, :turned], 2, axis=1), np.split(rows[:, turned:], 2, axis=1)
    return np.concatenate([part[0], rest[0], part[1], rest[1]], axis=1).reshape(-1)


def frequencies(
    rope: Mapping[str, Any], dim: int, *, most: int | None = None, partial: bool = False
) -> tuple[Floats, float]:
    """Angles of a position's pairs of columns, float32 ``[dim / 2]``, and the factor of all cosines and sines."""
    kind = rope.get("rope_type", "default")
    # As in transformers, the default type has no such part, but in a few families.
    part = 1.0 if kind == "default" and not partial else float(rope.get("partial_rotary_factor") or 1.0)
    try:
        return _KINDS[kind](rope, int(dim * part), most)
    except KeyError as error:
        raise ModelLoadError(f"config.json has no {error.args[0]} for rotary positions of type {kind!r}") from error


def _default(rope: Mapping[str, Any], dim: int, most: int | None) -> tuple[Floats, float]:
    return np.float32(1) / _powers(rope, dim), 1.0


def _linear(rope: Mapping[str, Any], dim: int, most: int | None) -> tuple[Floats, float]:
    return np.float32(1) / _powers(rope, dim) / np.float32(rope["factor"]), 1.0


def _llama3(rope: Mapping[str, Any], dim: int, most: int | None) -> tuple[Floats, float]:
    frequencies, factor = np.float32(1) / _powers(rope, dim), np.float32(rope["factor"])
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    trained = rope["original_max_position_embeddings"]
    lengths = np.float32(2 * math.pi) / frequencies
    slowed = np.where(lengths > np.float32(trained / low), frequencies / factor, frequencies)
    share = (np.float32(trained) / lengths - np.float32(low)) / np.float32(high - low)
    smooth = (1 - share) * slowed / factor + share * slowed
    medium = ~(lengths < np.float32(trained / high)) & ~(lengths > np.float32(trained / low))
    return np.where(medium, smooth, slowed), 1.0


def _longrope(rope: Mapping[str, Any], dim: int, most: int | None) -> tuple[Floats, float]:
    """The angles of texts no longer than those of the first training, where the families that have it end texts."""
    factor, scale = float(rope["factor"]), rope.get("attention_factor")
    if scale is None:
        trained = math.log(rope["original_max_position_embeddings"])
        scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / trained)
    return np.float32(1) / (np.array(rope["short_factor"], np.float32) * _powers(rope, dim)), float(scale)


def _yarn(rope: Mapping[str, Any], dim: int, most: int | None) -> tuple[Floats, float]:
    trained = rope["original_max_position_embeddings"]
    factor = float(rope.get("factor") or (most or trained) / trained)
    base = float(rope["rope_theta"])

    def place(rotations: float) -> float:
        return float(dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(base)))

    low, high = place(rope.get("beta_fast") or 32), place(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high = high + 0.001 if low == high else high
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low), 0, 1)
    powers, kept = _powers(rope, dim), 1 - ramp
    slowed = np.float32(1) / (np.float32(factor) * powers)
    return slowed * (1 - kept) + np.float32(1) / powers * kept, _yarn_scale(rope, factor)


def _yarn_scale(rope: Mapping[str, Any], factor: float) -> float:
    given, both = rope.get("attention_factor"), [float(rope.get(name) or 0) for name in ("mscale", "mscale_all_dim")]
    if given is not None:
        return float(given)

    def growth(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    return growth(both[0]) / growth(both[1]) if all(both) else growth(1.0)


def _powers(rope: Mapping[str, Any], dim: int) -> Floats:
    """The base to the powers of the pairs of columns, rounded once."""
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    powers: Floats = (np.float64(rope["rope_theta"]) ** exponents.astype(np.float64)).astype(np.float32)
    return powers


_KINDS = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn, "longrope": _longrope}
