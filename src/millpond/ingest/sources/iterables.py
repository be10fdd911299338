"""Items of an iterable as records: dicts, LangChain's Documents and LlamaIndex's nodes, known by their attributes."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from typing import Any

from millpond.errors import InvalidRequestError
from millpond.ingest.record import Record, Rejected
from millpond.ingest.sources.rows import RowReader

_NO_METADATA = "none"  # LlamaIndex's MetadataMode.NONE, a str: the text alone


def read_items(items: Iterable[Any], rows: RowReader) -> Generator[Record | Rejected, None, Any]:
    """A record, or a :class:`Rejected`, for each item."""
    for number, item in enumerate(items):
        yield item if type(item) is Record else _record(item, rows, f"item {number}")


def _record(item: Any, rows: RowReader, where: str) -> Record | Rejected:
    if isinstance(item, Record | Rejected):
        return item
    try:
        if isinstance(item, Mapping):
            return rows.record(item)
        if hasattr(item, "page_content"):  # LangChain's Document
            return rows.document(getattr(item, "id", None), item.page_content, _metadata(item))
        if hasattr(item, "get_content") and (hasattr(item, "node_id") or hasattr(item, "id_")):
            # A node of LlamaIndex, a Document, or a NodeWithScore around one.
            identity = item.node_id if hasattr(item, "node_id") else item.id_
            return rows.document(identity, item.get_content(metadata_mode=_NO_METADATA), _metadata(item))
        reason = (
            f"is of type {type(item).__name__}; yield Record(id, text, metadata), or a dict with these keys, "
            "or a Document of LangChain, or a node of LlamaIndex"
        )
    except InvalidRequestError as error:
        reason = str(error)
    except Exception as error:  # of a value's own methods
        reason = f"{type(error).__name__}: {error}"
    if isinstance(item, Mapping):
        return rows.rejected(item, where, reason)
    return Rejected(where=where, reason=reason)


def _metadata(item: Any) -> Any:
    metadata = getattr(item, "metadata", None)
    return {} if metadata is None else metadata
