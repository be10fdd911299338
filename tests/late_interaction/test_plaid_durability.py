"""PlaidIndex: what survives a loss of power, a full disk and a process that died, and what a damaged file does."""

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.late_interaction.plaid_data import filled, matrices, names, ragged

from millpond.errors import IndexCorruptedError, SourceNotFoundError
from millpond.late_interaction import PlaidIndex


@pytest.fixture(autouse=True)
def trains_early(train_from: Callable[[int], None]) -> None:
    train_from(500)


def contents(index: PlaidIndex) -> dict[str, tuple[str, Any]]:
    """Texts and metadata by id, as a search finds them."""
    hits = index.search_embeddings(ragged(matrices(1, seed=1)), k=10_000, exact=True)[0]
    found = {hit.id: (hit.text, hit.metadata) for hit in hits}
    assert len(found) == len(index) and set(index.ids()) == set(found)
    return found


def changes(index: PlaidIndex) -> list[Callable[[], Any]]:
    """One change of each kind: a first add, one that trains, deletes, a replacement, a compaction."""

    def add(count: int, prefix: str, seed: int) -> Callable[[], Any]:
        return lambda: index.add_embeddings(
            names(count, prefix),
            ragged(matrices(count, seed=seed)),
            texts=[f"{prefix} {seed} {number}" for number in range(count)],
            metadata=[{"kind": prefix} for _ in range(count)],
        )

    return [
        add(20, "a", 1),
        add(40, "b", 2),
        lambda: index.delete(["a3", "b5", "b6"]),
        add(12, "a", 3),
        lambda: index.delete(filter={"kind": "a"}),
        lambda: index.compact(),
        add(3, "c", 4),
    ]


class Disk:
    """What of a folder a loss of power leaves: contents as of their last fsync, names as of the folder's last one."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.synced: dict[int, bytes] = {}  # content by inode
        self.names: dict[str, int] = {}
        self.before: Callable[[], None] = lambda: None
        fsync, replace, unlink = os.fsync, os.replace, os.unlink

        def watched_fsync(fd: int) -> None:
            self.before()
            fsync(fd)
            inode = os.fstat(fd).st_ino
            if os.path.samestat(os.fstat(fd), os.stat(folder)):
                self.names = self.live()
            else:
                self.synced[inode] = Path(f"/proc/self/fd/{fd}").read_bytes()

        def watched(call: Callable[..., None]) -> Callable[..., None]:
            def watched_call(*args: Any, **options: Any) -> None:
                self.before()
                call(*args, **options)

            return watched_call

        monkeypatch.setattr(os, "fsync", watched_fsync)
        monkeypatch.setattr(os, "replace", watched(replace))
        monkeypatch.setattr(os, "unlink", watched(unlink))

    def live(self) -> dict[str, int]:
        return {entry.name: entry.inode() for entry in os.scandir(self.folder)}

    def after_loss(self, target: Path, kept: dict[str, int]) -> Path:
        """A folder with these names, whose contents are what was synced of them."""
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        for name, inode in kept.items():
            (target / name).write_bytes(self.synced.get(inode, b""))
        return target

    def states(self) -> Iterator[dict[str, int]]:
        """Names that may be there: as of the last sync, those of now, and of now only CURRENT."""
        live = self.live()
        yield self.names
        yield live
        yield {**self.names, **{name: inode for name, inode in live.items() if name == "CURRENT"}}


@pytest.mark.contract
def test_a_loss_of_power_at_any_moment_loses_nothing_that_was_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "index"
    index = PlaidIndex(folder, None)
    disk = Disk(folder, monkeypatch)
    for entry in os.scandir(folder):  # creation was synced
        disk.synced[entry.inode()] = Path(entry.path).read_bytes()
    disk.names = disk.live()
    seen: list[dict[str, Any]] = []
    states = 0

    def lose_power() -> None:
        nonlocal states
        before, disk.before = disk.before, lambda: None
        for kept in list(disk.states()):
            survived = contents(PlaidIndex(disk.after_loss(tmp_path / "survived", kept), None))
            if survived not in seen:
                seen.append(survived)
            states += 1
        disk.before = before

    for change in changes(index):
        acknowledged = contents(index)
        disk.before = lose_power
        seen.clear()
        change()
        disk.before = lambda: None
        # A change may be several commits (an add that trains), of which only the first changes what is found.
        assert all(state in (acknowledged, contents(index)) for state in seen)
        lose_power()
        assert seen[-1] == contents(index)
        assert contents(PlaidIndex(disk.after_loss(tmp_path / "survived", disk.names), None)) == contents(index)
    assert states > 100


def test_every_file_that_a_manifest_names_is_synced_before_current_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = PlaidIndex(tmp_path, None)
    synced: set[str] = set()
    fsync, replace = os.fsync, os.replace
    published = 0

    def watched_fsync(fd: int) -> None:
        fsync(fd)
        synced.add(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))

    def watched_replace(source: Any, target: Any) -> None:
        nonlocal published
        assert os.path.basename(source) in synced
        if os.path.basename(target) == "CURRENT":
            assert tmp_path.name in synced  # the folder, since the manifest has its name
            name = Path(source).read_text().split()[0]
            manifest = json.loads((tmp_path / name).read_bytes())
            entries = [manifest["codec"], *(s[key] for s in manifest["segments"] for key in ("file", "deleted"))]
            written = {entry["name"] for entry in entries if entry} - known
            assert written <= synced
            published += 1
        replace(source, target)
        if os.path.basename(source).startswith("manifest"):
            synced.discard(tmp_path.name)

    for change in changes(index):
        known = set(os.listdir(tmp_path))
        synced.clear()
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", watched_fsync)
            patch.setattr(os, "replace", watched_replace)
            known = {name for name in known if not name.startswith("manifest")}
            change()
    assert published == 9  # one trains, and one merges


class Failure:
    """Makes one of the calls that change files fail: the disk is full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        self.fails_at: int | None = None
        for name in ("open", "fsync", "replace"):
            monkeypatch.setattr(os, name, self._failing(getattr(os, name)))

    def _failing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def failing(*args: Any, **options: Any) -> Any:
            writes = call.__name__ != "open" or (args[1] & os.O_CREAT and not str(args[0]).endswith("LOCK"))
            self.calls += bool(writes)
            if writes and self.calls == self.fails_at:
                raise OSError(errno.ENOSPC, "No space left on device")
            return call(*args, **options)

        return failing


