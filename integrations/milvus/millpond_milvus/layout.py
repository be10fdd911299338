"""RowLayout: the fields of a collection, and a batch as rows of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pymilvus import DataType, Function, FunctionType, MilvusClient

from millpond.errors import InvalidRequestError
from millpond.ingest.record import Record
from millpond.ingest.sinks.batch import WriteBatch
from millpond.ingest.sinks.fields import FieldLayout
from millpond.ingest.sinks.protocol import vector_name
from millpond_milvus.options import PARTITION, SPARSE, VectorOptions
from millpond_milvus.schema import MAX_VARCHAR, SCHEMAS, FieldSchema
from millpond_milvus.url import MilvusOptions

# A token that no model has: a record without any has this one, since Milvus takes no empty sparse vector.
_NO_TOKEN = 2**32 - 2


@dataclass(frozen=True, kw_only=True)
class RowLayout:
    """What a row holds.

    Attributes:
        schema: The fields of the field layout.
        options: Data type, partition key and lexical vectors.
        hybrid: Whether rows have sparse vectors of an engine.
    """

    schema: FieldSchema
    options: VectorOptions
    hybrid: bool

    @classmethod
    def of(cls, fields: FieldLayout, options: MilvusOptions) -> RowLayout:
        """The rows of a sink with these options.

        Raises:
            InvalidRequestError: One that is not valid.
        """
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
        """The fields of a record, without the vectors.

        Raises:
            InvalidRequestError: A text or metadata that Milvus cannot store.
        """
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
