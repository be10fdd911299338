"""ParquetExport: the rows of a collection as Parquet files, which a Milvus imports from its object store."""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

import numpy as np
import numpy.typing as npt

from millpond.errors import (
    FingerprintMismatchError,
    InvalidRequestError,
    MissingExtraError,
    SinkError,
)
from millpond.ingest.record import Record, point_id
from millpond.ingest.sinks.batch import WriteBatch
from millpond.ingest.sinks.database import check_options
from millpond.ingest.sinks.fields import check_fields
from millpond.ingest.sinks.manifest import CollectionManifest, sparse_spec
from millpond.ingest.sinks.protocol import check_widths
from millpond.values.spec import ModelSpec
from millpond_milvus.connection import MilvusConnection
from millpond_milvus.layout import RowLayout
from millpond_milvus.options import VectorOptions
from millpond_milvus.url import MilvusOptions

MANIFEST = "manifest.json"
_SCHEMA = 1
# Small files are put together: so many of them, or so many bytes.
_MERGED_FILES = 64
_MERGED_BYTES = 128 << 20
_OPTIONS = ("dimensions", "fields", "hybrid", "datatype", "partition_key")
_EXTRA = "writing Parquet for Milvus needs its bulk writer: pip install 'pymilvus[bulk-writer]'"


