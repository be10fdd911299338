"""``millpond eval``: its table, its JSON, mteb's files, and its errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.conftest import FLOAT32, Run
from tests.doors.data import write_beir, write_pairs
from tests.tiny.heads import write_cross_encoder, write_splade, write_stanford

pytestmark = pytest.mark.door


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_beir(tmp_path / "mill")


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    return write_pairs(tmp_path / "pairs.tsv")


def test_a_table_has_a_row_for_each_task(run: Run, folder: Path, pairs: Path, minilm_folder: Path, tmp_path: Path):
    words = ["eval", folder, pairs, "-m", minilm_folder, *FLOAT32, "--output", tmp_path / "out"]
    done = run(*words, code=0)
    title, _, header, *rows = done.out.splitlines()
    assert title.startswith(f"local/{minilm_folder.name}, dense, mteb 2.")
    assert header.split() == ["task", "type", "split", "main", "score", "score", "seconds", "also"]
    cells = [row.split() for row in rows]
    assert [row[:4] for row in cells] == [
        ["mill", "Retrieval", "test", "ndcg_at_10"],
        ["pairs", "STS", "test", "cosine_spearman"],
    ]
    assert {header.index("seconds") + 7, header.index("  score  ") + 7} <= {
        at for at in range(len(rows[0])) if rows[0][at : at + 1] == rows[1][at : at + 1] == " "
    }
    assert all(0.5 < float(row[4]) <= 1 and float(row[5]) >= 0 for row in cells)
    assert "recall_at_100 1.0000" in rows[0] and "cosine_pearson 0." in rows[1]
    assert done.err == ""  # no bars, no warnings
    assert {path.name for path in (tmp_path / "out").rglob("*.json")} == {"mill.json", "pairs.json", "model_meta.json"}
    again = run(*words, code=0).out.splitlines()[3:]
    assert [row.split()[4:6] for row in again] == [[row[4], "stored"] for row in cells]


@pytest.mark.parametrize(
    ("write", "kind"),
    [(write_stanford, "late-interaction"), (write_splade, "sparse"), (write_cross_encoder, "cross-encoder")],
)
def test_json_has_all_scores(
    run: Run, folder: Path, minilm_folder: Path, checkpoint_of: Callable[..., Path], write, kind
):
    words = ["eval", folder, "-m", checkpoint_of(write), *FLOAT32, "--format", "json"]
    staged = ["--first-stage", minilm_folder, "--candidates", "5"] if kind == "cross-encoder" else []
    found = json.loads(run(*words, *staged, code=0).out)
    assert found["kind"] == kind and len(found["revision"]) == 40
    assert found.get("first_stage") == (f"local/{minilm_folder.name}" if staged else None)
    (row,) = found["results"]
    assert 0 < row["score"] <= 1 and row["scores"]["ndcg_at_10"] == row["score"] and row["stored"] is False


MISTAKES = {
    ("SciFactt",): "mteb has no task and no benchmark 'SciFactt'; did you mean 'SciFact'?",
    ("qwertyuiop",): "mteb has no task and no benchmark 'qwertyuiop' (or name",
    ("./nowhere",): "'nowhere' is no BEIR folder: it needs corpus.jsonl",
    ("nowhere.tsv",): "there is no file at 'nowhere.tsv'",
    ("STS12", "--dimensions", "8"): "--dimensions=8",
    ("STS12", "--first-stage", "nobody/nothing"): "nobody/nothing",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_exit_2_before_a_model_is_loaded(
    run: Run,
    minilm_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
):
    monkeypatch.setattr("millpond.engine.engine.Engine.__init__", lambda *a, **k: pytest.fail("a model is loaded"))
    done = run("eval", *words, "-m", minilm_folder, code=2)
    assert done.err.startswith("millpond: ") and MISTAKES[words] in done.err and done.err.count("\n") == 1


def test_models_and_tasks_that_do_not_fit_are_exit_2(
    run: Run,
    folder: Path,
    pairs: Path,
    checkpoint_of: Callable[..., Path],
):
    cross = checkpoint_of(write_cross_encoder)
    assert (
        "name the embedder whose best documents it ranks (--first-stage" in run("eval", folder, "-m", cross, code=2).err
    )
    assert "only ranks" in run("eval", folder, "-m", cross, "--first-stage", cross, code=2).err
    assert "compares one vector" in run("eval", pairs, "-m", checkpoint_of(write_splade), code=2).err


def test_a_task_without_its_data_is_reported(
    run: Run, folder: Path, minilm_folder: Path, caplog: pytest.LogCaptureFixture
):
    missing = "SciFact: its data 'mteb/scifact' is not on this machine, or damaged, and could not be fetched ("
    err = run("eval", "SciFact", "-m", minilm_folder, code=2).err
    assert err.startswith(f"millpond: {missing}") and err.count("\n") == 1
    done = run("eval", "SciFact", folder, "-m", minilm_folder, *FLOAT32, code=1)
    assert [record.getMessage() for record in caplog.records if missing in record.getMessage()]
    assert done.out.splitlines()[-1].startswith("mill ")
