"""RowLayout: the fields of a collection, and a batch as rows of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pymilvus import DataType, Function, FunctionType, MilvusClient

from millpond.errors import InvalidRequestError
from millpond.ingest.record import Record, content_hash
from millpond.ingest.sinks.batch import WriteBatch
from millpond.ingest.sinks.fields import (
    LLAMA_INDEX_KEYS,
    FieldLayout,
    is_own_row,
    llama_index_fields,
    node_metadata,
    read_llama_index,
)
from millpond.ingest.sinks.protocol import vector_name
from millpond_milvus.options import PARTITION, SPARSE, VectorOptions
from millpond_milvus.url import MilvusOptions
from millpond_milvus.versions import SEVERAL_VECTORS, SPARSE_VECTORS, UPSERTS, Need

# A token that no model has: a record without any has this one, since Milvus takes no empty sparse vector.
_NO_TOKEN = 2**32 - 2


@dataclass(frozen=True, kw_only=True)
class RowLayout:
    """What a row holds."""

    schema: FieldSchema
    options: VectorOptions
    hybrid: bool  # whether rows have sparse vectors of an engine

    @classmethod
    def of(cls, fields: FieldLayout, options: MilvusOptions) -> RowLayout:
        """The rows of a sink with these options."""
        hybrid = options.get("hybrid", False)
        if not isinstance(hybrid, bool) and hybrid != "bm25":
            raise InvalidRequestError(f"hybrid={hybrid!r} is unknown; choose one of False, True, 'bm25'")
        vectors = VectorOptions(
            datatype=options.get("datatype", "float32"),
            index_type=options.get("index_type"),
            index_quantization=options.get("index_quantization"),
            partition_key=options.get("partition_key"),
            partitions=options.get("partitions"),
            lexical=hybrid == "bm25",
        )
        return cls(schema=SCHEMAS[fields], options=vectors, hybrid=hybrid is True)

    @property
    def sparse(self) -> bool:
        """Whether there is a field of sparse vectors."""
        return self.hybrid or self.options.lexical

    def added_fields(self, widths: Sequence[int]) -> frozenset[str]:
        """The fields beside those of the field layout, whose names no metadata key may have."""
        return frozenset(
            [
                *map(vector_name, widths),
                *([SPARSE] if self.sparse else []),
                *([PARTITION] if self.options.partition_key is not None else []),
            ]
        )

    def needs(self, widths: Sequence[int]) -> Iterator[Need]:
        """What a collection of these widths asks of a server."""
        yield Need(feature=UPSERTS, option="millpond")
        yield from self.options.needs()
        if self.hybrid:
            yield Need(feature=SPARSE_VECTORS, option="hybrid=True")
        if len(widths) > 1:
            yield Need(feature=SEVERAL_VECTORS, option=f"dimensions={list(widths)}", width=max(widths))

    def collection_schema(self, widths: Sequence[int]) -> Any:
        """The collection's fields, as the client describes them."""
        options = self.options
        schema = MilvusClient.create_schema(auto_id=False, enable_dynamic_field=self.schema.json is None)
        schema.add_field(self.schema.primary, DataType.VARCHAR, is_primary=True, max_length=MAX_VARCHAR)
        for name in self.schema.strings:
            analyzed = {"enable_analyzer": True} if options.lexical and name == "text" else {}
            schema.add_field(name, DataType.VARCHAR, max_length=MAX_VARCHAR, **analyzed)
        if self.schema.json is not None:
            schema.add_field(self.schema.json, DataType.JSON)
        if options.partition_key is not None:
            schema.add_field(PARTITION, DataType.VARCHAR, max_length=MAX_VARCHAR, is_partition_key=True)
        for width in widths:
            schema.add_field(vector_name(width), options.field_type, dim=width)
        if self.sparse:
            schema.add_field(SPARSE, DataType.SPARSE_FLOAT_VECTOR)
        if options.lexical:
            names = {"input_field_names": ["text"], "output_field_names": [SPARSE]}
            schema.add_function(Function(name="bm25", function_type=FunctionType.BM25, **names))
        return schema

    def fields(self, record: Record, point: str, widths: Sequence[int]) -> dict[str, Any]:
        """The fields of a record, without the vectors."""
        row = self.schema.row(record, point, vectors=self.added_fields(widths))
        if self.options.partition_key is not None:
            row[PARTITION] = self.options.partition_of(record.metadata)
        return row

    def rows(self, batch: WriteBatch) -> list[dict[str, Any]]:
        """A batch as rows."""
        widths = sorted(batch.vectors)
        rows = [self.fields(record, point, widths) for record, point in zip(batch.records, batch.ids, strict=True)]
        for width, values in batch.vectors.items():
            for row, vector in zip(rows, self.options.encode(values), strict=True):
                row[vector_name(width)] = vector
        if batch.sparse is not None:
            for row, weights in zip(rows, batch.sparse, strict=True):
                row[SPARSE] = token_weights(weights) or {_NO_TOKEN: 1.0}
        return rows


def token_weights(sparse: Mapping[int, float]) -> dict[int, float]:
    """A sparse vector as Milvus takes it: no zeros."""
    return {int(token): float(weight) for token, weight in sparse.items() if weight}


def weights_of(stored: Mapping[int, float]) -> dict[int, float]:
    """The sparse vector that a row was written with; a record without a token has none."""
    return {int(token): float(weight) for token, weight in stored.items() if int(token) != _NO_TOKEN}


def key_of(found: Mapping[str, Any], primary: str) -> str:
    """The primary key of a row that a search found: a server before 2.4 does not name the field, and it is ``id``."""
    return str(found[primary] if primary in found else found["id"])


MAX_VARCHAR = 65_535
MAX_JSON = 65_536
_HIDDEN = frozenset(["_seq", "_partition"])  # columns of Milvus Lite's own, which it takes out of every row it returns


@dataclass(frozen=True, kw_only=True)
class FieldSchema:
    """The fields of a collection, without the vector fields."""

    form: FieldLayout
    primary: str  # the field that holds the row's id
    strings: tuple[str, ...]  # the other VARCHAR fields
    json: str | None  # the JSON field of the metadata; without one every metadata key is a dynamic field
    dynamic: frozenset[str] = frozenset()  # the dynamic fields of the form itself

    @property
    def columns(self) -> frozenset[str]:
        """The fields that are not dynamic: names that no dynamic field may have."""
        return frozenset((self.primary, *self.strings))

    @property
    def reserved(self) -> frozenset[str]:
        """Names that stand for a field of the form, and for no metadata of that name."""
        return frozenset() if self.json is not None else self.columns | self.dynamic

    def row(self, record: Record, point: str, *, vectors: frozenset[str]) -> dict[str, Any]:
        """The fields of a record, without the vectors, whose names no metadata key may have."""
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

    def content(self, row: Mapping[str, Any], added: frozenset[str]) -> tuple[str, dict[str, Any]]:
        """Text and metadata of a stored row, to compare; both are empty if they cannot be read.

        ``added`` are its fields beside those of the layout.
        """
        fields = {key: value for key, value in row.items() if key not in added}
        try:
            _, text, metadata = self.record_fields(fields, str(row[self.primary]))
        except (LookupError, TypeError, ValueError):
            return "", {}
        if self.form == "llama_index":
            metadata = node_metadata(metadata, fields, LLAMA_INDEX_KEYS | self.columns | added)
        return text, metadata


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
