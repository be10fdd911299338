"""MemoryIndex.save and open: atomic, checked, and without pickle."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.late_interaction.index_contract import found, matrices, names, ragged

from millpond.errors import IndexCorruptedError, InvalidRequestError, SourceNotFoundError
from millpond.late_interaction import MemoryIndex
from millpond.late_interaction.memory import checked_file, store
from millpond.late_interaction.memory import files as memory_files

QUERY = ragged(matrices(1, seed=9))
FILES = ["centroid_scales", "centroids", "codes", "documents", "index", "lengths", "projection", "rows", "scales"]


def index_of(count: int = 60, **options: Any) -> MemoryIndex:
    index = MemoryIndex(None, **options)
    index.add_embeddings(
        names(count),
        ragged(matrices(count)),
        texts=[f"text {n}" for n in range(count)],
        metadata=[{"n": n, "é": ["ü"]} for n in range(count)],
    )
    return index


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A saved index that has every kind of file."""
    monkeypatch.setattr(store, "_CODED_DOCUMENTS", 10)
    index_of(width=16).save(tmp_path / "index")
    return tmp_path / "index"


def file_of(folder: Path, name: str) -> Path:
    (path,) = [path for path in folder.iterdir() if path.stem.partition("-")[0] == name]
    return path


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_folder_has_each_file_once_and_only_its_owner_reads_them(folder: Path) -> None:
    assert sorted(path.stem.partition("-")[0] for path in folder.iterdir()) == FILES
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    for path in folder.glob("*.npy"):
        assert np.load(path, allow_pickle=False).dtype.kind in "iuf"


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["cut", "longer", "changed", "missing", "empty"])
def test_a_damaged_file_is_named(folder: Path, name: str, damage: str) -> None:
    path = file_of(folder, name)
    data = path.read_bytes()
    match damage:
        case "missing":
            path.unlink()
        case "cut":
            path.write_bytes(data[:-1])
        case "longer":
            path.write_bytes(data + b"\n")
        case "empty":
            path.write_bytes(b"")
        case "changed":
            path.write_bytes(data[:-3] + bytes((data[-3] ^ 1,)) + data[-2:])
    if name == "index" and damage == "missing":
        with pytest.raises(SourceNotFoundError, match="has no index"):
            MemoryIndex.open(folder, None)
        return
    if name == "index" and damage == "longer":
        assert len(MemoryIndex.open(folder, None)) == 60  # white space behind JSON
        return
    with pytest.raises(IndexCorruptedError, match=path.name) as caught:
        MemoryIndex.open(folder, None)
    if name != "index":
        reasons = {"missing": "is missing", "changed": "checksum|shape|damaged"}
        assert re.search(reasons.get(damage, rf"it has \d+ bytes instead of {len(data)}"), str(caught.value))


@pytest.mark.parametrize(
    ("before", "after"),
    [(b",), }", b",),  "), (b"(", b"{"), (b",), }           ", b"00000000000,), }")],
    ids=["an-open-bracket", "another-bracket", "more-rows-than-memory"],
)
def test_a_header_that_cannot_be_read_is_named(folder: Path, before: bytes, after: bytes) -> None:
    path = file_of(folder, "centroid_scales")
    data = path.read_bytes()
    assert len(before) == len(after) and before in data[:128]
    path.write_bytes(data[:128].replace(before, after) + data[128:])
    with pytest.raises(IndexCorruptedError, match=path.name):
        MemoryIndex.open(folder, None)


@pytest.mark.parametrize("part", [0, 7, 40, 90])
@pytest.mark.parametrize("name", ["rows", "scales", "codes", "lengths", "centroids", "projection"])
def test_a_damaged_header_is_named(folder: Path, name: str, part: int) -> None:
    path = file_of(folder, name)
    data = bytearray(path.read_bytes())
    data[part] ^= 0x15
    path.write_bytes(data)
    with pytest.raises(IndexCorruptedError, match=path.name):
        MemoryIndex.open(folder, None)


