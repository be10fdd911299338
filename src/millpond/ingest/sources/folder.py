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

logger = logging.getLogger(__name__)

TEXT_SUFFIXES = (".txt", ".md")
_NAMED_FILES = 10


_OTHER = "neither .txt nor .md"
_LINK = "a link"


@dataclass(frozen=True, kw_only=True)
class SkippedFiles:
    """The files of a folder that were not read: those that are no .txt or .md, and links.

    Attributes:
        count: How many.
        names: The first of them, as paths relative to the folder.
        reasons: How many for each reason.
    """

    count: int
    names: tuple[str, ...]
    reasons: Mapping[str, int] = field(default_factory=dict)


def read_folder(folder: Path) -> Generator[Record | Rejected, None, SkippedFiles]:
    """The records of a folder, in order, without hidden files; the id is the relative path. No link is followed.

    Returns:
        The files that were not read.
    """
    files, first = 0, list[str]()
    counts, named = Counter[str](), defaultdict[str, list[str]](list)
    unlisted: list[OSError] = []
    for parent, children, entries in os.walk(folder, onerror=unlisted.append):
        yield from _unlisted(unlisted)
        children[:] = sorted(child for child in children if not child.startswith("."))
        links = {name for name in (*children, *entries) if os.path.islink(os.path.join(parent, name))}
        for entry in sorted({*entries, *links}):
            path = Path(parent, entry)
            if entry.startswith("."):
                continue
            if entry in links or not entry.lower().endswith(TEXT_SUFFIXES):
                name = shown(path.relative_to(folder).as_posix())
                reason = _LINK if entry in links else _OTHER
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
        return Record(path.relative_to(folder).as_posix(), path.read_bytes().removeprefix(BOM).decode())
    except UnicodeDecodeError as error:
        reason = f"not UTF-8 (byte {error.start})"
    except OSError as error:
        reason = f"cannot be read ({error.strerror})"
    except InvalidRequestError as error:
        reason = str(error)
    return Rejected(where=shown(path), reason=reason)
