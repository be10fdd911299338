"""benchmarks/encoder_roofline.py: operations of each kind of step, the measured peak, and the table."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import encoder_roofline
import numpy as np
import pytest
from encoder_roofline import STEPS, compare, cut, operations, pairs
from peers import roofline_page
from peers.peak import NoPeakError, peak_of, peaks
from processor import processor

from millpond.models.native import structs

ALL = 1 << 40  # positions before or after: no window


@pytest.mark.parametrize("window", [(ALL, ALL), (ALL, 0), (3, 3), (0, 0), (2, 5)], ids=str)
@pytest.mark.parametrize("lengths", [[1], [7, 1, 4], [], [200]], ids=str)
def test_attention_counts_the_pairs_that_its_window_has(lengths: list[int], window: tuple[int, int]):
    before, after = window
    expected = sum(-before <= k - q <= after for length in lengths for q in range(length) for k in range(length))
    assert pairs(np.array(lengths, dtype=np.int64), before, after) == expected


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([5, 5, 5], [(0, 2), (2, 3)]),
        ([11], [(0, 1)]),
        ([3, 50, 3, 7], [(0, 1), (1, 2), (2, 4)]),
        ([10, 10], [(0, 1), (1, 2)]),
    ],
    ids=str,
)
def test_blocks_are_whole_texts_of_at_most_so_many_tokens(lengths: list[int], expected: list[tuple[int, int]]):
    assert cut(lengths, 10) == expected


def step(kind: int, **fields: Any) -> structs.Step:
    made = structs.Step()
    made.kind = kind
    for name, value in fields.items():
        if isinstance(value, tuple):
            getattr(made, name).out, getattr(made, name).in_ = value
        else:
            setattr(made, name, value)
    return made


def test_operations_are_those_of_the_products_of_each_step():
    steps = (structs.Step * 6)(
        step(structs.EMBED, columns=64),
        step(structs.PRODUCT, weight=(192, 64), target=0),
        step(structs.ATTENTION, heads=2, dim=32, before=ALL, after=ALL),
        step(structs.PRODUCT, weight=(64, 64), target=1),
        step(structs.NORM, columns=64),
        step(structs.FEED, weight=(256, 64), down=(64, 256)),
    )
    model: Any = SimpleNamespace(steps=steps, count=6)
    found = dict(zip(STEPS, operations(model, np.array([3, 5])), strict=True))
    assert found["qkv product"] == 2 * 8 * 192 * 64
    assert found["out product"] == 2 * 8 * 64 * 64
    assert found["feed forward"] == 2 * 8 * 2 * 256 * 64
    assert found["attention"] == 2 * 2 * (9 + 25) * 2 * 32  # scores and values
    assert found["embeddings"] == found["norms"] == found["reading"] == 0


def test_the_share_of_the_peak_is_that_of_the_precision_and_the_instruction_set():
    measured = {"avx2 float32": 100.0, "avx512 float32": 110.0, "avx512bf16 bfloat16": 200.0}
    assert peak_of(measured, "amx", "bfloat16") == 200.0
    assert peak_of(measured, "avx512bf16", "float32") == 110.0
    assert peak_of(measured, "avx2", "float32") == 100.0
    assert peak_of(measured, "avx2", "bfloat16") is None
    row: dict[str, Any] = {"seconds": 2.0, "operations": 10**11, "steps": {"norms": {"seconds": 1.0, "operations": 0}}}
    compare(row, measured, "avx512bf16", "bfloat16")
    assert (row["gops"], row["of_peak"], row["peak_gops"]) == (50.0, 0.25, 200.0)
    assert "gops" not in row["steps"]["norms"]


def test_the_table_has_a_row_for_each_step_and_tells_a_missing_peak():
    part = {"seconds": 0.5, "operations": 10**9, "gops": 2.0}
    row = {**part, "seconds": 1.0, "tokens": 1000, "tokens_per_second": 1000, "steps": {"attention": part}}
    table = roofline_page.table({"shapes": {"minilm": {"float32": row}}, "peaks": {}})
    assert "| attention | 500.00 | 50% | 2 | - |" in table
    assert "**minilm, float32: 1.0 k tokens/s**" in table and "not measured: no compiler" in table


def test_a_missing_compiler_or_a_failing_one_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(NoPeakError, match="no AVX2"):
        peaks(["asimd"], tmp_path)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoPeakError, match="no C\\+\\+ compiler"):
        peaks(["avx2", "fma"], tmp_path)
    monkeypatch.setenv("CXX", "/bin/false")
    with pytest.raises(NoPeakError, match="ended with 1"):
        peaks(["avx2", "fma"], tmp_path)


@pytest.mark.slow
def test_the_peak_of_this_processor_is_measured(tmp_path: Path):
    sets = processor()["instruction_sets"]
    try:
        measured = peaks(sets, tmp_path)
    except NoPeakError as error:
        pytest.skip(str(error))
    assert measured["avx2 float32"] > 1
    assert ("avx512bf16 bfloat16" in measured) == ("avx512_bf16" in sets)


def test_an_unknown_shape_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr("sys.argv", ["encoder_roofline.py", "--shapes", "minilm,no-shape"])
    with pytest.raises(SystemExit):
        encoder_roofline.arguments()
    assert "no no-shape; choose of minilm, bert-base" in capsys.readouterr().err.replace("\n", " ")
