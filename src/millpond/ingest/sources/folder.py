"""Folders as sources: the files of a kind that is read, without those that are hidden or that git ignores."""

from __future__ import annotations

import logging
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from millpond.ingest.record import Record, Rejected
from millpond.ingest.sources.files.file_records import file_records, shown
from millpond.ingest.sources.files.kinds import READ, check_kinds, incomplete, kind_of_file
from millpond.ingest.sources.ignore import IgnoreStack

logger = logging.getLogger(__name__)

_NAMED_FILES = 10


_OTHER = f"it is no {READ}"
_IGNORED = "git ignores it"
_LINKED_FOLDER = "a link to a folder"
_LEAVES = "a link that leaves the folder"
_READ_ITSELF = "a link to a file that is read itself"


@dataclass(frozen=True, kw_only=True)
class SkippedFiles:
    """The files of a folder that were not read: those of another kind, some links, and what git ignores.

    Attributes:
        count: How many; a folder that git ignores counts as one.
        names: The first of them, as paths relative to the folder.
        reasons: How many for each reason.
    """

    count: int
    names: tuple[str, ...]
    reasons: Mapping[str, int] = field(default_factory=dict)


@dataclass
class _Skips:
    """Counts what is not read while a folder is walked."""

    first: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    named: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def add(self, name: str, reason: str) -> None:
        self.counts[reason] += 1
        for names in (self.first, self.named[reason]):
            names += [name] if len(names) < _NAMED_FILES else []

    def log(self, folder: Path) -> SkippedFiles:
        for reason, count in self.counts.items():
            more = f" and {count - _NAMED_FILES} more" if count > _NAMED_FILES else ""
            listed = ", ".join(self.named[reason])
            logger.warning("%s: not read, because %s: %d (%s%s)", shown(folder), reason, count, listed, more)
        return SkippedFiles(count=self.counts.total(), names=tuple(self.first), reasons=self.counts)


def read_folder(folder: Path) -> Generator[Record | Rejected, None, SkippedFiles]:
    """The records of a folder, in order, without hidden files and what git ignores; ids begin with the relative path.

    A link to a folder is not followed, so that no loop is endless. A link to a file is read under its own name if the
    file is in the folder and not read itself.

    Returns:
        The files that were not read.
    """
    files, skips = 0, _Skips()
    for found in walk_folder(folder, skips.add):
        if isinstance(found, Rejected):
            yield found
        else:
            files += 1
            yield from file_records(folder / found, found)
    if not files:
        logger.warning("%s holds no %s", shown(folder), READ)
    return skips.log(folder)


def check_folder(folder: Path) -> None:
    """Raise MissingExtraError if a package is not installed that a file of a folder needs."""
    if incomplete():
        check_kinds(found for found in walk_folder(folder) if isinstance(found, str))


def walk_folder(
    folder: Path, skip: Callable[[str, str], None] = lambda name, reason: None, *, below: str = ""
) -> Iterator[str | Rejected]:
    """The paths of the files to read, below the folder, in order; a rejection for each folder that cannot be listed.

    Args:
        folder: The folder.
        skip: Called with the path of each file that is not read, and the reason.
        below: The path of a folder in it, to which the walk is confined.
    """
    root = Path(os.path.realpath(folder))
    unlisted: list[OSError] = []
    top = str(Path(folder, below))
    stacks = {top: _stack_above(folder, below)}
    for parent, children, entries in os.walk(top, onerror=unlisted.append):
        yield from _unlisted(unlisted)
        stack = stacks.pop(parent).within(parent)
        prefix = Path(parent).relative_to(folder).as_posix()
        prefix = "" if prefix == "." else f"{prefix}/"
        visible = sorted(child for child in children if not child.startswith("."))
        links = {child for child in visible if os.path.islink(os.path.join(parent, child))}  # which are not followed
        children[:] = []
        for child in visible:
            path = os.path.join(parent, child)
            if child in links:
                continue
            if stack.ignores(path, is_folder=True):
                skip(shown(f"{prefix}{child}/"), _IGNORED)
            else:
                children.append(child)
                stacks[path] = stack
        for entry in sorted((*entries, *links)):
            if entry.startswith("."):
                continue
            path = os.path.join(parent, entry)
            reason = _unread(Path(path), root, is_folder=entry in links)
            if reason is None and stack.ignores(path, is_folder=False):
                reason = _IGNORED
            if reason is None:
                yield f"{prefix}{entry}"
            else:
                skip(shown(f"{prefix}{entry}"), reason)
    yield from _unlisted(unlisted)


def reads_file(folder: Path, name: str) -> bool:
    """Whether a walk finds a file, by its path in the folder; the file need not be there."""
    parts = name.split("/")
    if any(part.startswith(".") for part in parts):
        return False
    here, stack = folder, IgnoreStack.above(folder).within(str(folder))
    for part in parts[:-1]:
        here = here / part
        if os.path.islink(here) or stack.ignores(str(here), is_folder=True):
            return False
        stack = stack.within(str(here))
    path = here / parts[-1]
    return _unread(path, Path(os.path.realpath(folder)), is_folder=False) is None and not stack.ignores(
        str(path), is_folder=False
    )


def _stack_above(folder: Path, below: str) -> IgnoreStack:
    """The rules of git from above a folder that is walked."""
    stack, here = IgnoreStack.above(folder), folder
    for part in Path(below).parts:
        stack, here = stack.within(str(here)), here / part
    return stack


def _unread(path: Path, root: Path, *, is_folder: bool) -> str | None:
    """Why a file or a link to a folder is not read; a link that leads nowhere is, and fails."""
    if not is_folder and kind_of_file(path.name) is None:
        return _OTHER
    if not os.path.islink(path):
        return None
    target = Path(os.path.realpath(path))
    if not target.is_relative_to(root):
        return _LEAVES
    if is_folder:
        return _LINKED_FOLDER
    hidden = any(part.startswith(".") for part in target.relative_to(root).parts)
    is_read = target.is_file() and kind_of_file(target.name) is not None and not hidden
    return _READ_ITSELF if is_read else None


def _unlisted(errors: list[OSError]) -> Iterator[Rejected]:
    """Empty the list: a rejection for every folder that could not be listed."""
    while errors:
        error = errors.pop(0)
        yield Rejected(where=shown(error.filename), reason=f"cannot be listed ({error.strerror})")
