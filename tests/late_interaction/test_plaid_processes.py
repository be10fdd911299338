"""PlaidIndex: readers and writers in several objects, threads and processes."""

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.late_interaction.plaid_data import WIDTH, filled, matrices, names, ragged

from millpond.errors import IndexLockedError, InvalidRequestError
from millpond.late_interaction import PlaidIndex, Ragged

ROOT = Path(__file__).parents[2]
WAIT = "millpond.late_interaction.plaid.storage.lock.WAIT_SECONDS"
MANIFEST = "millpond.late_interaction.plaid.storage.folder.IndexFolder.manifest"
HOLDER = """
import fcntl, os, sys
with open(sys.argv[1], "w") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    file.write(str(os.getpid()))
    file.flush()
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def trains_early(train_from: Callable[[int], None]) -> None:
    train_from(2_000)


def test_a_reader_sees_what_another_object_committed(tmp_path: Path) -> None:
    reader = PlaidIndex(tmp_path, None)
    query = ragged(matrices(1, seed=3))
    assert reader.search_embeddings(query) == [[]]
    writer = filled(tmp_path, 200)
    assert reader.search_embeddings(query, k=5) == writer.search_embeddings(query, k=5)
    best = reader.search_embeddings(query, k=1)[0][0].id
    writer.delete([best])
    assert best not in reader and len(reader) == 199
    assert reader.search_embeddings(query, k=1)[0][0].id != best
    writer.compact()
    assert reader.search_embeddings(query, k=5) == writer.search_embeddings(query, k=5)
    assert reader.stats() == writer.stats()


def test_a_reader_that_had_opened_an_empty_index_projects_its_queries(tmp_path: Path) -> None:
    reader, writer = PlaidIndex(tmp_path, None, dimensions=8), PlaidIndex(tmp_path, None)
    writer.add_embeddings(names(50), ragged(matrices(50)))
    query = ragged(matrices(1, seed=3))
    assert reader.search_embeddings(query, k=5) == writer.search_embeddings(query, k=5) != [[]]


def test_a_projection_of_rows_that_another_object_did_not_store_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = PlaidIndex(tmp_path, None, dimensions=8), PlaidIndex(tmp_path, None, dimensions=8)
    upsert = second._upsert

    def late(documents: Any) -> int:
        # Both have fitted a projection; the other one is stored first.
        new = upsert(documents)
        first.add_embeddings(["first"], ragged([np.concatenate(matrices(20, seed=1))]))
        return new

    monkeypatch.setattr(second, "_upsert", late)
    with pytest.raises(InvalidRequestError, match=r"another projection.*again"):
        second.add_embeddings(["second"], ragged([np.concatenate(matrices(20, seed=2))]))
    assert PlaidIndex(tmp_path, None).ids() == ["first"]
    monkeypatch.undo()
    assert second.add_embeddings(["second"], ragged(matrices(1))).added == 1
    assert first.ids() == ["first", "second"]


@pytest.mark.parametrize("piece", [1, 2])
@pytest.mark.parametrize("width", [None, 8], ids=["uncut", "projected"])
def test_rows_that_were_made_before_another_object_stored_the_first_ones_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int, width: int | None
) -> None:
    monkeypatch.setattr("millpond.late_interaction.index.base._PIECE", 1)
    first, second = PlaidIndex(tmp_path, None, dimensions=width), PlaidIndex(tmp_path, None, dimensions=width)
    prepare, prepared = second._encoding.documents, []
    narrow = WIDTH if width else WIDTH - 1

    def late(embeddings: Ragged) -> Ragged:
        prepared.append(prepare(embeddings))
        if len(prepared) == piece:
            first.add_embeddings(["first"], ragged([np.concatenate(matrices(20, seed=1, width=narrow))], narrow))
        return prepared[-1]

    monkeypatch.setattr(second._encoding, "documents", late)
    with pytest.raises(InvalidRequestError, match=r"another width or with another projection.*again"):
        second.add_embeddings(names(2), ragged([np.concatenate(matrices(20, seed=seed)) for seed in (2, 3)]))
    assert PlaidIndex(tmp_path, None).ids() == first.ids() == ["first"]


@pytest.mark.parametrize("removed", ["manifest", "segments"])
def test_an_opening_whose_files_a_writer_removes_takes_the_new_state(
    tmp_path: Path, removed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = filled(tmp_path, 200)
    writer.delete(["d1"])
    read_manifest = type(writer._folder).manifest
    opened = 0

    def raced(folder: Any, current: bytes) -> Any:
        nonlocal opened
        opened += 1
        if opened > 1:
            return read_manifest(folder, current)
        manifest = None if removed == "manifest" else read_manifest(folder, current)
        with monkeypatch.context() as patch:
            patch.setattr(MANIFEST, read_manifest)
            writer.compact()
        return read_manifest(folder, current) if manifest is None else manifest

    monkeypatch.setattr(MANIFEST, raced)
    reader = PlaidIndex(tmp_path, None)
    assert opened == 2 and len(reader) == 199
    assert reader.search_embeddings(ragged(matrices(1)), k=3) == writer.search_embeddings(ragged(matrices(1)), k=3)


def test_files_that_a_writer_removes_during_a_check_are_not_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = filled(tmp_path, 200)
    index.delete(["d1"])
    manifest = type(index._folder).manifest
    checked: list[int] = []

    def raced(folder: Any, current: bytes) -> Any:
        found = manifest(folder, current)
        checked.append(found.generation)
        if len(checked) == 1:
            with monkeypatch.context() as patch:
                patch.setattr(MANIFEST, manifest)
                PlaidIndex(tmp_path, None).compact()
        return found

    monkeypatch.setattr(MANIFEST, raced)
    assert index.check() == [] and checked == [checked[0], *[checked[0] + 1] * 2]  # the third to measure the drift


def test_a_closed_index_lets_its_files_go(tmp_path: Path) -> None:
    index = filled(tmp_path, 200)
    index.search_embeddings(ragged(matrices(1)))
    segment = next(tmp_path.glob("segment-*"))

    def mapped() -> bool:
        return str(segment) in Path("/proc/self/maps").read_text()

    assert mapped()
    index.close()
    gc.collect()
    assert not mapped()


@pytest.mark.contract
def test_writers_in_several_objects_and_threads_lose_nothing(tmp_path: Path) -> None:
    indexes = [PlaidIndex(tmp_path, None) for _ in range(3)]

    def write(number: int) -> None:
        index = indexes[number % 3]
        for batch in range(5):
            ids = [f"{number}-{batch}-{part}" for part in range(4)]
            index.add_embeddings([*ids, "shared"], ragged(matrices(5, seed=10 * number + batch)))
            index.delete(ids[:1])
            if batch == 3:
                index.compact()

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(write, range(6)))
    expected = {f"{number}-{batch}-{part}" for number in range(6) for batch in range(5) for part in (1, 2, 3)}
    for index in indexes:
        assert set(index.ids()) == expected | {"shared"} and len(index) == 91
    assert indexes[0].check() == []


@pytest.mark.contract
def test_a_lock_that_another_process_holds_is_waited_for_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = filled(tmp_path, 20)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, tmp_path / "LOCK"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None and holder.stdin is not None
        assert holder.stdout.readline() == "held\n"
        monkeypatch.setattr(WAIT, 0.05)
        for write in (
            lambda: index.delete(["d1"]),
            lambda: index.add_embeddings(["x"], ragged(matrices(1))),
            lambda: index.compact(),
        ):
            with pytest.raises(IndexLockedError, match=rf"process {holder.pid}.*0\.05 seconds.*try again"):
                write()
        # Readers need no lock, and opening sweeps nothing of a living writer.
        assert len(PlaidIndex(tmp_path, None).search_embeddings(ragged(matrices(1)), k=20)[0]) == 20
        monkeypatch.setattr(WAIT, 60)
        waiting = threading.Thread(target=lambda: index.delete(["d1"]))
        waiting.start()
        assert "d1" in index
        holder.stdin.close()
        waiting.join()
    assert "d1" not in index and len(index) == 19


def in_child(work: Any) -> int:
    """The exit status of a forked child that runs ``work``; 14 is SIGALRM's."""
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]


