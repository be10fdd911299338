"""Documents of a rerank request: texts, or objects that hold one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from millpond.errors import InvalidRequestError
from millpond.server.encoding import repeatable
from millpond.vllm_dialect.prompts import read_texts

Document = str | Mapping[str, Any]


def text_of(document: Document, i: int, fields: Sequence[str] | None) -> str:
    """What of the document at index ``i`` is read.

    Args:
        document: A text, or an object with ``text`` (Cohere's and Jina's) or ``content`` (vLLM's).
        i: Its place.
        fields: Which fields of an object are read, one behind the other; those that it lacks are left out.

    Raises:
        InvalidRequestError: There is no text in it.
    """
    if isinstance(document, str):
        return document
    if fields:
        found = [document[name] for name in fields if document.get(name) is not None]
        if not found:
            raise InvalidRequestError(f"the document at index {i} has none of rank_fields: {', '.join(fields)}")
        return "\n".join(value if isinstance(value, str) else str(value) for value in found)
    if isinstance(document.get("text"), str):
        return str(document["text"])
    try:
        return read_texts(document, "documents")[0]
    except InvalidRequestError:
        raise InvalidRequestError(
            f"the document at index {i} holds no text; pass a text, or an object with text, with content of text "
            "parts, or with the fields that rank_fields names"
        ) from None


def repeated(document: Document, text: str) -> dict[str, Any]:
    """The document in an answer: its text, and the fields that it had besides."""
    if isinstance(document, str):
        return {"text": text}
    told: dict[str, Any] = repeatable({**document, "text": document.get("text", text)})
    return told
