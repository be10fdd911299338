"""The folder of an index: every file is synced before a manifest names it, and ``CURRENT`` changes last."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from millpond.errors import IndexCorruptedError, InvalidRequestError, MillpondError, SourceNotFoundError
from millpond.late_interaction.plaid.storage.lock import LOCK
from millpond.late_interaction.plaid.storage.manifest import (
    CURRENT,
    FileEntry,
    Manifest,
    current_bytes,
    read_current,
    without_empty,
)

_TEMPORARY = ".tmp"
OWN_FILES = re.compile(rf"((segment|deleted|codec|projection)-\d{{8,}}\.bin|manifest-\d{{8,}}\.json|{CURRENT})(\.tmp)?")
# What a process that died while it created an index leaves behind.
_UNBORN = re.compile(rf"{LOCK}|manifest-0{{8}}\.json(\.tmp)?|{CURRENT}\.tmp")


class IndexFolder:
    """The files of an index.

    Args:
        path: The folder; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def exists(self) -> bool:
        """Whether there is an index; ``False`` if there is room for one.

        Raises:
            InvalidRequestError: There is something else.
            IndexCorruptedError: There are files of an index, without ``CURRENT``.
        """
        if (self.path / CURRENT).is_file():
            return True
        if not os.path.lexists(self.path):
            return False
        if not self.path.is_dir():
            raise InvalidRequestError(f"{self.path} is a file; an index is a folder, pass another path")
        names = [name for name in os.listdir(self.path) if not _UNBORN.fullmatch(name)]
        if any(OWN_FILES.fullmatch(name) for name in names):
            raise IndexCorruptedError(
                f"{self.path / CURRENT} is missing beside the files of an index; restore it, or build the index anew"
            )
        if names:
            raise InvalidRequestError(
                f"{self.path} is not an index: it holds {names[0]!r} and no {CURRENT}; pass an index, an empty folder "
                "or a path that does not exist"
            )
        return False

    def create(self, manifest: Manifest) -> None:
        """Make an index without documents. The caller holds the lock."""
        if not (self.path / CURRENT).exists():
            with Transaction(self, manifest).rolled_back_on_error() as transaction:
                transaction.publish(manifest)

    def current(self) -> bytes:
        """The content of ``CURRENT``.

        Raises:
            SourceNotFoundError: There is none: the index was removed.
        """
        try:
            return (self.path / CURRENT).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise SourceNotFoundError(f"{self.path} has no index ({CURRENT} is missing); build it first") from None

    def manifest(self, current: bytes) -> Manifest:
        """The manifest that a content of ``CURRENT`` names.

        Raises:
            FileNotFoundError: It was removed.
            IndexCorruptedError: It, or ``CURRENT``, is damaged.
        """
        name, checksum = read_current(self.path / CURRENT, current)
        path = self.path / name
        content = path.read_bytes()
        if hashlib.sha256(content).hexdigest() != checksum:
            raise IndexCorruptedError(
                f"{path} is damaged: its checksum is not the one in {CURRENT}; restore it, or build the index anew"
            )
        return Manifest.from_bytes(path, content)

    def orphans(self, manifest: Manifest) -> list[str]:
        """Files of an index that the manifest does not name: what a process left that died, or what one writes now."""
        used = manifest.names() | {CURRENT}
        return sorted(name for name in os.listdir(self.path) if OWN_FILES.fullmatch(name) and name not in used)

    def remove(self, names: list[str]) -> None:
        """Remove files. Who has them mapped can read on."""
        for name in names:
            with suppress(OSError):  # they are swept the next time
                os.unlink(self.path / name)

    def sync(self) -> None:
        """Make the names in the folder durable."""
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            _sync(fd)
        finally:
            os.close(fd)


