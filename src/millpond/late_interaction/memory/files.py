"""The files of a saved MemoryIndex: arrays as .npy, documents as JSON lines, and a manifest with their checksums.

A save writes new files beside those of the index that is there, replaces the manifest in one step, and then deletes the
old files.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

import numpy as np
import numpy.typing as npt

from millpond.errors import IndexCorruptedError, InvalidRequestError, SourceNotFoundError
from millpond.late_interaction.index.settings import IndexSettings
from millpond.late_interaction.kernels.centroids import Centroids
from millpond.late_interaction.kernels.exact import CODECS, Codec, packed_width
from millpond.late_interaction.memory.blocks import Batch
from millpond.late_interaction.memory.checked_file import FileReader, FileWriter, damage_of, sync_folder
from millpond.late_interaction.memory.store import Snapshot

_MANIFEST = "index.json"
_FORMAT, _VERSION = "millpond MemoryIndex", 1
# The files besides the manifest: a name, and the save that wrote it.
_OURS = re.compile(r"[a-z_]+-[0-9a-f]{32}\.(npy|jsonl|json)")
_DTYPES: dict[Codec, str] = {"int8": "|i1", "bfloat16": "<u2", "float32": "<f4"}
_ROWS = 1 << 18  # rows read at a time


def write_index(
    folder: Path,
    snapshot: Snapshot,
    codec: Codec,
    settings: IndexSettings | None,
    *,
    width: int | None = None,
    pool_factor: int | None = None,
) -> None:
    """Write an index to a folder, in place of the one that may be there.

    ``width`` and ``pool_factor`` are the options that its first rows will be made with, as long as it has no settings.

    Raises:
        InvalidRequestError: The path is a file, or a folder with other files.
    """
    _make_folder(folder)
    save = uuid4().hex
    with _locked(folder):
        try:
            files = _write_files(folder, save, snapshot, codec, settings)
            content = {
                "format": _FORMAT,
                "version": _VERSION,
                "codec": codec,
                "documents": snapshot.documents,
                "tokens": snapshot.tokens,
                "trained_tokens": snapshot.trained_tokens,
                "settings": None if settings is None else settings.to_json(),
                "width": width,
                "pool_factor": pool_factor,
                "files": files,
            }
            with closing(FileWriter(folder / f"index-{save}.json")) as manifest:
                manifest.write(json.dumps({**content, "sha256": _digest(content)}, indent=1).encode())
                manifest.finish()
            sync_folder(folder)
            os.replace(manifest.path, folder / _MANIFEST)
        except BaseException:
            _sweep(folder, lambda name: save in name)
            raise
        sync_folder(folder)
        _sweep(folder, lambda name: save not in name)


def _write_files(
    folder: Path, save: str, snapshot: Snapshot, codec: Codec, settings: IndexSettings | None
) -> dict[str, dict[str, Any]]:
    """Write everything but the manifest; returns the entries of the files in it."""
    tokens, documents = snapshot.tokens, snapshot.documents
    columns = packed_width(1 if settings is None else settings.width, codec)
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "rows": (_DTYPES[codec], (tokens, columns)),
        "lengths": ("<i8", (documents,)),
    }
    if codec == "int8":
        shapes["scales"] = ("<f2", (tokens,))
    whole: dict[str, npt.NDArray[Any]] = {}
    if snapshot.centroids is not None:
        shapes["codes"] = ("<u2", (tokens,))
        whole = {"centroids": snapshot.centroids.rows, "centroid_scales": snapshot.centroids.scales}
    if settings is not None and settings.projection is not None:
        whole["projection"] = settings.projection.matrix
    shapes |= {name: (array.dtype.str, array.shape) for name, array in whole.items()}
    with ExitStack() as stack:
        writers = {}
        for name, (dtype, shape) in shapes.items():
            path = folder / f"{name}-{save}.npy"
            writers[name] = stack.enter_context(closing(FileWriter.array(path, dtype, shape)))
        writers["documents"] = stack.enter_context(closing(FileWriter(folder / f"documents-{save}.jsonl")))
        for name, array in whole.items():
            writers[name].write_rows(array)
        for batch in snapshot.batches():
            arrays = {"rows": batch.rows, "lengths": batch.lengths, "scales": batch.scales, "codes": batch.codes}
            for name, part in arrays.items():
                if part is not None:
                    writers[name].write_rows(part)
            documents_of_batch = zip(batch.ids, batch.texts, batch.metadata, strict=True)
            writers["documents"].write("".join(map(_line, documents_of_batch)).encode())
        return {name: writer.finish() for name, writer in writers.items()}


def _line(document: tuple[str, str, Mapping[str, Any]]) -> str:
    return json.dumps(document, ensure_ascii=False, allow_nan=False) + "\n"


class StoredIndex:
    """A saved index that is being read.

    Attributes:
        codec: How its rows are packed.
        tokens: Its rows.
        settings: How they were made; ``None`` if it has none.
        width: The option that its first rows will be made with.
        pool_factor: The option that its first rows will be made with.
        centroids: What its codes refer to; ``None`` without codes.
        trained_tokens: Tokens that the centroids were trained for.

    Raises:
        SourceNotFoundError: There is no saved index.
        IndexCorruptedError: A file is missing, damaged, or of a later version.
    """

    codec: Codec

    def __init__(self, folder: Path) -> None:
        self._manifest = folder / _MANIFEST
        self._files = ExitStack()
        with ExitStack() as stack:
            stack.enter_context(self._files)
            content = self._open_files()
            with damage_of(self._manifest):
                self._documents, self.tokens = _count(content["documents"]), _count(content["tokens"])
                self.trained_tokens = _count(content["trained_tokens"])
                self.width, self.pool_factor = _option(content.get("width")), _option(content.get("pool_factor"))
                self.codec = content["codec"]
                if self.codec not in CODECS:
                    raise ValueError(f"codec {self.codec!r}")
                matrix = self._readers["projection"].array() if "projection" in self._readers else None
                settings = content["settings"]
                self.settings = None if settings is None else IndexSettings.from_json(settings, matrix)
            self.centroids: Centroids | None = None
            if "centroids" in self._readers:
                rows = self._readers["centroids"].array()
                with damage_of(self._manifest):
                    self.centroids = Centroids(rows=rows, scales=self._readers["centroid_scales"].array())
            stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()

    def batches(self) -> Iterator[Batch]:
        """The documents in order. With the last of them all checksums were compared."""
        width = 1 if self.settings is None else self.settings.width
        shapes: dict[str, tuple[str, tuple[int, ...]]] = {
            "rows": (_DTYPES[self.codec], (self.tokens, packed_width(width, self.codec)))
        }
        if self.codec == "int8":
            shapes["scales"] = ("<f2", (self.tokens,))
        if self.centroids is not None:
            shapes["codes"] = ("<u2", (self.tokens,))
        with damage_of(self._manifest):
            readers = {name: self._readers[name] for name in shapes}
            lengths, documents = self._readers["lengths"].array(), self._readers["documents"]
            if lengths.dtype != np.int64 or lengths.shape != (self._documents,) or lengths.min(initial=0) < 0:
                raise ValueError("the lengths are not those of the documents")
            if int(lengths.sum()) != self.tokens:
                raise ValueError("the lengths do not add up to the tokens")
            for name, reader in readers.items():
                if reader.header() != (np.dtype(shapes[name][0]), shapes[name][1]):
                    raise ValueError(f"{reader.path.name} is not of the tokens")
        ends = np.cumsum(lengths)
        start = 0
        while start < self._documents:
            before = int(ends[start - 1]) if start else 0
            stop = max(start + 1, int(np.searchsorted(ends, before + _ROWS, side="right")))
            stop = min(stop, start + _ROWS)
            arrays = {name: reader.rows(int(ends[stop - 1]) - before) for name, reader in readers.items()}
            if self.centroids is not None and arrays["codes"].max(initial=0) >= len(self.centroids):
                raise IndexCorruptedError(f"{readers['codes'].path} is damaged: it has a code without a centroid")
            with damage_of(documents.path):
                read = [_document(documents.line()) for _ in range(start, stop)]
            yield Batch(
                ids=[id for id, _, _ in read],
                texts=[text for _, text, _ in read],
                metadata=[metadata for _, _, metadata in read],
                lengths=lengths[start:stop],
                width=width,
                rows=arrays["rows"],
                scales=arrays.get("scales"),
                codes=arrays.get("codes"),
            )
            start = stop
        for reader in (*readers.values(), documents):
            reader.finish()

    def _open_files(self) -> dict[str, Any]:
        """Read the manifest and open its files. A save that goes on meanwhile may have replaced both."""
        while True:
            content = _read_manifest(self._manifest)
            self._readers: dict[str, FileReader] = {}
            try:
                with damage_of(self._manifest):
                    for key, entry in content["files"].items():
                        path = self._manifest.parent / str(entry["name"])
                        self._readers[key] = FileReader(self._files.enter_context(path.open("rb")), path, entry)
            except FileNotFoundError as error:
                self._files.close()
                if _read_manifest(self._manifest) == content:
                    raise IndexCorruptedError(f"{error.filename} is missing, which is a part of the index") from None
            else:
                return content


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise SourceNotFoundError(
            f"{str(path.parent)!r} has no index that MemoryIndex.save wrote; check the path"
        ) from None
    with damage_of(path):
        content: dict[str, Any] = json.loads(data)
        if content["format"] != _FORMAT:
            raise ValueError(f"its format is {content['format']!r}")
        if content["version"] != _VERSION:
            raise IndexCorruptedError(
                f"{path} is of version {content['version']}, and this millpond reads version {_VERSION}; "
                "update millpond, or build the index again"
            )
        if content.pop("sha256") != _digest(content):
            raise ValueError("its checksum is not the one it was written with")
    return content


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value


def _option(value: object) -> int | None:
    return None if value is None else _count(value) or None


def _document(line: bytes) -> tuple[str, str, dict[str, Any]]:
    id, text, metadata = json.loads(line)
    if not (isinstance(id, str) and isinstance(text, str) and isinstance(metadata, dict)):
        raise TypeError("a line is not a document")
    return id, text, metadata


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise InvalidRequestError(f"{str(folder)!r} is a file or lies in one; save the index to a folder") from None
    foreign = [entry.name for entry in folder.iterdir() if entry.name != _MANIFEST and not _OURS.fullmatch(entry.name)]
    if foreign:
        raise InvalidRequestError(
            f"{str(folder)!r} has other files, as {min(foreign)!r}; save the index to an empty or new folder"
        )
    sync_folder(folder.parent)


def _sweep(folder: Path, chosen: Callable[[str], bool]) -> None:
    """Delete files of other saves; one that cannot be deleted (open, on Windows) is deleted by the next save."""
    for entry in list(folder.iterdir()):
        if _OURS.fullmatch(entry.name) and chosen(entry.name):
            with suppress(OSError):
                entry.unlink()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, where the system has one: two saves at a time would delete each other's files."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
