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
from millpond.late_interaction.plaid.storage.manifest import CURRENT, FileEntry, Manifest

_TEMPORARY = ".tmp"
OWN_FILES = re.compile(rf"((segment|deleted|codec|projection)-\d{{8,}}\.bin|manifest-\d{{8,}}\.json|{CURRENT})(\.tmp)?")
# What a process that died while it created an index leaves behind.
_UNBORN = re.compile(rf"{LOCK}|manifest-0{{8}}\.json(\.tmp)?|{CURRENT}\.tmp")
_CURRENT_FORM = re.compile(rb"(manifest-\d{8,}\.json) ([0-9a-f]{64})\n?")


class IndexFolder:
    """The files of an index; the folder need not exist."""

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
        form = _CURRENT_FORM.fullmatch(current)
        if form is None:
            raise IndexCorruptedError(
                f"{self.path / CURRENT} is damaged: it has no name and checksum of a manifest; restore it, or build "
                "the index anew"
            )
        path = self.path / form[1].decode()
        content = path.read_bytes()
        if hashlib.sha256(content).hexdigest() != form[2].decode():
            raise IndexCorruptedError(
                f"{path} is damaged: its checksum is not the one in {CURRENT}; restore it, or build the index anew"
            )
        return Manifest.from_bytes(path, content)

    def check(self) -> list[str]:
        """Read every file; returns a sentence for each one that is damaged. Others may write the index meanwhile.

        Raises:
            SourceNotFoundError: There is no index any more.
        """
        while True:
            current = self.current()
            try:
                entries = self.manifest(current).files()
            except IndexCorruptedError as error:
                return [str(error)]
            except FileNotFoundError as error:
                found = [f"{error.filename} is missing"]
            else:
                found = [sentence for entry in entries if (sentence := _wrong(self.path / entry.name, entry))]
            # Files that a writer removed meanwhile are not missing.
            if not found or self.current() == current:
                return found

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
    """New files of a folder, to be named by the manifest after the one now. The caller holds the lock.

    ``mode`` says who may read the files, before the umask.
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

    def commit(self, manifest: Manifest) -> Manifest:
        """Publish a manifest that follows the one now, and remove the files that only that one names.

        Segments whose documents are all deleted are left out; without documents, centroids are trained anew.

        Returns:
            The manifest as it was written.
        """
        segments = tuple(segment for segment in manifest.segments if segment.live_documents)
        generation = self._manifest.generation + 1
        manifest = replace(manifest, segments=segments, generation=generation, next_number=self._next_number)
        if not segments:
            manifest = replace(manifest, codec=None, trained_tokens=0)
        self.publish(manifest)
        self._folder.remove(sorted(self._manifest.names() - manifest.names()))
        return manifest

    def publish(self, manifest: Manifest) -> None:
        """Write a manifest, then ``CURRENT``, which has its name and checksum."""
        content = manifest.to_bytes()
        self._replace(manifest.name, content)
        self._current = f"{manifest.name} {hashlib.sha256(content).hexdigest()}\n".encode()
        self._replace(CURRENT, self._current)

    def _replace(self, name: str, content: bytes) -> None:
        temporary = self._folder.path / (name + _TEMPORARY)
        self._written += [temporary.name] if name == CURRENT else [name, temporary.name]
        _write(temporary, content, self._mode)
        os.replace(temporary, self._folder.path / name)
        self._folder.sync()

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


def _wrong(path: Path, entry: FileEntry) -> str | None:
    """What is wrong with a file."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != entry.bytes:
                return f"{path} has {size} bytes instead of {entry.bytes}"
            if hashlib.file_digest(file, "sha256").hexdigest() != entry.sha256:
                return f"{path} is damaged: its checksum is not the one in the manifest"
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    return None


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
