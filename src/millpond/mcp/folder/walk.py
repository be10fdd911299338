"""What of a folder is read: its regular files, but those that git ignores, that are too large or no text."""

from __future__ import annotations

import os
import stat
import time
from collections import Counter
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from millpond.ingest.sources.ignore import IgnoreStack

MAX_BYTES = 1 << 20
"""Largest file that is read; what is larger is data."""

LINK, SPECIAL, HUGE, UNREADABLE, NAMELESS = "link", "no file", "huge", "unreadable", "name not UTF-8"
BINARY, ENCODING, IGNORED = "binary", "not UTF-8", "ignored"
_BOM = b"\xef\xbb\xbf"
# A file that changes within the tick of a clock after it was read may keep its time: FAT's ticks take two seconds.
_TICK = 2_000_000_000


class Stamp(NamedTuple):
    """What a file's entry says: with another one the file may have changed."""

    text: str  # size, times and inode
    modified: int  # nanoseconds

    @classmethod
    def of(cls, status: os.stat_result) -> Stamp:
        """The stamp of an entry."""
        modified, changed = status.st_mtime_ns, status.st_ctime_ns
        return cls(f"{status.st_size}:{modified}:{changed}:{status.st_ino}", max(modified, changed))

    def proves(self, text: str, read: int) -> bool:
        """Whether a file of this stamp is as it was when it was read, at that time, with the stamp ``text``."""
        return self.text == text and self.modified < read - _TICK


@dataclass
class Listing:
    """The files of a folder, by their paths below it, and how many entries are skipped for which reason."""

    files: dict[str, Stamp] = field(default_factory=dict)
    skipped: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Content:
    """A file as it was read."""

    stamp: Stamp
    read: int  # nanoseconds of the clock, before
    digest: bytes
    text: str
    skipped: str | None = None  # why there is no text


def list_files(root: Path) -> Listing:
    """All that is to be read below a folder. Links are not followed: what they lead to is read itself, or outside."""
    listing = Listing()
    prefix = len(str(root).rstrip(os.sep)) + 1
    pending = [(str(root), IgnoreStack.above(root))]
    while pending:
        folder, above = pending.pop()
        stack = above.within(folder)
        try:
            with os.scandir(folder) as scanned:
                entries = list(scanned)
        except OSError:
            listing.skipped[UNREADABLE] += 1
            continue
        for entry in entries:
            is_folder = entry.is_dir(follow_symlinks=False)
            if stack.ignores(entry.path, is_folder=is_folder):
                listing.skipped[IGNORED] += 1
            elif is_folder:
                pending.append((entry.path, stack))
            else:
                _take(entry, prefix, listing)
    return listing


def _take(entry: os.DirEntry[str], prefix: int, listing: Listing) -> None:
    try:
        status = entry.stat(follow_symlinks=False)
    except OSError:
        listing.skipped[UNREADABLE] += 1
        return
    name = entry.path[prefix:].replace(os.sep, "/")
    if stat.S_ISLNK(status.st_mode):
        listing.skipped[LINK] += 1
    elif not stat.S_ISREG(status.st_mode):
        listing.skipped[SPECIAL] += 1
    elif status.st_size > MAX_BYTES:
        listing.skipped[HUGE] += 1
    elif not name.isascii() and not _has_encoding(name):
        listing.skipped[NAMELESS] += 1
    else:
        listing.files[name] = Stamp.of(status)


def _has_encoding(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def read_file(root: Path, name: str) -> Content | None:
    """A file below a folder; ``None`` if it went, or became a link or anything else that is not read."""
    path, read = os.path.join(root, name), time.time_ns()
    try:
        if os.path.realpath(path) != os.path.join(os.path.realpath(root), *name.split("/")):
            return None  # a folder on the way became a link
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                return None
            data = file.read(MAX_BYTES + 1)
    except OSError:
        return None
    reason, text = None, ""
    if len(data) > MAX_BYTES:
        reason = HUGE
    elif b"\0" in data:
        reason = BINARY
    else:
        try:
            text = data.removeprefix(_BOM).decode()
        except UnicodeDecodeError:
            reason = ENCODING
    return Content(Stamp.of(status), read, blake2b(data, digest_size=16).digest(), text, reason)
