"""FieldLayout: the fields of a stored record, plain or as a framework reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, get_args

from millpond.errors import InvalidRequestError
from millpond.ingest.record import Record, content_hash, point_id

FieldLayout = Literal["plain", "langchain", "llama_index"]
FIELD_LAYOUTS: tuple[FieldLayout, ...] = get_args(FieldLayout)

LLAMA_INDEX_KEYS = frozenset(["_node_content", "_node_type", "document_id", "doc_id", "ref_doc_id", "content_hash"])
"""The store's own fields: metadata of the same name is in the node alone, where no filter looks."""

_SOURCE = "1"  # LlamaIndex's NodeRelationship.SOURCE: the document that a node was cut from


def check_fields(fields: str) -> FieldLayout:
    """The layout of this name; raises InvalidRequestError for an unknown name."""
    if fields not in FIELD_LAYOUTS:
        raise InvalidRequestError(f"fields={fields!r} is unknown; choose one of {', '.join(FIELD_LAYOUTS)}")
    return fields


def llama_index_fields(record: Record, node_id: str, *, text_inside: bool) -> dict[str, Any]:
    """A record in the format of a TextNode in LlamaIndex's vector stores: flat metadata, and the node itself as JSON.

    The record is the node's source document, so that deleting by document id finds it; the span of a chunk in it, which
    the metadata holds, is the node's. If a metadata key is also a field of the store (:data:`LLAMA_INDEX_KEYS`), the
    flat key has the store's value, and the node has the record's.
    """
    node: dict[str, Any] = {
        "id_": node_id,
        "embedding": None,
        "metadata": dict(record.metadata),
        "excluded_embed_metadata_keys": [],
        "excluded_llm_metadata_keys": [],
        "relationships": {
            _SOURCE: {
                "node_id": record.id,
                "node_type": None,
                "metadata": {},
                "hash": None,
                "class_name": "RelatedNodeInfo",
            }
        },
        "metadata_template": "{key}: {value}",
        "metadata_separator": "\n",
        "text": record.text if text_inside else "",
        "mimetype": "text/plain",
        "start_char_idx": _offset(record.metadata.get("chunk_start")),
        "end_char_idx": _offset(record.metadata.get("chunk_end")),
        "text_template": "{metadata_str}\n\n{content}",
        "class_name": "TextNode",
    }
    return {
        **record.metadata,
        "_node_content": json.dumps(node, ensure_ascii=False),
        "_node_type": "TextNode",
        "document_id": record.id,
        "doc_id": record.id,
        "ref_doc_id": record.id,
        "content_hash": content_hash(record.text),
    }


def read_llama_index(fields: Mapping[str, Any], row_id: str) -> tuple[str, str, dict[str, Any]]:
    """Id, text and metadata of a node in LlamaIndex's vector stores.

    The id of a row that :func:`llama_index_fields` made is the record's, and of one that the framework wrote its own:
    several nodes may have the same source document, or none.
    """
    node = json.loads(fields["_node_content"])
    record_id = str(fields.get("doc_id"))
    # A node of any class but TextNode and its subclasses keeps the text one level deeper.
    text = node["text"] if "text" in node else (node["text_resource"] or {}).get("text") or ""
    metadata = dict(node["metadata"])
    return record_id if is_own_row(record_id, row_id, metadata) else row_id, str(text), metadata


def node_metadata(
    metadata: Mapping[str, Any], fields: Mapping[str, Any], hidden: frozenset[str] = LLAMA_INDEX_KEYS
) -> dict[str, Any]:
    """A node's metadata; if the flat copy, by which filters look, is another one, that copy.

    ``hidden`` are the fields that are no flat copy of a key.
    """
    flat = {key: value for key, value in fields.items() if key not in hidden}
    same = flat == {key: value for key, value in metadata.items() if key not in hidden}
    return dict(metadata) if same else flat


def _offset(value: object) -> int | None:
    """A position in a text; ``None`` for metadata of the same name that is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def is_own_row(record_id: str, row_id: str, metadata: Mapping[str, Any]) -> bool:
    """Whether a row has the id that millpond gives the record, or the chunk of it that its metadata names."""
    chunk = metadata.get("chunk", 0)
    numbered = isinstance(chunk, int) and not isinstance(chunk, bool) and chunk > 0
    return point_id(record_id) == row_id or (numbered and point_id(record_id, chunk) == row_id)