def changed(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest, with a checksum that fits."""
    path = folder / "index.json"
    content = json.loads(path.read_text())
    del content["sha256"]
    change(content)
    content["sha256"] = memory_files._digest(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "is of version 2, and this millpond reads version 1; update millpond"),
        ({"format": "something else"}, "its format is 'something else'"),
        ({"codec": "int4"}, "codec 'int4'"),
        ({"documents": 61}, "lengths are not those of the documents"),
        ({"documents": -1}, "-1 is not a count"),
        ({"tokens": 1}, "lengths do not add up to the tokens"),
        ({"codec": "bfloat16"}, "is not of the tokens"),
        ({"files": {}}, "index.json"),
        ({"files": None}, "index.json"),
        ({"settings": {"model": None}}, "index.json"),
        ({"settings": {"model": None, "native": 32, "width": 17, "pool_factor": 1}}, "17 columns"),
        ({"settings": {"model": {"no": 1}, "native": 32, "width": 16, "pool_factor": 1}}, "index.json"),
    ],
    ids=str,
)
def test_a_manifest_that_does_not_fit_is_refused(folder: Path, change: dict[str, Any], message: str) -> None:
    changed(folder, lambda content: content.update(change))
    with pytest.raises(IndexCorruptedError, match=message) as caught:
        MemoryIndex.open(folder, None)
    assert str(folder) in str(caught.value)


def test_a_manifest_that_was_edited_is_refused(folder: Path) -> None:
    path = folder / "index.json"
    text = path.read_text()
    assert text.count('"pool_factor": 1') == 1
    path.write_text(text.replace('"pool_factor": 1', '"pool_factor": 3'))
    with pytest.raises(IndexCorruptedError, match=r"index\.json is damaged: its checksum"):
        MemoryIndex.open(folder, None)


def replaced(folder: Path, name: str, data: bytes) -> None:
    """Write other data in place of a file, with a checksum that fits: a file that was made so."""
    path = file_of(folder, name)
    path.write_bytes(data)
    entry = {"name": path.name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    changed(folder, lambda content: content["files"].update({name: entry}))


def npy(array: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


def test_a_code_without_a_centroid_is_refused(folder: Path) -> None:
    replaced(folder, "codes", npy(np.full(360, 65_535, dtype=np.uint16)))
    with pytest.raises(IndexCorruptedError, match=r"codes-.* has a code without a centroid"):
        MemoryIndex.open(folder, None)


def test_nothing_is_unpickled(folder: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(folder / "exploded"),)

    replaced(folder, "lengths", npy(np.array([Bomb()] * 60, dtype=object), allow_pickle=True))
    with pytest.raises(IndexCorruptedError, match="lengths-"):
        MemoryIndex.open(folder, None)
    assert not (folder / "exploded").exists()


@pytest.mark.parametrize(
    "line", [b"[]", b"{}", b'["a", "b"]', b'["a", 1, {}]', b'[1, "b", {}]', b'["a", "b", []]', b"\xff", b"[" * 10**5]
)
def test_a_line_that_is_no_document_is_refused(folder: Path, line: bytes) -> None:
    replaced(folder, "documents", (line + b"\n") * 60)
    with pytest.raises(IndexCorruptedError, match="documents-"):
        MemoryIndex.open(folder, None)


def test_a_path_without_an_index_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path, tmp_path / "missing", tmp_path / "file"):
        with pytest.raises(SourceNotFoundError, match="has no index that MemoryIndex.save wrote"):
            MemoryIndex.open(path, None)


def test_other_files_are_not_overwritten(tmp_path: Path) -> None:
    index = index_of(3)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "CURRENT").write_text("of another kind of index")
    (tmp_path / "file").write_text("x")
    with pytest.raises(InvalidRequestError, match=r"folder' has other files, as 'CURRENT'; save .* new folder"):
        index.save(tmp_path / "folder")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InvalidRequestError, match="is a file or lies in one"):
            index.save(path)
    assert files(tmp_path / "folder") == {"CURRENT": b"of another kind of index"}


def test_a_save_replaces_the_index_and_its_files(tmp_path: Path) -> None:
    first, second = index_of(5), index_of(9, codec="float32")
    for index in (first, second, first, second):
        index.save(str(tmp_path / "new" / "index"))
    folder = tmp_path / "new" / "index"
    assert sorted(path.stem.partition("-")[0] for path in folder.iterdir()) == ["documents", "index", "lengths", "rows"]
    opened = MemoryIndex.open(folder, None)
    assert len(opened) == 9 and opened.stats() == second.stats()
    opened.delete(names(3))
    opened.save(folder)
    assert MemoryIndex.open(folder, None).ids() == names(9)[3:]


@pytest.mark.parametrize("step", range(7))
def test_a_save_that_fails_leaves_the_index_that_was_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    before = files(folder)
    steps: list[str] = []

    def failing(real: Any) -> Any:
        def call(*args: Any) -> Any:
            steps.append(real.__name__)
            if len(steps) == step + 1:
                raise OSError(28, "No space left on device")
            return real(*args)

        return call

    monkeypatch.setattr(checked_file.FileWriter, "finish", failing(checked_file.FileWriter.finish))
    monkeypatch.setattr(memory_files.os, "replace", failing(os.replace))
    index = index_of(7, width=16)
    with pytest.raises(OSError, match="No space left"):
        index.save(folder)
    assert files(folder) == before
    monkeypatch.undo()
    index.save(folder)
    assert len(steps) == step + 1
    assert len(MemoryIndex.open(folder, None)) == 7


def test_every_file_is_synced_before_the_manifest_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    finish, replace = checked_file.FileWriter.finish, os.replace
    fsync = os.fsync
    monkeypatch.setattr(checked_file.os, "fsync", lambda descriptor: (events.append("fsync"), fsync(descriptor))[1])
    monkeypatch.setattr(memory_files.os, "replace", lambda *paths: (events.append("replace"), replace(*paths))[1])
    index_of(5).save(tmp_path / "index")
    assert finish is checked_file.FileWriter.finish
    # The folder above, four files and the manifest, the folder; and again the folder for the name of the manifest.
    assert events == ["fsync"] * 7 + ["replace", "fsync"]


def test_an_index_is_opened_and_saved_by_many_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "index"
    indexes = [index_of(5), index_of(8)]
    indexes[0].save(folder)
    errors: list[BaseException] = []
    done = threading.Event()

    def guarded(work: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                errors.append(error)

        return run

    def save() -> None:
        for number in range(10):
            indexes[number % 2].save(folder)

    def read() -> None:
        while not done.is_set():
            opened = MemoryIndex.open(folder, None)
            assert opened.ids() in (names(5), names(8))
            assert len(opened.search_embeddings(QUERY)[0]) == len(opened)

    writers = [threading.Thread(target=guarded(save)) for _ in range(2)]
    readers = [threading.Thread(target=guarded(read)) for _ in range(2)]
    for thread in (*writers, *readers):
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    for thread in readers:
        thread.join()
    assert not errors
    assert len(list(folder.iterdir())) == 5


def test_what_is_saved_while_others_write_are_whole_documents(tmp_path: Path) -> None:
    index = index_of(40)
    stop = threading.Event()

    def write() -> None:
        version = 0
        while not stop.is_set():
            version += 1
            index.add_embeddings(names(40), ragged(matrices(40)), metadata=[{"v": version}] * 40)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for number in range(5):
            index.save(tmp_path / f"index-{number}")
    finally:
        stop.set()
        writer.join()
    for number in range(5):
        hits = MemoryIndex.open(tmp_path / f"index-{number}", None).search_embeddings(QUERY, k=100)[0]
        assert len(hits) == 40 and len({hit.metadata.get("v") for hit in hits}) == 1


SAVES = """
import sys
import numpy as np
from millpond.late_interaction import MemoryIndex, Ragged
indexes = []
for count in (300, 500):
    rows = np.random.default_rng(count).standard_normal((count * 20, 32)).astype(np.float32)
    index = MemoryIndex(None)
    index.add_embeddings([str(i) for i in range(count)], Ragged(flat=rows, offsets=np.arange(count + 1) * 20))
    indexes.append(index)
print("ready", flush=True)
while True:
    for index in indexes:
        index.save(sys.argv[1])
        print("saved", flush=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="has no SIGKILL")
def test_a_killed_save_leaves_an_index(tmp_path: Path) -> None:
    folder = tmp_path / "index"
    for kill in range(2):
        with subprocess.Popen([sys.executable, "-c", SAVES, str(folder)], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for _ in range(2 + kill):  # ready, and one save or more
                assert process.stdout.readline()
            process.send_signal(signal.SIGKILL)
        index = MemoryIndex.open(folder, None)
        assert len(index) in (300, 500)
        assert len(index.search_embeddings(QUERY)[0]) == 10
    index.save(folder)  # removes what the killed ones left
    assert len(list(folder.iterdir())) == 5


def test_an_index_is_the_same_after_it_was_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_files, "_ROWS", 50)  # read in parts
    index = index_of(60)
    index.add_embeddings(["none", "long"], ragged(matrices(2, tokens=[0, 300])), texts=["", "線\n\u2028\x00"])
    index.save(tmp_path / "index")
    opened = MemoryIndex.open(tmp_path / "index", None)
    assert opened.ids() == index.ids() and opened.get("long") == index.get("long")
    queries = ragged(matrices(4, seed=3))
    assert opened.search_embeddings(queries, k=100) == index.search_embeddings(queries, k=100)
    assert found(opened.search_embeddings(queries, filter={"é": "ü"}, k=2)) == found(
        index.search_embeddings(queries, filter={"é": "ü"}, k=2)
    )


def test_an_index_that_was_saved_without_rows_keeps_its_options(tmp_path: Path) -> None:
    MemoryIndex(None, dimensions=8, pool_factor=2).save(tmp_path)
    index = MemoryIndex.open(tmp_path, None)
    index.add_embeddings(["a"], ragged(matrices(1, tokens=41)))
    assert (index.stats().dimensions, index.stats().tokens) == (8, 21)  # the first token is kept as it is
    named = MemoryIndex.open(tmp_path, None, dimensions=16, pool_factor=1)
    named.add_embeddings(["a"], ragged(matrices(1, tokens=41)))
    assert (named.stats().dimensions, named.stats().tokens) == (16, 41)
