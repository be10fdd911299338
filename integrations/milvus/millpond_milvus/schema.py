"""FieldSchema: the fields of a field layout in Milvus, and a record as a row of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from millpond.errors import InvalidRequestError
from millpond.ingest.record import Record, content_hash
from millpond.ingest.sinks.fields import (
    LLAMA_INDEX_KEYS,
    FieldLayout,
    is_own_row,
    llama_index_fields,
    read_llama_index,
)

MAX_VARCHAR = 65_535
MAX_JSON = 65_536
_HIDDEN = frozenset(["_seq", "_partition"])  # columns of Milvus Lite's own, which it takes out of every row it returns


@dataclass(frozen=True, kw_only=True)
class FieldSchema:
    """The fields of a collection, without the vector fields.

    Attributes:
        form: The field layout.
        primary: Name of the primary field, which holds the row's id.
        strings: The other VARCHAR fields.
        json: The JSON field that holds the metadata; ``None`` if every metadata key is a dynamic field.
        dynamic: The dynamic fields of the form itself.
    """

    form: FieldLayout
    primary: str
    strings: tuple[str, ...]
    json: str | None
    dynamic: frozenset[str] = frozenset()

    @property
    def columns(self) -> frozenset[str]:
        """The fields that are not dynamic: names that no dynamic field may have."""
        return frozenset((self.primary, *self.strings))

    @property
    def reserved(self) -> frozenset[str]:
        """Names that stand for a field of the form, and for no metadata of that name."""
        return frozenset() if self.json is not None else self.columns | self.dynamic

    def row(self, record: Record, point: str, *, vectors: frozenset[str]) -> dict[str, Any]:
        """The fields of a record, without the vectors.

        Args:
            record: The record.
            point: The row's id.
            vectors: Names of the vector fields, which no metadata key may have.

        Raises:
            InvalidRequestError: A text or metadata that Milvus cannot store.
        """
        if (size := len(record.text.encode())) > MAX_VARCHAR:
            raise InvalidRequestError(f"its text has {size} bytes; Milvus stores at most {MAX_VARCHAR}, so split it")
        if self.form == "plain":
            fields: dict[str, Any] = {"metadata": dict(record.metadata)}
            row = {"pk": point, "id": record.id, "text": record.text, "content_hash": content_hash(record.text)}
        elif self.form == "langchain":
            if clash := sorted((self.reserved | vectors) & record.metadata.keys()):
                raise InvalidRequestError(
                    f"its metadata has the key {clash[0]!r}, which is a field of the collection; rename the key"
                )
            if clash := sorted(_HIDDEN & record.metadata.keys()):
                raise InvalidRequestError(
                    f"its metadata has the key {clash[0]!r}, which Milvus Lite stores and never returns; rename the key"
                )
            fields = {**record.metadata, "record_id": record.id, "content_hash": content_hash(record.text)}
            row = {"pk": point, "text": record.text}
        else:
            # The node keeps every key; the flat ones only serve filters, which refuse those that clash with a field.
            taken = self.columns | vectors
            flat = llama_index_fields(record, point, text_inside=False)
            fields = {key: value for key, value in flat.items() if key not in taken}
            row = {"id": point, "doc_id": record.id, "text": record.text}
        if (size := len(json.dumps(fields, ensure_ascii=False).encode())) > MAX_JSON:
            raise InvalidRequestError(f"its metadata has {size} bytes as JSON; Milvus stores at most {MAX_JSON}")
        if any(key.startswith("$") for key in fields):
            raise InvalidRequestError("its metadata has a key that begins with '$', which Milvus keeps for itself")
        return {**row, **fields}

    def output_fields(self) -> list[str]:
        """The fields that a search requests."""
        return [*self.strings, self.json or "$meta"]

    def identity_fields(self) -> list[str]:
        """The fields that say whose row it is, without text and metadata."""
        names = {
            "plain": ["id", "content_hash"],
            "langchain": ["record_id", "content_hash"],
            "llama_index": ["doc_id", "content_hash", "chunk"],
        }
        return [self.primary, *names[self.form]]

    def identity(self, row: Mapping[str, Any]) -> tuple[str, str]:
        """The record's id, which is the row's own if a framework wrote it, and the hash of the text or an empty str."""
        point = str(row[self.primary])
        digest = str(row.get("content_hash") or "")
        if self.form == "plain":
            return str(row["id"]), digest
        if self.form == "langchain":
            return str(row.get("record_id") or point), digest
        record_id = str(row.get("doc_id"))
        return record_id if is_own_row(record_id, point, {"chunk": row.get("chunk")}) else point, digest

    def record_fields(self, entity: Mapping[str, Any], point: str) -> tuple[str, str, dict[str, Any]]:
        """Id, text and metadata of a stored row. The id of a row that the framework wrote is the row's own."""
        text = str(entity["text"])
        if self.form == "plain":
            return str(entity["id"]), text, dict(entity["metadata"] or {})
        if self.form == "llama_index":
            identity, _, metadata = read_llama_index(entity, point)
            return identity, text, metadata
        metadata = {key: value for key, value in entity.items() if key not in self.reserved}
        return str(entity.get("record_id", point)), text, metadata


SCHEMAS: Mapping[FieldLayout, FieldSchema] = {
    "plain": FieldSchema(form="plain", primary="pk", strings=("id", "text", "content_hash"), json="metadata"),
    "langchain": FieldSchema(
        form="langchain",
        primary="pk",
        strings=("text",),
        json=None,
        dynamic=frozenset(["record_id", "content_hash"]),
    ),
    "llama_index": FieldSchema(
        form="llama_index", primary="id", strings=("doc_id", "text"), json=None, dynamic=LLAMA_INDEX_KEYS
    ),
}
