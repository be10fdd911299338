"""Folders as sources: every .txt and .md file is a record."""

from __future__ import annotations

import logging
import os
import stat
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from millpond.errors import InvalidRequestError
from millpond.ingest.record import Record, Rejected
from millpond.ingest.sources.json_file import BOM
from millpond.ingest.sources.lines import MAX_RECORD_BYTES, too_long

logger = logging.getLogger(__name__)

TEXT_SUFFIXES = (".txt", ".md")
_NAMED_FILES = 10


_OTHER = "neither .txt nor .md"
_LINKED_FOLDER = "a link to a folder"
_LEAVES = "a link that leaves the folder"
_READ_ITSELF = "a link to a file that is read itself"


@dataclass(frozen=True, kw_only=True)
class SkippedFiles:
    """The files of a folder that were not read: those that are no .txt or .md, and some links.

    Attributes:
        count: How many.
        names: The first of them, as paths relative to the folder.
        reasons: How many for each reason.
    """

    count: int
    names: tuple[str, ...]
    reasons: Mapping[str, int] = field(default_factory=dict)


def read_folder(folder: Path) -> Generator[Record | Rejected, None, SkippedFiles]:
    """The records of a folder, in order, without hidden files; the id is the relative path.

    A link to a folder is not followed, so that no loop is endless. A link to a file is read under its own name if the
    file is in the folder and not read itself.

    Returns:
        The files that were not read.
    """
    files, first, root = 0, list[str](), Path(os.path.realpath(folder))
    counts, named = Counter[str](), defaultdict[str, list[str]](list)
    unlisted: list[OSError] = []
    for parent, children, entries in os.walk(folder, onerror=unlisted.append):
        yield from _unlisted(unlisted)
        children[:] = sorted(child for child in children if not child.startswith("."))
        links = {child for child in children if os.path.islink(os.path.join(parent, child))}  # which are not followed
        for entry in sorted((*entries, *links)):
            path = Path(parent, entry)
            if entry.startswith("."):
                continue
            if reason := _unread(path, root, is_folder=entry in links):
                name = shown(path.relative_to(folder).as_posix())
                counts[reason] += 1
                for names in (first, named[reason]):
                    names += [name] if len(names) < _NAMED_FILES else []
            else:
                files += 1
                yield _text_file(path, folder)
    yield from _unlisted(unlisted)
    if not files:
        logger.warning("%s holds no .txt or .md file", shown(folder))
    for reason, count in counts.items():
        more = f" and {count - _NAMED_FILES} more" if count > _NAMED_FILES else ""
        listed = ", ".join(named[reason])
        logger.warning("%s: not read, because %s: %d (%s%s)", shown(folder), reason, count, listed, more)
    return SkippedFiles(count=sum(counts.values()), names=tuple(first), reasons=counts)


def _unread(path: Path, root: Path, *, is_folder: bool) -> str | None:
    """Why a file or a link to a folder is not read; a link that leads nowhere is, and fails."""
    if not is_folder and not path.name.lower().endswith(TEXT_SUFFIXES):
        return _OTHER
    if not path.is_symlink():
        return None
    target = Path(os.path.realpath(path))
    if not target.is_relative_to(root):
        return _LEAVES
    if is_folder:
        return _LINKED_FOLDER
    hidden = any(part.startswith(".") for part in target.relative_to(root).parts)
    is_read = target.is_file() and target.name.lower().endswith(TEXT_SUFFIXES) and not hidden
    return _READ_ITSELF if is_read else None


def shown(path: object) -> str:
    r"""A path in a message; bytes that are no UTF-8 as ``\xNN``."""
    return os.fsencode(str(path)).decode(errors="backslashreplace")


def _unlisted(errors: list[OSError]) -> Iterator[Rejected]:
    """Empty the list: a rejection for every folder that could not be listed."""
    while errors:
        error = errors.pop(0)
        yield Rejected(where=shown(error.filename), reason=f"cannot be listed ({error.strerror})")


def _text_file(path: Path, folder: Path) -> Record | Rejected:
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # reading from a pipe would block
            return Rejected(where=shown(path), reason="is not a regular file")
        with path.open("rb") as file:
            data = file.read(MAX_RECORD_BYTES + 1)
        if len(data) > MAX_RECORD_BYTES:
            return Rejected(where=shown(path), reason=too_long("file", path.stat().st_size))
        return Record(path.relative_to(folder).as_posix(), data.removeprefix(BOM).decode())
    except UnicodeDecodeError as error:
        reason = f"not UTF-8 (byte {error.start})"
    except OSError as error:
        reason = f"cannot be read ({error.strerror})"
    except InvalidRequestError as error:
        reason = str(error)
    return Rejected(where=shown(path), reason=reason)