@pytest.mark.contract
def test_a_forked_child_reads_and_writes(tmp_path: Path) -> None:
    index = filled(tmp_path, 200)
    query = ragged(matrices(2, seed=3))
    expected = index.search_embeddings(query, k=7)

    def child() -> None:
        assert index.search_embeddings(query, k=7) == expected
        assert index.search_embeddings(query, k=7, exact=True, filter={"third": 1})
        index.add_embeddings(["child"], ragged(matrices(1, seed=9)))
        assert index.delete(["d0"]) == 1

    assert in_child(child) == 0
    assert "child" in index and "d0" not in index and len(index) == 200


@pytest.mark.contract
def test_a_child_that_was_forked_while_another_thread_writes_can_write_later(tmp_path: Path) -> None:
    index = filled(tmp_path, 20)
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with index._lock.held():
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    reading, writing = os.pipe()

    def child() -> None:
        assert len(index) == 20  # no lock is needed
        os.write(writing, b".")
        assert index.delete(["d1"]) == 1  # waits for the parent's thread

    finished: list[int] = []
    parent = threading.Thread(target=lambda: finished.append(in_child(child)))
    parent.start()
    os.read(reading, 1)
    done.set()
    thread.join()
    parent.join()
    os.close(reading)
    os.close(writing)
    assert finished == [0] and "d1" not in index


def test_a_folder_that_cannot_be_written_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path, 50)
    (tmp_path / "segment-00000077.bin").write_bytes(b"an orphan")
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    os_open = os.open

    def read_only(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(30, "Read-only file system", str(path))
        return os_open(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", read_only)
    index = PlaidIndex(tmp_path, None)
    assert len(index.search_embeddings(ragged(matrices(1)), k=50)[0]) == 50
    assert index.check() == [] and "d1" in index and len(index.ids()) == 50
    with pytest.raises(OSError, match=r"Read-only file system.*cannot be written"):
        index.delete(["d1"])
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


@pytest.mark.slow
def test_killed_writers_lose_nothing_and_disturb_no_reader() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.late_interaction.plaid_kill", "--kills", "25", "--seed", "7"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Outcome(kills=25") and done.stderr == ""