@pytest.mark.contract
@pytest.mark.parametrize(
    "number", [1, *(pytest.param(number, marks=pytest.mark.slow) for number in (0, 2, 3, 4, 5, 6))]
)
def test_a_full_disk_at_any_write_leaves_the_index_as_it_was(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = PlaidIndex(tmp_path / "start", None)
    for change in changes(index)[:number]:
        change()
    failure = Failure(monkeypatch)
    failed, at = 0, 1
    while True:
        copy = tmp_path / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(tmp_path / "start", copy)
        index = PlaidIndex(copy, None)
        before, names_before = contents(index), set(os.listdir(copy))
        current = (copy / "CURRENT").read_bytes()
        failure.calls, failure.fails_at = 0, at
        raised = None
        try:
            changes(index)[number]()
        except OSError as error:
            raised = error
        reached = failure.calls >= at
        failure.fails_at = None
        if not reached:
            break
        failed += 1
        if raised is None:  # training and merging after an add may fail: the documents are stored
            assert contents(index) != before
        elif (copy / "CURRENT").read_bytes() == current:
            assert raised.errno == errno.ENOSPC and "nothing was written to the index" in str(raised)
            assert contents(index) == before
            assert set(os.listdir(copy)) - {"LOCK"} == names_before - {"LOCK"}  # nothing is left over
        else:
            assert "the change was made, but may not survive a loss of power" in str(raised)
        assert contents(PlaidIndex(copy, None)) == contents(index)
        changes(index)[number]()
        assert index.check() == []
        at += 1
    assert failed > 5


def test_what_dead_processes_left_is_swept_at_open(tmp_path: Path) -> None:
    index = filled(tmp_path, 100)
    kept = set(os.listdir(tmp_path))
    left = [
        "segment-00000099.bin",
        "deleted-00000098.bin",
        "codec-00000097.bin",
        "projection-00000096.bin",
        "manifest-00000095.json",
        "manifest-00000096.json.tmp",
        "CURRENT.tmp",
    ]
    mine = ["notes.txt", "segment-1.bin", "segment-00000001.bin.bak"]
    for name in [*left, *mine]:
        (tmp_path / name).write_bytes(b"half")
    assert len(PlaidIndex(tmp_path, None)) == 100
    assert set(os.listdir(tmp_path)) == kept | set(mine)
    assert index.check() == [] and len(index) == 100


def test_files_of_a_writer_that_lives_are_not_swept(tmp_path: Path) -> None:
    index = filled(tmp_path, 20)
    with index._lock.held():
        (tmp_path / "segment-00000099.bin").write_bytes(b"half")
        PlaidIndex(tmp_path, None)
        assert (tmp_path / "segment-00000099.bin").exists()
    PlaidIndex(tmp_path, None)
    assert not (tmp_path / "segment-00000099.bin").exists()


def test_a_file_that_a_dead_process_left_is_no_obstacle(tmp_path: Path) -> None:
    index = filled(tmp_path, 20)
    for number in range(1, 40):  # numbers that this index will use
        for kind in ("segment", "deleted", "codec"):
            path = tmp_path / f"{kind}-{number:08d}.bin"
            if not path.exists():
                path.write_bytes(b"half")
    for change in changes(index):
        change()
    assert index.check() == [] and len(contents(index)) == len(index)


def test_a_creation_that_was_interrupted_is_done_again(tmp_path: Path) -> None:
    (tmp_path / "LOCK").write_text("123")
    (tmp_path / "manifest-00000000.json").write_text("{half")
    (tmp_path / "CURRENT.tmp").write_text("half")
    index = PlaidIndex(tmp_path, None, "int8")
    assert len(index) == 0 and index.codec == "int8"


def test_without_current_the_files_of_an_index_are_not_taken_for_an_empty_folder(tmp_path: Path) -> None:
    filled(tmp_path, 20)
    (tmp_path / "CURRENT").unlink()
    before = set(os.listdir(tmp_path))
    with pytest.raises(IndexCorruptedError, match="CURRENT is missing"):
        PlaidIndex(tmp_path, None)
    assert set(os.listdir(tmp_path)) == before


def every_kind_of_file(tmp_path: Path) -> tuple[Path, list[str], PlaidIndex]:
    """An index, its folder, and the names of its files."""
    folder = tmp_path / "index"
    index = PlaidIndex(folder, None, dimensions=8)
    index.add_embeddings(names(100), ragged(matrices(100)), texts=["text"] * 100)
    index.delete(["d7"])
    return folder, sorted(set(os.listdir(folder)) - {"LOCK"}), index


def kinds(files: list[str]) -> set[str]:
    return {name.split("-")[0] for name in files}


def test_a_truncated_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    folder, files, _ = every_kind_of_file(tmp_path)
    assert kinds(files) == {"CURRENT", "manifest", "segment", "codec", "deleted", "projection"}
    for name in files:
        size = (folder / name).stat().st_size
        for length in sorted({0, 1, 15, size // 2, size - 1}):
            copy = tmp_path / "copy"
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(folder, copy)
            os.truncate(copy / name, length)
            if name == "CURRENT" and length == size - 1:  # its line's end
                assert len(PlaidIndex(copy, None)) == 99
                continue
            with pytest.raises(IndexCorruptedError, match=name):
                PlaidIndex(copy, None)


def test_a_missing_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    folder, files, index = every_kind_of_file(tmp_path)
    for name in files:
        copy = tmp_path / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(folder, copy)
        (copy / name).unlink()
        with pytest.raises(IndexCorruptedError, match=rf"{name} is missing"):
            PlaidIndex(copy, None)
        if name != "CURRENT":
            (folder / name).rename(tmp_path / "away")
            assert [f"{name} is missing" in sentence for sentence in index.check()] == [True]
            (tmp_path / "away").rename(folder / name)


@pytest.mark.contract
def test_a_flipped_bit_anywhere_is_found_and_crashes_nothing(tmp_path: Path) -> None:
    folder, files, index = every_kind_of_file(tmp_path)
    random = np.random.default_rng(0)
    query = ragged(matrices(2, seed=4))
    for name in files:
        content = (folder / name).read_bytes()
        flips = {*range(0, min(len(content), 400), 7), *random.integers(len(content), size=60).tolist()}
        for place in sorted(flips):
            (folder / name).write_bytes(content[:place] + bytes([content[place] ^ 64]) + content[place + 1 :])
            sentences = index.check()
            assert len(sentences) == 1 and (name in sentences[0] or name == "CURRENT")
            with suppress(IndexCorruptedError):  # or it is a wrong score, text or metadata, which check() finds
                opened = PlaidIndex(folder, None)
                opened.search_embeddings(query, k=200)
                opened.search_embeddings(query, k=3, candidates=3, filter={"a": 1})
        (folder / name).write_bytes(content)
    assert index.check() == []


def test_damaged_files_are_all_named_and_the_small_ones_when_they_are_opened(tmp_path: Path) -> None:
    folder, files, index = every_kind_of_file(tmp_path)
    named = [name for name in files if name.endswith(".bin")]
    for name in named:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
        if not name.startswith("segment"):
            with pytest.raises(IndexCorruptedError, match=r"(codec|deleted|projection)-\d+.bin is damaged"):
                PlaidIndex(folder, None)
    sentences = index.check()
    assert len(sentences) == len(named) == 4
    assert all(any(name in sentence for sentence in sentences) for name in named)


def test_codes_outside_of_the_centroids_are_an_error_and_not_read(tmp_path: Path) -> None:
    index = filled(tmp_path, 100)
    path = next(tmp_path.glob("segment-*"))
    codes = index._snapshot.segments[0].file.columns.codes
    assert codes is not None
    content = path.read_bytes()
    assert content.count(codes.tobytes()) == 1
    path.write_bytes(content.replace(codes.tobytes(), np.full_like(codes, 60_000).tobytes()))
    opened = PlaidIndex(tmp_path, None)
    with pytest.raises(IndexCorruptedError, match=path.name):
        opened.search_embeddings(ragged(matrices(1)))


def test_an_index_that_was_removed_says_so(tmp_path: Path) -> None:
    index = filled(tmp_path / "index", 10)
    shutil.rmtree(tmp_path / "index")
    with pytest.raises(SourceNotFoundError, match="CURRENT is missing"):
        index.search_embeddings(ragged(matrices(1)))
    with pytest.raises(SourceNotFoundError, match="build it first"):
        index.check()
