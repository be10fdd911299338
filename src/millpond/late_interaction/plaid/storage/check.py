"""Check: what is damaged in an index, by the checksums in its manifest."""

from __future__ import annotations

import hashlib
from pathlib import Path

from millpond.errors import IndexCorruptedError, SourceNotFoundError
from millpond.late_interaction.plaid.storage.folder import IndexFolder
from millpond.late_interaction.plaid.storage.manifest import FileEntry


def check_folder(path: Path) -> list[str]:
    """What is wrong with the files of an index, also of one that is too damaged to be opened.

    Reads every file. Other processes may read and write the index meanwhile.

    Returns:
        A sentence for each damaged file, which names it; empty if nothing is damaged.

    Raises:
        SourceNotFoundError: There is no index.
        InvalidRequestError: The folder is not an index.
    """
    folder = IndexFolder(path)
    while True:
        try:
            if not folder.exists():
                raise SourceNotFoundError(f"{path} has no index; build it first")
            current = folder.current()
            manifest = folder.manifest(current)
        except IndexCorruptedError as error:
            return [str(error)]
        except SourceNotFoundError:
            raise
        except FileNotFoundError as error:
            found = [f"{error.filename} is missing"]
        else:
            found = [sentence for entry in manifest.files() if (sentence := _wrong(path, entry)) is not None]
        # Files that a writer removed meanwhile are not missing.
        if not found or folder.current() == current:
            return found


def _wrong(folder: Path, entry: FileEntry) -> str | None:
    path = folder / entry.name
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            if size != entry.bytes:
                return f"{path} has {size} bytes instead of {entry.bytes}"
            if hashlib.file_digest(file, "sha256").hexdigest() != entry.sha256:
                return f"{path} is damaged: its checksum is not the one in the manifest"
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    return None
