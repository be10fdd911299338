"""``millpond index``: build, add, delete, search, stats, check and compact, as a user types them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.conftest import Run

from millpond.late_interaction import PlaidIndex

RECORDS = [
    {"id": "pond", "text": "The pond is two metres deep.", "year": 2024},
    {"id": "wheel", "text": "A wheel turns.", "year": 2025},
    {"id": "flour", "text": "The miller sells flour.", "year": 2025},
]


@pytest.fixture
def millpond(run: Run) -> Callable[..., str]:
    """Standard output, with standard error behind it where the command fails."""

    def millpond(*words: object, stdin: str = "", code: int = 0) -> str:
        done = run(*words, stdin=stdin, code=code)
        return done.out + done.err if code else done.out

    return millpond


@pytest.fixture
def built(millpond: Callable[..., str], colbert: Path, tmp_path: Path) -> Path:
    source = tmp_path / "docs.jsonl"
    source.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    counts = json.loads(millpond("index", "build", tmp_path / "docs.index", source, "--model", colbert))
    assert (counts["read"], counts["added"], counts["failed"]) == (3, 3, 0)
    return tmp_path / "docs.index"


def ids(printed: str) -> list[str]:
    return [json.loads(line)["id"] for line in printed.splitlines()]


def test_build_search_add_and_delete(
    millpond: Callable[..., str], built: Path, colbert: Path, caplog: pytest.LogCaptureFixture
) -> None:
    search = ("index", "search", built, "who sells flour?", "--model", colbert, "--format", "jsonl")
    assert sorted(ids(millpond(*search))) == ["flour", "pond", "wheel"]
    assert sorted(ids(millpond(*search, "--filter", '{"year": 2025}'))) == ["flour", "wheel"]
    assert sorted(ids(millpond(*search, "--filter", "year>2024", "--filter", "year<=2025"))) == ["flour", "wheel"]
    lines = '{"id": "pond", "text": "The pond is dry."}\n{"id": "new", "text": "New."}\n'
    lines += '{"id": "flour", "text": " "}\nbroken\n'
    printed = millpond("index", "add", built, "-", "--model", colbert, stdin=lines, code=1)
    counts = json.loads(next(line for line in printed.splitlines() if line.startswith("{")))
    del counts["seconds"]
    assert counts == {
        "read": 4, "added": 1, "replaced": 1, "unchanged": 0, "blank": 1, "failed": 1, "truncated": 0
    }  # fmt: skip
    assert "stdin:4" in caplog.text
    assert sorted(ids(millpond(*search))) == ["new", "pond", "wheel"]
    assert json.loads(millpond("index", "delete", built, "new", "gone")) == {"deleted": 1}
    assert json.loads(millpond("index", "delete", built, "--filter", "year>=2025")) == {"deleted": 1}
    stats = json.loads(millpond("index", "stats", built))
    assert stats["documents"] == 1
    assert json.loads(millpond("index", "compact", built))["documents"] == 1
    assert "no damage" in millpond("index", "check", built)


def test_a_second_build_encodes_nothing_again(millpond: Callable[..., str], built: Path, colbert: Path) -> None:
    counts = json.loads(millpond("index", "build", built, built.parent / "docs.jsonl", "--model", colbert))
    assert (counts["read"], counts["added"], counts["unchanged"]) == (3, 0, 3)


def test_check_names_a_damaged_file(millpond: Callable[..., str], built: Path) -> None:
    largest = max((path for path in built.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[-1] ^= 1
    largest.write_bytes(content)
    assert largest.name in millpond("index", "check", built, code=1)


def test_what_is_not_there_is_named(millpond: Callable[..., str], tmp_path: Path, colbert: Path) -> None:
    for command in (["stats"], ["check"], ["compact"], ["delete"]):
        printed = millpond("index", *command, tmp_path / "none", *(["a"] if command == ["delete"] else []), code=2)
        assert "build it first" in printed
        assert not (tmp_path / "none").exists()
    printed = millpond("index", "build", tmp_path / "new", tmp_path / "none.jsonl", "--model", colbert, code=2)
    assert "none.jsonl" in printed and not (tmp_path / "new").exists()


def test_the_model_of_a_local_folder_is_found_again(millpond: Callable[..., str], built: Path, colbert: Path) -> None:
    found = millpond("index", "search", built, "flour", "--format", "jsonl")
    assert found == millpond("index", "search", built, "flour", "--format", "jsonl", "--model", colbert)
    moved = colbert.rename(colbert.with_name("moved"))
    try:
        printed = millpond("index", "search", built, "flour", code=2)
        assert f"Its folder '{colbert}' is not there; if it is elsewhere, name it with --model." in printed
        assert found == millpond("index", "search", built, "flour", "--format", "jsonl", "--model", moved)
    finally:
        moved.rename(colbert)


def test_an_index_of_another_name_is_named(millpond: Callable[..., str], built: Path) -> None:
    printed = millpond("index", "stats", built.with_name("bilt"), code=2)
    assert f"has no index; build it first; beside it there are '{built.name}'" in printed


def test_a_disk_that_cannot_be_written_is_an_error_without_a_traceback(
    millpond: Callable[..., str], built: Path, colbert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    printed = millpond("index", "add", built, "-", "-m", colbert, stdin='{"id": "a", "text": "new"}\n', code=1)
    assert "No space left on device" in printed and "the index is as the last commit left it" in printed
    monkeypatch.undo()
    assert PlaidIndex.open(built).ids() == ["pond", "wheel", "flour"]