class Transaction:
    """New files, and the manifest that names them. The caller holds the lock.

    Args:
        folder: The folder.
        manifest: The manifest now.
        mode: Who may read the files, before the umask.
    """

    def __init__(self, folder: IndexFolder, manifest: Manifest, *, mode: int = 0o666) -> None:
        self._folder = folder
        self._mode = mode
        self._manifest = manifest
        self._next_number = manifest.next_number
        self._written: list[str] = []
        self._current: bytes | None = None

    def new_path(self, kind: str) -> Path:
        """The path of a file to write; it does not exist."""
        name = f"{kind}-{self._next_number:08d}.bin"
        self._next_number += 1
        self._written.append(name)
        path = self._folder.path / name
        with suppress(FileNotFoundError):  # of a process that died
            path.unlink()
        return path

    def entry(self, path: Path) -> FileEntry:
        """Sync a file that was written, and describe it."""
        with path.open("rb") as file:
            _sync(file.fileno())
            digest = hashlib.file_digest(file, "sha256")
            return FileEntry(name=path.name, bytes=os.fstat(file.fileno()).st_size, sha256=digest.hexdigest())

    def write(self, kind: str, content: bytes) -> FileEntry:
        """Write and sync a small file."""
        path = self.new_path(kind)
        _write(path, content, self._mode)
        return FileEntry(name=path.name, bytes=len(content), sha256=hashlib.sha256(content).hexdigest())

    def commit(self, manifest: Manifest) -> tuple[bytes, Manifest]:
        """Publish a manifest that follows the one now; then remove the files that only that one names.

        Returns:
            The new content of ``CURRENT``, and the manifest as it was written.
        """
        manifest = replace(
            without_empty(manifest), generation=self._manifest.generation + 1, next_number=self._next_number
        )
        current = self.publish(manifest)
        self._folder.remove(sorted(self._manifest.names() - manifest.names()))
        return current, manifest

    def publish(self, manifest: Manifest) -> bytes:
        """Write a manifest, then ``CURRENT``; returns the content of that."""
        content = manifest.to_bytes()
        folder = self._folder.path
        self._written += [manifest.name, manifest.name + _TEMPORARY, CURRENT + _TEMPORARY]
        _write(folder / (manifest.name + _TEMPORARY), content, self._mode)
        os.replace(folder / (manifest.name + _TEMPORARY), folder / manifest.name)
        self._folder.sync()
        self._current = current_bytes(manifest.name, content)
        _write(folder / (CURRENT + _TEMPORARY), self._current, self._mode)
        os.replace(folder / (CURRENT + _TEMPORARY), folder / CURRENT)
        self._folder.sync()
        return self._current

    @contextmanager
    def rolled_back_on_error(self) -> Iterator[Transaction]:
        """Remove the new files after an error, unless it came after the manifest was published."""
        try:
            yield self
        except BaseException as error:
            published = self._current is not None and self._published()
            if not published:
                self._folder.remove(self._written)
            if isinstance(error, OSError) and not isinstance(error, MillpondError):
                raise _with_consequence(error, self._folder.path, published=published) from error
            raise

    def _published(self) -> bool:
        try:
            return self._folder.current() == self._current
        except (OSError, SourceNotFoundError):
            return True  # cannot tell: what is not needed is swept later


def _write(path: Path, content: bytes, mode: int) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
        file.write(content)
        file.flush()
        _sync(file.fileno())


def _sync(fd: int) -> None:
    # macOS's fsync leaves the data in the drive's cache.
    if hasattr(fcntl, "F_FULLFSYNC"):
        fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
    else:
        os.fsync(fd)


def _with_consequence(error: OSError, path: Path, *, published: bool) -> OSError:
    """The error with what it means for the index; the operating system names no file when a disk is full."""
    consequence = (
        "the change was made, but may not survive a loss of power; make it again once the disk can be written"
        if published
        else "nothing was written to the index, make room or allow writing, and try again"
    )
    return OSError(error.errno, f"{error.strerror or error}; {consequence}", str(error.filename or path))
