"""Folders as sources: every .txt and .md file is a record."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

from millpond.errors import InvalidRequestError
from millpond.ingest.json_source import BOM
from millpond.ingest.record import Record, Rejected

logger = logging.getLogger(__name__)

TEXT_SUFFIXES = (".txt", ".md")
_NAMED_FILES = 10


@dataclass(frozen=True, kw_only=True)
class SkippedFiles:
    """The files of a folder that were not read, because they are no .txt or .md.

    Attributes:
        count: How many.
        names: The first of them, as paths relative to the folder.
    """

    count: int
    names: tuple[str, ...]


def read_folder(folder: Path) -> Generator[Record | Rejected, None, SkippedFiles]:
    """The records of a folder, in order, without hidden files; the id is the relative path.

    Returns:
        The files that were not read.
    """
    files = skipped = 0
    names: list[str] = []
    unlisted: list[OSError] = []
    for parent, children, entries in os.walk(folder, onerror=unlisted.append):
        yield from _unlisted(unlisted)
        children[:] = sorted(child for child in children if not child.startswith("."))
        links = [child for child in children if os.path.islink(os.path.join(parent, child))]  # which are not followed
        for entry in sorted((*entries, *links)):
            if entry.startswith("."):
                continue
            path = Path(parent, entry)
            if entry.lower().endswith(TEXT_SUFFIXES) and entry not in links:
                files += 1
                yield _text_file(path, folder)
            else:
                skipped += 1
                if len(names) < _NAMED_FILES:
                    names.append(path.relative_to(folder).as_posix())
    yield from _unlisted(unlisted)
    if not files:
        logger.warning("%s holds no .txt or .md file", folder)
    if skipped:
        more = f" and {skipped - len(names)} more" if skipped > len(names) else ""
        logger.warning("%s: not read, because neither .txt nor .md: %d (%s%s)", folder, skipped, ", ".join(names), more)
    return SkippedFiles(count=skipped, names=tuple(names))


def _unlisted(errors: list[OSError]) -> Iterator[Rejected]:
    """Empty the list: a rejection for every folder that could not be listed."""
    while errors:
        error = errors.pop(0)
        yield Rejected(where=str(error.filename), reason=f"cannot be listed ({error.strerror})")


def _text_file(path: Path, folder: Path) -> Record | Rejected:
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # reading from a pipe would block
            return Rejected(where=str(path), reason="is no regular file")
        return Record(path.relative_to(folder).as_posix(), path.read_bytes().removeprefix(BOM).decode())
    except UnicodeDecodeError as error:
        reason = f"not UTF-8 (byte {error.start})"
    except OSError as error:
        reason = f"cannot be read ({error.strerror})"
    except InvalidRequestError as error:
        reason = str(error)
    return Rejected(where=str(path), reason=reason)
