"""MemoryIndex.save and open: atomic, checked, and readable from an earlier version's files."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from tests.late_interaction.index_contract import found, matrices, names, ragged

from millpond.errors import IndexCorruptedError, InvalidRequestError, SourceNotFoundError
from millpond.late_interaction import MemoryIndex, PlaidIndex

QUERY = ragged(matrices(1, seed=9))
FILES = ["CURRENT", "codec", "manifest", "projection", "segment"]
OLD = Path(__file__).with_name("memory_index_written_by_890fe26.zip")


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
    monkeypatch.setattr("millpond.late_interaction.memory.store._CODED_DOCUMENTS", 10)
    index_of(dimensions=16).save(tmp_path / "index")
    return tmp_path / "index"


def file_of(folder: Path, name: str) -> Path:
    (path,) = [path for path in folder.iterdir() if path.stem.partition("-")[0] == name]
    return path


def files(folder: Path) -> dict[str, bytes]:
    """All but the lock, which holds the id of the last process that wrote."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "LOCK"}


def test_a_folder_has_each_file_once_and_only_its_owner_reads_them(folder: Path) -> None:
    assert sorted(name.partition("-")[0] for name in files(folder)) == FILES
    assert {stat.S_IMODE((folder / name).stat().st_mode) for name in files(folder)} == {0o600}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["cut", "longer", "changed", "missing", "empty"])
def test_a_damaged_file_is_named(folder: Path, name: str, damage: str) -> None:
    path = file_of(folder, name)
    data = path.read_bytes()
    match damage:
        case "missing":
            path.unlink()
        case "cut":
            path.write_bytes(data[:-2])
        case "longer":
            path.write_bytes(data + b"\n")
        case "empty":
            path.write_bytes(b"")
        case "changed":
            path.write_bytes(data[:-3] + bytes((data[-3] ^ 1,)) + data[-2:])
    error = SourceNotFoundError if (name, damage) == ("CURRENT", "missing") else IndexCorruptedError
    with pytest.raises(error, match="has no index" if error is SourceNotFoundError else name):
        MemoryIndex.open(folder, None)


@pytest.mark.parametrize("part", [0, 9, 40, 90])
@pytest.mark.parametrize("name", ["segment", "codec"])
def test_a_damaged_header_is_named(folder: Path, name: str, part: int) -> None:
    path = file_of(folder, name)
    data = bytearray(path.read_bytes())
    data[part] ^= 0x15
    path.write_bytes(data)
    with pytest.raises(IndexCorruptedError, match=path.name):
        MemoryIndex.open(folder, None)