class ParquetExport:
    """Writes rows as Parquet files, as Milvus's bulk import reads them, without a Milvus.

    A folder ``FOLDER/COLLECTION`` has ``part-NNNNNN.parquet`` files and a ``manifest.json``, which lists them in order,
    with the model and the settings. A write that returned is on the disk and in the manifest: files that it does not
    list are leftovers. A later run goes on with the same folder. Of rows with the same id :meth:`close` keeps the last.
    Nothing is deleted, so a text that became blank stays.

    Args:
        folder: Where the folder of the collection is made.
        collection: Its name: letters, digits and underscores.
        options: ``dimensions``, ``fields``, ``hybrid``, ``datatype`` and ``partition_key``, as :class:`MilvusSink` has
            them.

    Raises:
        InvalidRequestError: A name, folder or option that is not valid.
        MissingExtraError: pymilvus's bulk writer needs packages that are not installed.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        collection: str,
        **options: Unpack[MilvusOptions],
    ) -> None:
        check_options("ParquetExport", options, _OPTIONS)
        MilvusConnection.check_name("collection", collection)
        self._fields = check_fields(options.get("fields") or "plain")
        self._layout = RowLayout.of(self._fields, options)
        self.hybrid = self._layout.hybrid
        """Whether sparse vectors of an engine are stored beside the dense ones."""
        self.dimensions = check_widths(options.get("dimensions"))
        """The widths passed at construction, ascending; ``None`` stands for the width that ``embed`` returns."""
        self._collection = collection
        self.folder = Path(os.path.expanduser(folder)) / collection
        self._writer, self._arrow, self._parquet = _libraries()
        self._manifest: CollectionManifest | None = None
        self._parts: list[dict[str, Any]] = []  # file, rows and bytes of each
        self._next = 0  # the number of the next file

    @property
    def target(self) -> str:
        """The folder, as a journal names it."""
        return f"Parquet for Milvus {os.path.realpath(self.folder)}"

    @property
    def files(self) -> list[Path]:
        """The files to import, in order."""
        return [self.folder / part["file"] for part in self._parts]

    def prepare(
        self,
        spec: ModelSpec,
        *,
        sparse: ModelSpec | None = None,
        chunked: bool = False,
        context: str | None = None,
    ) -> None:
        """Make the folder, or check that it was written with this model and these settings.

        Args:
            spec: The model of the vectors.
            sparse: The model of a hybrid export's sparse vectors; by default the same one.
            chunked: Whether records are cut into chunks.
            context: What the vectors of chunks know beside their own text, as in :class:`~millpond.ingest.Chunking`.

        Raises:
            FingerprintMismatchError: The folder was written with another model.
            InvalidRequestError: It was written with other settings, or the model cannot have these widths.
            SinkError: It cannot be written.
        """
        chosen = sparse_spec(spec, sparse) if self.hybrid else None
        own = CollectionManifest.of(
            spec,
            dimensions=self.dimensions,
            fields=self._fields,
            sparse=chosen,
            chunked=chunked,
            context=context,
        )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / MANIFEST
            text = path.read_text() if path.exists() else None
        except OSError as error:
            raise SinkError(f"{str(self.folder)!r} cannot be written: {error.strerror or error}") from error
        if text is not None:
            stored, options, parts = self._read(text)
            stored.check_write(own, spec, collection=self._collection, sparse=chosen)
            self._layout.options.check_write(options, collection=self._collection)
            self._parts = parts
            self._next = max((int(part["file"][5:-8]) + 1 for part in parts), default=0)
        self._manifest = own
        if text is None:
            self._guard(self._save, "writing the manifest")

    def check(self, record: Record) -> None:
        """Raise InvalidRequestError for a record that Milvus cannot store, such as a text of over 65,535 bytes.

        Args:
            record: The record.

        Raises:
            InvalidRequestError: The message says what is too large or not valid.
        """
        widths = self._manifest.dimensions if self._manifest is not None else self.dimensions or ()
        self._layout.fields(record, point_id(record.id, record.chunk), widths)

    def write(self, batch: WriteBatch) -> None:
        """Write the rows to a file of their own, and list it.

        Args:
            batch: Rows with a vector of each width; if there are none, nothing is written.

        Raises:
            InvalidRequestError: The folder is not prepared, or the batch has other vectors.
            SinkError: The file cannot be written.
        """
        if self._manifest is None:
            raise InvalidRequestError(f"{str(self.folder)!r} is not prepared; call prepare(spec) first")
        if tuple(sorted(batch.vectors)) != self._manifest.dimensions or (batch.sparse is not None) != self.hybrid:
            raise InvalidRequestError(
                f"the batch holds the widths {sorted(batch.vectors)}, the export {list(self._manifest.dimensions)}"
                + (" and sparse vectors" if self.hybrid else "")
            )
        if not len(batch):
            return
        self._guard(lambda: self._add(batch), f"writing {len(batch)} rows")
        small = self._small()
        if len(small) >= _MERGED_FILES or sum(part["bytes"] for part in small) >= _MERGED_BYTES:
            self._guard(lambda: self._merge(small), "putting files together")

    def count(self) -> int:
        """How many rows the files hold; until :meth:`close`, a row that was written twice counts twice."""
        return sum(part["rows"] for part in self._parts)

    def close(self) -> None:
        """Put small files together, and leave out rows that were written again later."""
        if self._manifest is None:
            return
        self._guard(self._finish, "putting files together")
        self._manifest = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ----------------------------------------------------------------------------------------------------------

    def _add(self, batch: WriteBatch) -> None:
        assert self._manifest is not None
        schema = self._layout.collection_schema(self._manifest.dimensions)
        with tempfile.TemporaryDirectory(prefix=".writing-", dir=self.folder) as work:
            writer = self._writer(schema, work, chunk_size=1 << 40)
            for row in self._layout.rows(batch):
                writer.append_row(row)
            writer.commit()
            if writer.failure is not None:
                raise writer.failure
            ((file,),) = writer.batch_files
            self._list(Path(file), rows=len(batch), instead_of=[])

    def _small(self) -> list[dict[str, Any]]:
        """The parts at the end that were not put together yet."""
        start = len(self._parts)
        while start and self._parts[start - 1]["bytes"] < _MERGED_BYTES and not self._parts[start - 1].get("merged"):
            start -= 1
        return self._parts[start:]

    def _merge(self, parts: Sequence[dict[str, Any]]) -> None:
        """Replace parts by one file, with the last row of each id."""
        table = self._arrow.concat_tables([self._parquet.read_table(self.folder / part["file"]) for part in parts])
        keys = self._keys(table)
        _, last = np.unique(keys[::-1], return_index=True)
        kept = np.sort(len(keys) - 1 - last)
        self._rewrite(table.take(self._arrow.array(kept)), parts)

    def _finish(self) -> None:
        small = self._small()
        if len(small) > 1:
            self._merge(small)
        keys = [self._keys(self._parquet.read_table(path, columns=[self._primary])) for path in self.files]
        seen, counts = np.unique(np.concatenate([*keys, np.empty(0, np.dtype("S36"))]), return_counts=True)
        again = seen[counts > 1]
        if not len(again):
            return
        later = np.empty(0, np.dtype("S36"))  # ids of the parts after this one that are in several
        for part, own in reversed(list(zip(self._parts, keys, strict=True))):
            stale = np.isin(own, later)
            if stale.any():
                table = self._parquet.read_table(self.folder / part["file"])
                self._rewrite(table.take(self._arrow.array(np.flatnonzero(~stale))), [part])
            later = np.union1d(later, own[np.isin(own, again)])

    @property
    def _primary(self) -> str:
        return self._layout.schema.primary

    def _keys(self, table: Any) -> npt.NDArray[np.bytes_]:
        """``[rows]``: the ids, which are UUIDs."""
        return np.array(table.column(self._primary).to_pylist(), dtype="S36")

    def _rewrite(self, table: Any, parts: Sequence[dict[str, Any]]) -> None:
        with tempfile.TemporaryDirectory(prefix=".writing-", dir=self.folder) as work:
            path = Path(work) / "merged.parquet"
            self._parquet.write_table(table, path, row_group_size=10_000)
            self._list(path, rows=table.num_rows, instead_of=parts)

    def _list(self, written: Path, *, rows: int, instead_of: Sequence[dict[str, Any]]) -> None:
        """Move a file to its place, and list it where the first of those stood that it replaces."""
        target = self.folder / f"part-{self._next:06}.parquet"
        with written.open("rb") as file:
            os.fsync(file.fileno())
        written.replace(target)
        part = {"file": target.name, "rows": rows, "bytes": target.stat().st_size}
        if instead_of:
            part["merged"] = True
        before = list(self._parts)
        place = before.index(instead_of[0]) if instead_of else len(before)
        self._parts = [each for each in before if each not in instead_of]
        if rows:
            self._parts.insert(place, part)
        self._next += 1
        try:
            self._save()
        except BaseException:
            self._parts = before
            raise
        for old in [*instead_of, *([] if rows else [part])]:
            (self.folder / old["file"]).unlink(missing_ok=True)

    def _save(self) -> None:
        assert self._manifest is not None
        content = {
            "schema": _SCHEMA,
            "collection": self._collection,
            "millpond": self._manifest.to_dict(),
            "options": self._layout.options.to_property(),
            "rows": self.count(),
            "parts": self._parts,
        }
        path = self.folder / MANIFEST
        with tempfile.NamedTemporaryFile("w", dir=self.folder, prefix=".manifest-", delete=False) as file:
            try:
                json.dump(content, file, indent=2)
                file.flush()
                os.fsync(file.fileno())
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _read(self, text: str) -> tuple[CollectionManifest, VectorOptions, list[dict[str, Any]]]:
        path = str(self.folder / MANIFEST)
        try:
            content = json.loads(text)
            if not isinstance(content, Mapping) or content["schema"] != _SCHEMA:
                raise ValueError("another schema")
            parts = [dict(part) for part in content["parts"]]
            missing = [part["file"] for part in parts if not (self.folder / part["file"]).is_file()]
            data, options = content["millpond"], content["options"]
        except (KeyError, TypeError, ValueError) as error:
            raise FingerprintMismatchError(
                f"{path!r} is no manifest that this version of millpond can read ({error}); choose another folder"
            ) from None
        if missing:
            raise SinkError(
                f"{path!r} lists {missing[0]!r}, which is not there; restore it, or export to another folder"
            )
        stored = CollectionManifest.from_dict(data, collection=self._collection)
        return stored, VectorOptions.from_property(options, collection=self._collection), parts

    def _guard(self, work: Any, what: str) -> None:
        try:
            work()
        except (InvalidRequestError, SinkError):
            raise
        except OSError as error:
            free = shutil.disk_usage(self.folder).free if self.folder.is_dir() else 0
            raise SinkError(
                f"{what} in {str(self.folder)!r} failed: {error.strerror or error} ({free >> 20} MiB are free)"
            ) from error
        except Exception as error:  # the bulk writer's own, which hide the system's
            raise SinkError(f"{what} in {str(self.folder)!r} failed: {getattr(error, 'message', error)}") from error


def _libraries() -> tuple[Any, Any, Any]:
    """pymilvus's bulk writer, which says when it failed, and pyarrow with its Parquet."""
    try:
        base = import_module("pymilvus.bulk_writer").LocalBulkWriter
        arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError:
        raise MissingExtraError(_EXTRA) from None
    logging.getLogger("pymilvus.bulk_writer").setLevel(logging.CRITICAL)  # it tells every step, on standard error

    class Writer(base):  # type: ignore[misc, valid-type]
        """Writes in a thread of its own; an exception would end there."""

        failure: Exception | None = None

        def _flush(self, *args: Any, **options: Any) -> None:
            try:
                super()._flush(*args, **options)
            except Exception as error:
                self.failure = error

    return Writer, arrow, parquet
