"""TableSink: the part of a sink that is the same for databases whose rows have typed columns."""

from __future__ import annotations

import json
import logging
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Generic

import numpy as np

from millpond.errors import InvalidRequestError, SinkError
from millpond.ingest.record import content_hash
from millpond.ingest.sinks.batch import FloatArray, WriteBatch
from millpond.ingest.sinks.collection import CollectionSink, NativeFilter
from millpond.ingest.sinks.manifest import CollectionManifest
from millpond.ingest.sinks.payload import FieldLayout
from millpond.ingest.sinks.protocol import StoredRow, vector_name
from millpond.ingest.sinks.search import Hit

logger = logging.getLogger(__name__)


class TableSink(CollectionSink[NativeFilter], Generic[NativeFilter]):
    """One table with the columns ``pk``, ``id``, ``text``, ``metadata`` (JSON), ``content_hash`` and ``d{width}``.

    Rows have the form ``plain`` only: the stores of frameworks for such databases take the names of columns. A subclass
    implements ``_stored_datatype``, ``_read_comment``, ``_pack``, ``_select`` and ``_build_index`` beside the requests
    of :class:`CollectionSink`, and calls :meth:`_set_options`; it may override ``_tidy``.
    """

    datatypes: ClassVar[Mapping[str, Any]]  # of the vectors; the first one is the default
    indexes: ClassVar[Sequence[str]]

    def _set_options(self, *, datatype: str, index: str | None) -> None:
        """Check the options of a table.

        Raises:
            InvalidRequestError: A form, datatype or index that the database's sink does not have.
        """
        for name, value, known in (
            ("fields", self._fields, ["plain"]),
            ("datatype", datatype, list(self.datatypes)),
            ("index", index, [None, *self.indexes]),
        ):
            if value not in known:
                others = f", or one of {', '.join(map(repr, known[1:]))}" if len(known) > 1 else ""
                raise InvalidRequestError(
                    f"{name}={value!r}: a sink of {self.database} has no such {name}; pass {name}={known[0]!r}{others}"
                )
        self._datatype, self._index, self._writes = datatype, index, 0

    def create_index(self) -> None:
        """Build an index over the smallest width, by which a search finds its candidates, and one for dict filters.

        What is there already stays. A sink with ``index=`` does so when it is closed after a run.

        Raises:
            InvalidRequestError: No such table.
            SinkError: The database refuses, or fails.
        """
        width = self._opened().dimensions[0]
        with self._request("an index"):
            self._build_index(width, self._index or self.indexes[0])

    def close(self) -> None:
        """After a run, tidy up and build the index; close the client, unless it was passed in."""
        if self._writes and not self._closed:
            self._writes = 0
            try:
                self._tidy()
                if self._index is not None:
                    self.create_index()
            except SinkError as error:
                logger.warning("%s; every row is stored, and only searches are slower", error)
        super().close()

    # ------------------------------------------------------------------------------- implemented by each database

    @abstractmethod
    def _stored_datatype(self, manifest: CollectionManifest) -> str:
        """The datatype with which the table was created."""

    @abstractmethod
    def _read_comment(self) -> str | None:
        """The manifest as JSON; ``None`` if the table has none."""

    @abstractmethod
    def _pack(self, rows: FloatArray) -> Any:
        """Vectors ``[n, width]`` as a column of ``n`` values."""

    @abstractmethod
    def _select(self, row_ids: Sequence[str], widths: Sequence[int]) -> Iterable[Sequence[Any]]:
        """``pk``, ``id``, ``content_hash`` and the vectors of these rows."""

    @abstractmethod
    def _build_index(self, width: int, index: str) -> None:
        """Build what :meth:`create_index` says, unless it is there."""

    def _tidy(self) -> None:
        """Do after a run what makes searches faster."""

    # ----------------------------------------------------------------------------------------------------------

    def _read_manifest(self) -> object:
        text = self._read_comment()
        try:
            return None if text is None else json.loads(text)
        except ValueError:
            return text

    def _prepare(self, manifest: CollectionManifest) -> None:
        with self._request("a look at its columns"):
            stored = self._stored_datatype(manifest)
        if stored != self._datatype:
            raise InvalidRequestError(
                f"collection {self._collection!r} holds vectors of {stored}, and this sink writes {self._datatype}; "
                f"pass datatype={stored!r}, or another collection name"
            )

    def _encode(self, batch: WriteBatch) -> dict[str, Any]:
        """The columns of a batch by name."""
        return {
            "pk": batch.ids,
            "id": [record.id for record in batch.records],
            "text": [record.text for record in batch.records],
            "metadata": [json.dumps(dict(record.metadata)) for record in batch.records],
            "content_hash": [content_hash(record.text) for record in batch.records],
            **{vector_name(width): self._pack(rows) for width, rows in batch.vectors.items()},
        }

    def _flush(self) -> None:
        self._writes += 1

    def _decode(self, row: Sequence[Any], fields: FieldLayout) -> Hit:
        """A hit of ``pk``, ``id``, ``text``, ``metadata`` and the score."""
        row_id, record_id, text, metadata, score = row
        with self._reading(str(row_id), fields):
            return Hit(id=record_id, score=float(score), text=text, metadata=_read_json(metadata))

    def _fetch(self, row_ids: Sequence[str], widths: Sequence[int], fields: FieldLayout) -> dict[str, StoredRow]:
        return {
            str(row_id): StoredRow(
                record_id=record_id,
                content_hash=hashed,
                vectors={width: np.asarray(vector, np.float32) for width, vector in zip(widths, vectors, strict=True)},
            )
            for row_id, record_id, hashed, *vectors in self._select(row_ids, widths)
        }


def _read_json(text: str) -> dict[str, Any]:
    """Metadata; a database may write a large float with all its digits, and an int of a record has 64 bits."""
    fields: dict[str, Any] = json.loads(text, parse_int=_number)
    return dict(fields)


def _number(digits: str) -> float:
    return value if -(1 << 63) <= (value := int(digits)) < 1 << 63 else float(digits)
