"""What the numbers of stored vectors tell: rounding, padding, and directions."""

from __future__ import annotations

import numpy as np
import pytest

from millpond.audit.forms import EQUAL, LEVELS, LOOSE, PRECISIONS, Form, precisions, trailing_zeros
from millpond.vectors.quantization import eight_bits, quantize


@pytest.fixture
def rows() -> np.ndarray:
    found = np.random.default_rng(3).standard_normal((40, 64)).astype(np.float32)
    return found / np.linalg.norm(found, axis=1, keepdims=True)


def bfloat16(rows: np.ndarray) -> np.ndarray:
    return ((np.ascontiguousarray(rows).view(np.uint32) + 0x8000) & 0xFFFF0000).view(np.float32)


def test_rounding_is_seen_in_the_values(rows: np.ndarray):
    largest = np.abs(rows).max(axis=1, keepdims=True)
    made = {
        "float32": rows,
        "float16": rows.astype(np.float16).astype(np.float32),
        "bfloat16": bfloat16(rows),
        "int8": np.rint(rows / largest * 127) / 127 * largest,
        "whole numbers": np.rint(rows * 100),
        "signs": np.where(rows > 0, 0.3, -0.3).astype(np.float32),
    }
    for name, values in made.items():
        found = precisions(values.astype(np.float32))
        assert set(found.tolist()) == {PRECISIONS.index(name)}, name
    mixed = np.concatenate([rows[:5], made["float16"][:5]])
    mixed[7, 40] += 1e-5  # one number that is not rounded
    assert [PRECISIONS[code] for code in precisions(mixed)] == ["float32"] * 5 + ["float16"] * 2 + ["float32"] + [
        "float16"
    ] * 2
    assert precisions(np.zeros((3, 64), np.float32)).tolist() == [0, 0, 0]
    assert precisions(np.full((1, 64), np.nan, np.float32)).tolist() == [0]


def test_zeros_at_the_end_are_counted(rows: np.ndarray):
    rows[1, 60:] = 0
    rows[2] = 0
    rows[3, 5] = 0
    assert trailing_zeros(rows)[:4].tolist() == [0, 4, 64, 0]


def test_forms_and_their_distances(rows: np.ndarray):
    """Each way to store a vector is known, and nearer to the vector than the level of its type; another row is not."""
    padded = np.concatenate([rows, np.zeros_like(rows)], axis=1)
    made = {
        "float": rows,
        "int8": eight_bits(rows, "int8").astype(np.float32),
        "uint8": eight_bits(rows, "uint8").astype(np.float32),
        "binary": (rows > 0).astype(np.float32),
    }
    for kind, values in made.items():
        form = Form.of(values)
        assert (form.kind, form.used, form.unit) == (kind, 64, kind == "float"), kind
        assert form.distances(values, rows).max() <= (1e-6 if kind in ("float", "binary") else LOOSE)
        assert form.distances(values, np.roll(rows, 1, axis=0)).min() > form.loose
        assert np.allclose(np.diag(form.table(values, rows)), form.distances(values, rows), atol=EQUAL)
    form = Form.of(padded)
    assert (form.used, form.width, form.unit) == (64, 128, True) and form.distances(padded, rows).max() < 1e-6
    for dtype in ("binary", "ubinary"):
        packed = quantize(rows, dtype).astype(np.float32)
        form = Form.of(packed)
        assert form.used == 8 and form.fits(64) and form.fits(8)
        assert form.distances(packed, rows).max() < 1e-6
    cut = rows[:, :32] / np.linalg.norm(rows[:, :32], axis=1, keepdims=True)
    assert Form.of(cut).fits(64) and not Form.of(rows).fits(32) and Form.of(cut).distances(cut, rows).max() < 1e-6
    assert Form.of(np.zeros((0, 8), np.float32)).kind == "float"


def test_the_levels_are_those_of_the_types(rows: np.ndarray):
    form, levels = Form.of(rows), dict(LEVELS)
    for name, values in (
        ("float16", rows.astype(np.float16)),
        ("bfloat16", bfloat16(rows)),
        ("int8", eight_bits(rows, "int8")),
    ):
        found = form.distances(values.astype(np.float32), rows)
        assert found.max() < levels[name], name
        if name != "int8":  # which of few digits are left depends on the largest number
            assert np.median(found) > levels[{"float16": "float32", "bfloat16": "float16"}[name]], name
