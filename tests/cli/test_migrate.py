"""``millpond migrate``, as a user types it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Run
from tests.tiny import write_checkpoint

from millpond import Engine
from millpond.ingest import Record, ingest, open_sink
from millpond.migrate import migration as module

pytest.importorskip("millpond_qdrant")

TEXTS = {
    "pond": "The pond is two metres deep.",
    "wheel": "A wheel turns in the mill.",
    "flour": "The miller sells flour.",
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", "bert")


@pytest.fixture
def url(tmp_path: Path, model: Path) -> str:
    url = f"qdrant+path:{tmp_path}/q#docs"
    with Engine(str(model)) as engine, open_sink(url) as sink:  # type: ignore[attr-defined]
        ingest([Record(*item) for item in TEXTS.items()], engine=engine, sink=sink, show_progress=False)
    return url


def json_of(out: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(out)
    return found


def test_a_migration_from_the_plan_to_its_end(
    run: Run, url: str, model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    change = ["-m", model, "--engine", "pooling=mean"]
    found = json_of(run("migrate", "plan", url, *change, "--format", "json", code=0).out)
    assert (found["rows"], found["done"]) == (3, 0) and found["seconds"] >= 0
    shown = run("migrate", "plan", url, *change, code=0).out
    assert "rows" in shown and "1. create docs__" in shown and "MB" in shown
    assert json_of(run("migrate", "status", url, "--format", "json", code=0).out)["phase"] is None

    done = json_of(run("migrate", "run", url, *change, code=0).out)
    assert (done["phase"], done["rows"], done["written"]) == ("live", 3, 3)
    status = json_of(run("migrate", "status", url, "--format", "json", code=0).out)
    assert (status["serving"], status["other"], status["share"]) == (done["serving"], "docs", 1.0)
    assert "live" in run("migrate", "status", url, code=0).out

    hits = run("search", url, "deep pond", "--format", "jsonl", code=0).rows
    assert {hit["id"] for hit in hits} == set(TEXTS)  # by the model of the new collection
    stored = json_of(run("collections", "show", url, "--format", "json", code=0).out)
    assert stored["succession"]["serving"] == done["serving"]
    source = tmp_path / "late.jsonl"
    source.write_text(json.dumps({"id": "late", "text": "The race is dry."}))
    assert "built by" in run("ingest", source, "-m", model, "--to", url, code=2).err
    run("ingest", source, *change, "--to", url, code=0)

    back = json_of(run("migrate", "rollback", url, code=0).out)
    assert (back["phase"], back["serving"], back["rows"], back["written"]) == ("rolled back", "docs", 4, 1)
    assert json_of(run("migrate", "run", url, *change, code=0).out)["written"] == 0
    assert "may still search the old" in run("migrate", "finish", url, "--yes", code=2).err
    monkeypatch.setattr(module, "SETTLED", 0.0)
    refused = run("migrate", "finish", url, code=2).err
    assert "would drop collection 'docs'" in refused and "0 are not in" in refused and "--yes" in refused
    assert json_of(run("migrate", "finish", url, "--yes", code=0).out)["phase"] == "finished"
    assert len(run("search", url, "deep pond", "--format", "jsonl", code=0).rows) == 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "there is nothing to migrate"),
        (["--source", "-"], "the source is read more than once"),
        (["--dimensions", "16,x"], "is not a list of widths"),
        (["--dimensions", "16"], "does not say that it was trained"),
        (["--rows-per-second", "0"], "--rows-per-second"),
    ],
)
def test_what_cannot_be_migrated_is_exit_2(run: Run, url: str, model: Path, words: list[str], message: str) -> None:
    assert message in " ".join(run("migrate", "run", url, "-m", model, *words, code=2).err.split())
    assert json_of(run("migrate", "status", url, "--format", "json", code=0).out)["phase"] is None


def test_other_mistakes(run: Run, url: str, model: Path) -> None:
    assert "no collection 'dosc'" in run("migrate", "status", url.replace("#docs", "#dosc"), code=2).err
    assert "no former collection" in run("migrate", "rollback", url, code=2).err
    assert "nothing to finish" in run("migrate", "finish", url, "--yes", code=2).err
    few = run("migrate", "run", url, "-m", model, "--engine", "pooling=mean", "--bridge", code=2).err
    assert "a bridge needs 64 rows, and the collection has 3; run without --bridge" in few
