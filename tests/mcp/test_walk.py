"""What of a folder is read."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from millpond.mcp.folder import walk
from millpond.mcp.folder.walk import BINARY, ENCODING, HUGE, IGNORED, LINK, SPECIAL, Stamp, list_files, read_file


def test_files_that_are_read_and_those_that_are_counted(tmp_path: Path):
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / "sub").mkdir(parents=True)
    outside.mkdir()
    (outside / "secret.txt").write_text("secret")
    (root / "a.md").write_text("a")
    (root / "sub" / "b.txt").write_text("b")
    (root / ".hidden").write_text("read, as git does")
    (root / "data.bin").write_bytes(b"\0\1")
    (root / "latin.txt").write_bytes("ä".encode("latin-1"))
    (root / "large.txt").write_bytes(b"x" * (walk.MAX_BYTES + 1))
    (root / "link.txt").symlink_to(outside / "secret.txt")
    (root / "folder").symlink_to(outside)
    (root / "loop").symlink_to(root)
    (root / "noise.log").write_text("x")
    (root / ".gitignore").write_text("*.log\n")
    os.mkfifo(root / "pipe")
    listing = list_files(root)
    assert set(listing.files) == {"a.md", "sub/b.txt", ".hidden", "data.bin", "latin.txt", ".gitignore"}
    assert listing.skipped == {LINK: 3, HUGE: 1, IGNORED: 1, SPECIAL: 1}
    contents = {name: read_file(root, name) for name in listing.files}
    assert {name: content.skipped for name, content in contents.items() if content and content.skipped} == {
        "data.bin": BINARY,
        "latin.txt": ENCODING,
    }
    assert contents["sub/b.txt"] is not None and contents["sub/b.txt"].text == "b"


@pytest.mark.parametrize("name", ["link.txt", "folder/secret.txt", "../outside/secret.txt", "gone.txt", "pipe"])
def test_nothing_outside_the_folder_is_read(tmp_path: Path, name: str):
    """A file may become a link between the listing and the reading, and so may its folder."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (outside / "secret.txt").write_text("secret")
    (root / "link.txt").symlink_to(outside / "secret.txt")
    (root / "folder").symlink_to(outside)
    os.mkfifo(root / "pipe")
    (root / "file.txt").write_text("read")
    assert read_file(root, "file.txt") is not None
    assert read_file(root, name) is None


def test_a_stamp_proves_nothing_of_a_file_that_changed_just_now(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_text("a")
    stamp, now = Stamp.of(path.stat()), time.time_ns()
    assert not stamp.proves(stamp.text, now)
    assert stamp.proves(stamp.text, now + 10 * 10**9)
    assert not stamp.proves("another", now + 10 * 10**9)


def test_a_time_that_was_set_back_is_noticed(tmp_path: Path):
    """Size and modification time may be the same: the time of the change is not."""
    path = tmp_path / "a.txt"
    path.write_text("a")
    before = path.stat()
    path.write_text("b")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert Stamp.of(path.stat()).text != Stamp.of(before).text
