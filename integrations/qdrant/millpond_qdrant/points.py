"""A record as a Qdrant payload, and a payload as a record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millpond.ingest.record import Record, content_hash
from millpond.ingest.sinks.fields import FieldLayout, is_own_row, llama_index_fields, read_llama_index

# The key that holds the text, from the form that no other could be taken for.
_TEXT_KEYS: Mapping[FieldLayout, str] = {"llama_index": "_node_content", "langchain": "page_content", "plain": "text"}

IDENTITY = ["id", "doc_id", "chunk", "_node_type", "content_hash"]
"""The keys that :func:`identity_of` reads: not the text, nor the metadata."""


def identity_of(payload: Mapping[str, Any], point: str) -> tuple[str, str]:
    """Id and content hash of a stored point, of the keys in :data:`IDENTITY`; of a framework's own its id and no hash.

    A framework's point may have any of these keys: a LlamaIndex node its metadata's.
    """
    if "_node_type" in payload:
        record_id = str(payload.get("doc_id"))
        own = is_own_row(record_id, point, payload)
    else:
        record_id = str(payload.get("id", point))
        own = "content_hash" in payload
    return (record_id if own else point), str(payload["content_hash"]) if own and "content_hash" in payload else ""


def payload_of(record: Record, point: str, form: FieldLayout) -> dict[str, Any]:
    """The payload of a point."""
    if form == "llama_index":
        return llama_index_fields(record, point, text_inside=True)
    return {
        "id": record.id,
        "page_content" if form == "langchain" else "text": record.text,
        "metadata": dict(record.metadata),
        "content_hash": content_hash(record.text),
    }


def record_fields(payload: Mapping[str, Any], point: str, form: FieldLayout) -> tuple[str, str, dict[str, Any]]:
    """Id, text and metadata of a stored point. The id of a point that a framework wrote is the point's own.

    A point of another form than the collection's, as another framework writes it, is read as well.
    """
    written = next((known for known in (form, *_TEXT_KEYS) if _TEXT_KEYS[known] in payload), form)
    if written == "llama_index":
        return read_llama_index(payload, point)
    text = payload[_TEXT_KEYS[written]]
    return str(payload.get("id", point)), str(text), dict(payload.get("metadata") or {})
