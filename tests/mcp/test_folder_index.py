"""A folder's index is what its files are now."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.mcp.words_engine import WordsEngine

from millpond.errors import InvalidRequestError
from millpond.ingest.units.split import split
from millpond.mcp.folder.index import FolderIndex, embedded_text, fuse
from millpond.mcp.folder.store import UnitStore

Make = Callable[[], FolderIndex]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    (root / "sub").mkdir(parents=True)
    (root / "bread.md").write_text("# Bread\nDough rises by yeast.\n\n# Beer\nHops are bitter.\n")
    (root / "sub" / "engine.txt").write_text("An engine burns fuel.\n")
    return root


@pytest.fixture
def engine() -> WordsEngine:
    return WordsEngine()


@pytest.fixture
def make(tmp_path: Path, root: Path, engine: WordsEngine) -> Make:
    return lambda: FolderIndex(root, UnitStore(tmp_path / "index.db"), lambda: engine)  # type: ignore[arg-type, return-value]


def found(index: FolderIndex, question: str, **options: object) -> list[str]:
    index.update()
    return [each.unit.id for each in index.search(question, k=10, **options)]  # type: ignore[arg-type]


def stored(index: FolderIndex) -> list[tuple[object, ...]]:
    """Everything that a search can find, in the order of the files, with its vector and words."""
    with index.store.reading() as snapshot:
        rows = snapshot.rows().tolist()
        units, (_, matrix) = snapshot.units(rows), snapshot.vectors_after(0)
        query = "SELECT rowid, title, body FROM words ORDER BY rowid"
        by_words = {row: rest for row, *rest in snapshot._connection.execute(query)}
    assert list(by_words) == rows and len(matrix) == len(rows)
    return sorted(
        (unit.path, unit.first, unit.last, unit.part, unit.name, unit.text, *by_words[row], matrix[place].tobytes())
        for place, (row, unit) in enumerate((row, units[row]) for row in rows)
    )


def expected(root: Path) -> list[tuple[object, ...]]:
    """The same of the files themselves."""
    rows = []
    for path in sorted(root.rglob("*")):
        if path.is_file():
            name = path.relative_to(root).as_posix()
            rows += [
                (name, unit.first, unit.last, unit.part, unit.name, unit.text) for unit in split(name, path.read_text())
            ]
    return sorted(rows)


def test_changes_are_found_by_the_next_search(root: Path, make: Make, engine: WordsEngine):
    index = make()
    assert found(index, "hops beer")[0] == "bread.md:4-5"
    count = len(engine.embedded)
    assert found(index, "fuel")[0] == "sub/engine.txt:1-1" and len(engine.embedded) == count + 1  # the question alone
    (root / "bread.md").write_text("# Bread\nDough rises by yeast.\n\n# Wine\nGrapes ferment.\n")
    (root / "new.txt").write_text("Quite new: cheese.\n")
    (root / "sub" / "engine.txt").unlink()
    assert found(index, "grapes wine")[0] == "bread.md:4-5"
    assert found(index, "cheese")[0] == "new.txt:1-1"
    assert "sub/engine.txt:1-1" not in found(index, "fuel")
    assert not [each for each in index.search("hops", k=10) if "Hops" in each.unit.text]
    section = embedded_text("bread.md", next(split("bread.md", (root / "bread.md").read_text())))
    assert engine.embedded.count(section) == 1  # the section that is the same


def test_a_change_of_the_same_size_and_second_is_found(root: Path, make: Make):
    index = make()
    for number in range(20):  # without a pause: within a tick of the clock
        (root / "sub" / "engine.txt").write_text(f"number{number:02} burns fuel\n")
        index.update()
        (best,) = index.search(f"number{number:02}", k=1)
        assert f"number{number:02}" in best.unit.text


def test_a_file_that_moves_is_not_embedded_again(root: Path, make: Make, engine: WordsEngine):
    index = make()
    index.update()
    (root / "one").mkdir()
    (root / "two").mkdir()
    (root / "one" / "same.txt").write_text("words of a file")
    index.update()
    before = list(engine.embedded)
    os.utime(root / "one" / "same.txt")
    index.update()
    assert engine.embedded == before
    shutil.copy(root / "one" / "same.txt", root / "one" / "copy.txt")  # another path, which is embedded, too
    index.update()
    assert len(engine.embedded) == len(before) + 1


def test_two_processes_see_each_others_changes(root: Path, make: Make):
    one, other = make(), make()
    one.update()
    other.update()
    assert [each.unit.id for each in other.search("hops beer", k=1)] == ["bread.md:4-5"]
    (root / "sub" / "engine.txt").write_text("A zeppelin flies.\n")
    one.update()
    assert other.search("zeppelin", k=1)[0].unit.text == "A zeppelin flies."  # without an update of its own
    assert stored(one) == stored(other)


def test_an_index_that_was_deleted_is_built_again(root: Path, make: Make):
    index = make()
    before = (found(index, "yeast"), stored(index))
    for path in index.store.path.parent.glob("index.db*"):
        path.unlink()
    assert (found(index, "yeast"), stored(index)) == before


def test_filters(root: Path, make: Make):
    index = make()
    assert found(index, "dough", filter={"folder": "sub"}) == ["sub/engine.txt:1-1"]
    assert set(found(index, "dough", filter={"kind": "section"})) == {"bread.md:1-2", "bread.md:4-5"}
    assert found(index, "dough", filter={"first_line": {"gte": 4}}) == ["bread.md:4-5"]
    assert found(index, "dough", filter={"path": "nope"}) == []
    with pytest.raises(InvalidRequestError, match="range"):
        index.search("x", k=1, filter={"kind": {}})


def test_ids(root: Path, make: Make):
    index = make()
    index.update()
    unit = index.unit("bread.md:4-5")
    assert unit is not None and unit.text == "# Beer\nHops are bitter."
    for id in (
        "bread.md",
        "bread.md:4-6",
        "../root/bread.md:4-5",
        "bread.md:4-5#1",
        ":",
        "a:99999999999999999999-1",
        "a:1-²",
    ):
        assert index.unit(id) is None


def test_a_folder_that_is_gone_is_an_error(root: Path, make: Make):
    """And not a folder all of whose files were deleted."""
    index = make()
    index.update()
    before = stored(index)
    shutil.rmtree(root)
    with pytest.raises(InvalidRequestError, match="not there"):
        index.update()
    assert stored(index) == before


def test_binary_files_are_counted(root: Path, make: Make):
    (root / "image.png").write_bytes(b"\x89PNG\0")
    index = make()
    index.update()
    index.update()
    assert index.skipped == {"binary": 1}
    (root / "image.png").write_text("text now")
    assert found(index, "text now")[0] == "image.png:1-1" and not index.skipped


@pytest.mark.parametrize("seed", range(4))
def test_the_index_equals_one_that_is_built_anew(
    root: Path, make: Make, tmp_path: Path, engine: WordsEngine, seed: int
):
    chance = random.Random(seed)
    index = make()
    for _ in range(12):
        mutate(root, chance)
        index.update()
        anew = FolderIndex(root, UnitStore(tmp_path / f"{chance.random()}.db"), lambda: engine)  # type: ignore[arg-type, return-value]
        anew.update()
        assert stored(index) == stored(anew)
        assert [row[:6] for row in stored(index)] == expected(root)
        for question in ("yeast", "engine fuel", "w3 w5"):
            ours, theirs = index.search(question, k=5), anew.search(question, k=5)
            assert sorted(each.score for each in ours) == sorted(each.score for each in theirs)


def mutate(root: Path, chance: random.Random) -> None:
    """Write, change, move and delete some files."""
    for _ in range(chance.randrange(1, 6)):
        path = root / chance.choice(["", "sub", "deep/er"]) / f"{chance.randrange(8)}.{chance.choice(['md', 'txt'])}"
        others = [each for each in root.rglob("*") if each.is_file()]
        action = chance.random()
        path.parent.mkdir(parents=True, exist_ok=True)
        if action < 0.6 or not others:
            words = " ".join(f"w{chance.randrange(9)}" for _ in range(chance.randrange(60)))
            path.write_text(f"# w{chance.randrange(9)}\n{words}\n\n# more\n\n{words[::-1]}\n")
        elif action < 0.8:
            chance.choice(others).unlink()
        else:
            chance.choice(others).rename(path)


def test_an_update_that_is_stopped_goes_on_in_another_process(root: Path, make: Make, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("millpond.mcp.folder.index._BATCH_FILES", 1)
    for number in range(9):
        (root / f"{number}.txt").write_text(f"words of {number}")
    index = make()
    write, written = index.store.write, list[str]()

    def write_and_stop(files: Any) -> None:
        write(files)
        written.extend(files)
        index.stop()

    monkeypatch.setattr(index.store, "write", write_and_stop)
    index.update()
    assert len(written) == 1 and {row[0] for row in stored(index)} == set(written)
    other = make()
    other.update()
    assert [row[:6] for row in stored(other)] == expected(root)


def test_ranks_are_fused():
    assert fuse([[7, 8], [8]]) == {7: pytest.approx(1 / 61), 8: pytest.approx(1 / 62 + 1 / 61)}


def test_the_nearest_vectors_come_first(root: Path, make: Make, engine: WordsEngine):
    index = make()
    index.update()
    hits = index.search("An engine burns fuel", k=3)
    query = engine.embed(["An engine burns fuel"]).embeddings[0]
    for hit in hits:
        text = embedded_text(
            hit.unit.path,
            next(u for u in split(hit.unit.path, (root / hit.unit.path).read_text()) if u.first == hit.unit.first),
        )
        assert hit.cosine == pytest.approx(float(np.dot(query, engine.embed([text]).embeddings[0])), abs=2e-3)