def changed(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest, with a checksum that fits: a folder that was made so."""
    path = file_of(folder, "manifest")
    content = json.loads(path.read_bytes())
    change(content)
    path.write_text(json.dumps(content))
    (folder / "CURRENT").write_text(f"{path.name} {sha256(path.read_bytes()).hexdigest()}\n")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "has format 2, and this version of millpond reads 1; use a newer version"),
        ({"payload": "int4"}, "unknown codec 'int4'"),
        ({"payload": "bfloat16"}, "not 16 columns of bfloat16"),
        ({"payload": "4"}, "no saved index has codec '4'"),
        ({"codec": None}, "point outside"),
        ({"segments": None}, "is not a manifest"),
        ({"settings": {"model": None}}, "damaged"),
        ({"settings": {"model": None, "native": 32, "width": 17, "pool_factor": 1}}, "instead of 17"),
    ],
    ids=str,
)
def test_a_manifest_that_does_not_fit_is_refused(folder: Path, change: dict[str, Any], message: str) -> None:
    changed(folder, lambda content: content.update(change))
    with pytest.raises(IndexCorruptedError, match=message) as caught:
        MemoryIndex.open(folder, None)
    assert str(folder) in str(caught.value)


def test_a_path_without_an_index_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path, tmp_path / "missing", tmp_path / "file"):
        with pytest.raises(SourceNotFoundError, match="has no index that MemoryIndex.save wrote"):
            MemoryIndex.open(path, None)


def test_other_files_and_other_indexes_are_not_overwritten(tmp_path: Path) -> None:
    index = index_of(3)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("x")
    with pytest.raises(InvalidRequestError, match=r"folder' has other files, as 'notes.txt'; save .* new folder"):
        index.save(tmp_path / "folder")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InvalidRequestError, match="is a file or lies in one"):
            index.save(path)
    with PlaidIndex(tmp_path / "plaid", None) as plaid:
        plaid.add_embeddings(["a"], ragged(matrices(1)))
        before = files(tmp_path / "plaid")
        with pytest.raises(InvalidRequestError, match="has a PlaidIndex; save the index to an empty"):
            index.save(tmp_path / "plaid")
        with pytest.raises(InvalidRequestError, match="open it with PlaidIndex"):
            MemoryIndex.open(tmp_path / "plaid", None)
        assert files(tmp_path / "plaid") == before
    index.save(tmp_path / "saved")
    with pytest.raises(InvalidRequestError, match="was saved by MemoryIndex; open it with MemoryIndex"):
        PlaidIndex(tmp_path / "saved", None)


def test_a_save_replaces_the_index_and_its_files(tmp_path: Path) -> None:
    first, second = index_of(5), index_of(9, codec="float32")
    for index in (first, second, first, second):
        index.save(str(tmp_path / "new" / "index"))
    folder = tmp_path / "new" / "index"
    assert sorted(name.partition("-")[0] for name in files(folder)) == ["CURRENT", "manifest", "segment"]
    opened = MemoryIndex.open(folder, None)
    assert len(opened) == 9 and opened.stats() == second.stats()
    opened.delete(names(3))
    opened.save(folder)
    assert MemoryIndex.open(folder, None).ids() == names(9)[3:]


@pytest.mark.parametrize("step", range(8))
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

    index = index_of(7, dimensions=16)
    monkeypatch.setattr(os, "fsync", failing(os.fsync))
    monkeypatch.setattr(os, "replace", failing(os.replace))
    with pytest.raises(OSError, match="No space left"):
        index.save(folder)
    assert files(folder) == before
    monkeypatch.undo()
    index.save(folder)
    assert len(steps) == step + 1
    assert len(MemoryIndex.open(folder, None)) == 7


def test_every_file_is_synced_before_the_manifest_and_current_are_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: (events.append("sync"), sync(descriptor))[1])
    monkeypatch.setattr(os, "replace", lambda *paths: (events.append("replace"), replace(*paths))[1])
    index_of(5).save(tmp_path / "index")
    # The folder above, the segment, the manifest; its name, with the folder; CURRENT; its name, with the folder.
    assert events == ["sync", "sync", "sync", "replace", "sync", "sync", "replace", "sync"]


def test_an_index_of_an_earlier_version_is_read_and_replaced(tmp_path: Path) -> None:
    """Written by millpond at 890fe26: arrays as .npy, documents as JSON lines."""
    with zipfile.ZipFile(OLD) as archive:
        archive.extractall(tmp_path)
    queries = ragged(matrices(1, width=12, seed=9), 12)
    index = MemoryIndex.open(tmp_path, None, dimensions=8)
    for _ in range(2):
        stats = index.stats()
        assert (stats.documents, stats.tokens, stats.dimensions, stats.codec) == (12, 36, 8, "int8")
        assert stats.details["centroids"] == 23
        hits = index.search_embeddings(queries, k=3)[0]
        assert [hit.id for hit in hits] == ["doc-6", "doc-7", "doc-5"]
        assert [hit.score for hit in hits] == pytest.approx([2.8099194, 2.7121506, 2.5310850], abs=1e-5)
        assert (hits[0].text, hits[0].metadata) == ("text 6 水", {"n": 6})
        index.save(tmp_path)
        assert sorted(name.partition("-")[0] for name in files(tmp_path)) == FILES
        index = MemoryIndex.open(tmp_path, None)


@pytest.mark.parametrize("name", ["index", "rows", "documents", "lengths", "centroids"])
def test_a_damaged_file_of_an_earlier_version_is_named(tmp_path: Path, name: str) -> None:
    with zipfile.ZipFile(OLD) as archive:
        archive.extractall(tmp_path)
    path = file_of(tmp_path, name)
    data = path.read_bytes()
    path.write_bytes(data[:-3] + bytes((data[-3] ^ 1,)) + data[-2:])
    with pytest.raises(IndexCorruptedError, match=path.name):
        MemoryIndex.open(tmp_path, None)
    if name != "index":
        path.unlink()
        with pytest.raises(IndexCorruptedError, match=f"{path.name} is missing"):
            MemoryIndex.open(tmp_path, None)


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
        for number in range(6):
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
    assert len(files(folder)) == 3


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


@pytest.mark.slow
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
    assert len(files(folder)) == 3


def test_an_index_is_the_same_after_it_was_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millpond.late_interaction.memory.files._ROWS", 50)  # read in parts
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
