"""``millpond audit``: what it prints, its exit codes, and what it fixes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tests.audit.corpus import records
from tests.audit.editors import edit
from tests.cli.conftest import FLOAT32, Run

from millpond.ingest.record import point_id

pytest.importorskip("millpond_qdrant")
pytestmark = pytest.mark.contract


@pytest.fixture
def filled(run: Run, model: Path, tmp_path: Path) -> str:
    """A collection of 60 texts."""
    url = f"qdrant+path:{tmp_path}/q#docs"
    lines = "".join(json.dumps({"id": row.id, "text": row.text}) + "\n" for row in records(60))
    run("ingest", "-", "-m", model, "--to", url, *FLOAT32, stdin=lines, code=0)
    return url


def test_a_clean_collection_is_exit_0(run: Run, model: Path, filled: str):
    out = run("audit", filled, *FLOAT32, code=0).out  # the model is the one that the collection names
    assert f"made by     {model}\n" in out and "60 of 60 rows; every row was looked at" in out
    found = json.loads(run("audit", filled, "-m", model, *FLOAT32, "--format", "json", code=0).out)
    assert found["clean"] and found["setting"]["prompt"] == "keep: " and found["findings"] == []
    assert found["setting"]["datatype"] == "float32" and found["off_share"] == [0.0, 0.0]
    drawn = json.loads(run("audit", filled, *FLOAT32, "--sample", "20", "--format", "json", code=0).out)
    assert drawn["sampled"] == 20 and drawn["off_share"][0] == 0 and 0.05 < drawn["off_share"][1] < 0.7
    assert "drawn at random were recomputed" in run("audit", filled, *FLOAT32, "--sample", "20", code=0).out


def test_rows_that_are_off_are_exit_1_and_fixed(run: Run, model: Path, filled: str):
    bad = {point_id(row.id): np.eye(48, dtype=np.float32)[n] for n, row in enumerate(records(60)[:3])}
    edit(filled, bad, {point_id("doc-50"): ""})
    done = run("audit", filled, *FLOAT32, code=1)
    assert "stale" in done.out and "stale hash" in done.out and next(iter(bad)) in done.out
    found = json.loads(run("audit", filled, *FLOAT32, "--all", "--format", "json", code=1).out)
    assert found["off"] == {"stale": 3, "stale hash": 1} and found["off_in_sample"] == 4 and not found["fixed"]
    fixed = run("audit", filled, *FLOAT32, "--fix", code=1)  # a row without a text stays
    assert "3 of 4 rows were embedded again" in fixed.out and "it has no text" in fixed.err
    edit(filled, {}, {point_id("doc-50"): records(60)[50].text})
    run("audit", filled, *FLOAT32, code=0)


def test_a_model_that_made_none_of_the_vectors_is_exit_1(run: Run, filled: str, cross: Path, other: Path):
    out = run("audit", filled, "-m", other, *FLOAT32, code=1).out
    assert "none of the" in out and "settings of" in out
    assert "makes no vectors" in run("audit", filled, "-m", cross, *FLOAT32, code=2).err


def test_mistakes_are_exit_2(run: Run, filled: str, model: Path, tmp_path: Path):
    for words, message in (
        (["--vector", "d7"], "is no vector of collection 'docs'; it has d48"),
        (["--text", "body"], "is no field of the rows; they have"),
        (["--confidence", "2"], "confidence"),
        (["--sample", "0"], "sample"),
        (["-m", str(tmp_path / "none")], "none"),
    ):
        assert message in run("audit", filled, *FLOAT32, *words, code=2).err, words
    gone = filled.replace("#docs", "#cats")
    assert "there is no collection 'cats'" in run("audit", gone, "-m", model, code=2).err


@pytest.fixture
def other(checkpoint_of) -> Path:
    return checkpoint_of("roberta")
