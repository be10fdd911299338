"""A record as a Qdrant payload, and a payload as a record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millpond.ingest.payload import Payload, llama_index_fields, read_llama_index
from millpond.ingest.record import Record, content_hash


def payload_of(record: Record, point: str, form: Payload) -> dict[str, Any]:
    """The payload of a point."""
    if form == "llama_index":
        return llama_index_fields(record, point, text_inside=True)
    return {
        "id": record.id,
        "page_content" if form == "langchain" else "text": record.text,
        "metadata": dict(record.metadata),
        "content_hash": content_hash(record.text),
    }


def record_fields(payload: Mapping[str, Any], point: str, form: Payload) -> tuple[str, str, dict[str, Any]]:
    """Id, text and metadata of a stored point. The id of a point that the framework wrote is the point's own."""
    if form == "llama_index":
        return read_llama_index(payload)
    text = payload["page_content" if form == "langchain" else "text"]
    return str(payload.get("id", point)), str(text), dict(payload.get("metadata") or {})
