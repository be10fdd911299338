"""TableSink: the part of a sink that is the same for databases whose rows have typed columns."""

from __future__ import annotations

import json
import logging
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Generic

import numpy as np

from millpond.errors import InvalidRequestError, SinkError
from millpond.ingest.record import content_hash
from millpond.ingest.sinks.batch import FloatArray, WriteBatch
from millpond.ingest.sinks.collection import CollectionSink
from millpond.ingest.sinks.driver import CollectionDriver, NativeFilter
from millpond.ingest.sinks.fields import FieldLayout
from millpond.ingest.sinks.manifest import CollectionManifest
from millpond.ingest.sinks.protocol import StoredRow, vector_name
from millpond.ingest.sinks.reader import served
from millpond.ingest.sinks.search import Hit

logger = logging.getLogger(__name__)


class TableDriver(CollectionDriver[NativeFilter], Generic[NativeFilter]):
    """A table with the columns ``pk``, ``id``, ``text``, ``metadata`` (JSON), ``content_hash`` and ``d{width}``."""

    datatypes: ClassVar[Mapping[str, Any]]  # of the vectors; the first one is the default
    indexes: ClassVar[Sequence[str]]
    layouts: ClassVar[Sequence[FieldLayout]] = ("plain",)

    def __init__(self, *, fields: str | None, datatype: str | None, index: str | None) -> None:
        for name, value, known in (
            ("fields", fields, ["plain", None]),
            ("datatype", datatype, [*self.datatypes, None]),
            ("index", index, [None, *self.indexes]),
        ):
            if value not in known:
                others = f", or one of {', '.join(map(repr, known[1:]))}" if len(known) > 1 else ""
                raise InvalidRequestError(
                    f"{name}={value!r}: a sink of {self.connection.database} has no such {name}; pass "
                    f"{name}={known[0]!r}{others}"
                )
        self.datatype = next(iter(self.datatypes)) if datatype is None else datatype
        self.index, self.writes = index, 0
        self._asked = datatype

    @abstractmethod
    def stored_datatype(self, manifest: CollectionManifest) -> str:
        """The datatype with which the table was created."""

    def datatype_of(self, manifest: CollectionManifest) -> str:
        """The datatype with which the table was created."""
        return self.stored_datatype(manifest)

    @abstractmethod
    def pack(self, rows: FloatArray) -> Any:
        """Vectors ``[n, width]`` as a column of ``n`` values."""

    @abstractmethod
    def select(self, row_ids: Sequence[str], columns: Sequence[str], widths: Sequence[int]) -> Iterable[Sequence[Any]]:
        """These columns of these rows, metadata as JSON, and then their vectors."""

    @abstractmethod
    def build_index(self, width: int, index: str) -> None:
        """Build an index over a width, and one for dict filters, unless they are there."""

    def tidy(self) -> None:
        """Do after a run what makes searches faster."""

    def prepare(self, manifest: CollectionManifest) -> None:
        """Take the datatype of the table, or check that it is the one asked for."""
        stored = self.connection.request("a look at its columns", lambda: self.stored_datatype(manifest))
        if self._asked is None:
            self.datatype = stored
        elif stored != self.datatype:
            raise InvalidRequestError(
                f"collection {self.connection.collection!r} holds vectors of {stored}, and this sink writes "
                f"{self.datatype}; pass datatype={stored!r}, or another collection name"
            )

    def flush(self) -> None:
        """Count a write."""
        self.writes += 1

    def columns(self, batch: WriteBatch) -> dict[str, Any]:
        """The columns of a batch by name."""
        return {
            "pk": batch.ids,
            "id": [record.id for record in batch.records],
            "text": [record.text for record in batch.records],
            "metadata": [json.dumps(dict(record.metadata)) for record in batch.records],
            "content_hash": [content_hash(record.text) for record in batch.records],
            **{vector_name(width): self.pack(rows) for width, rows in batch.vectors.items()},
        }

    def hits(self, rows: Iterable[Sequence[Any]], manifest: CollectionManifest) -> list[Hit]:
        """Hits of ``pk``, ``id``, ``text``, ``metadata`` and the score."""
        found = []
        for row_id, record_id, text, metadata, score in rows:
            with self.reading(str(row_id), manifest):
                found.append(Hit(id=record_id, score=float(score), text=text, metadata=_read_json(metadata)))
        return found

    def fetch(
        self, row_ids: Sequence[str], widths: Sequence[int], manifest: CollectionManifest
    ) -> dict[str, StoredRow]:
        """Those of these rows that exist."""
        rows = self.select(row_ids, ("pk", "id", "content_hash"), widths)
        return {str(pk): _stored(record, hashed, widths, vectors) for pk, record, hashed, *vectors in rows}

    def read(self, row_ids: Sequence[str], widths: Sequence[int], manifest: CollectionManifest) -> dict[str, StoredRow]:
        """The same with texts and metadata; of a row that cannot be read both are empty."""
        rows: dict[str, StoredRow] = {}
        for pk, record, hashed, text, metadata, *vectors in self.select(
            row_ids, ("pk", "id", "content_hash", "text", "metadata"), widths
        ):
            row = _stored(record, hashed, widths, vectors)
            try:
                rows[str(pk)] = replace(row, text=str(text), metadata=_read_json(metadata))
            except (TypeError, ValueError):
                rows[str(pk)] = replace(row, text="", metadata={})
        return rows


class TableSink(CollectionSink[NativeFilter], Generic[NativeFilter]):
    """A sink of such a table, which tidies it up after a run."""

    def __init__(
        self, driver: TableDriver[NativeFilter], *, dimensions: Sequence[int] | None, fields: str | None = None
    ) -> None:
        super().__init__(driver, dimensions=dimensions, fields=fields)
        self._table = driver

    def drop(self) -> None:
        """Delete the collection itself, with all of its rows: nothing is left to tidy up."""
        super().drop()
        self._table.writes = 0

    @served
    def create_index(self) -> None:
        """Build an index over the smallest width, by which a search finds its candidates, and one for dict filters.

        What is there already stays. A sink with ``index=`` does so when it is closed after a run.
        """
        table, width = self._table, self.own().dimensions[0]
        index = table.index or table.indexes[0]
        self._connection.request("an index", lambda: table.build_index(width, index), limited=False)

    def close(self) -> None:
        """After a run, tidy up and build the index; close the client, unless it was passed in."""
        if self._table.writes and not self._connection.closed:
            self._table.writes = 0
            try:
                self._connection.request("a merge of its files", self._table.tidy, limited=False)
                if self._table.index is not None:
                    self.create_index()
            except SinkError as error:
                logger.warning("%s; every row is stored, and only searches are slower", error)
        super().close()


def manifest_of(text: str | None) -> object:
    """The manifest that a table has as JSON; a text that is none stays."""
    try:
        return None if text is None else json.loads(text)
    except ValueError:
        return text


def _stored(record_id: str, hashed: object, widths: Sequence[int], vectors: Sequence[Any]) -> StoredRow:
    return StoredRow(
        record_id=record_id,
        content_hash=str(hashed or ""),
        vectors={width: np.asarray(vector, np.float32) for width, vector in zip(widths, vectors, strict=True)},
    )


def _read_json(text: str) -> dict[str, Any]:
    """Metadata; a database may write a large float with all its digits, and an int of a record has 64 bits."""
    fields: dict[str, Any] = json.loads(text, parse_int=_number)
    return dict(fields)


def _number(digits: str) -> float:
    return value if -(1 << 63) <= (value := int(digits)) < 1 << 63 else float(digits)
