"""Documents of a rerank request: texts, or objects with a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from millpond.errors import InvalidRequestError
from millpond.server.encoding import repeatable
from millpond.vllm.prompts import read_texts

Document = str | Mapping[str, Any]


def text_of(document: Document, index: int, fields: Sequence[str] | None) -> str:
    """The text of the document at ``index``.

    Args:
        document: A text, or an object with ``text`` (Cohere's and Jina's) or ``content`` (vLLM's).
        index: Its index in the request.
        fields: Names of the fields of an object to read, joined by line breaks; missing ones are skipped.

    Raises:
        InvalidRequestError: It has no text.
    """
    if isinstance(document, str):
        return document
    if fields:
        values = [document[name] for name in fields if document.get(name) is not None]
        if not values:
            raise InvalidRequestError(f"the document at index {index} has none of rank_fields: {', '.join(fields)}")
        return "\n".join(value if isinstance(value, str) else str(value) for value in values)
    if isinstance(document.get("text"), str):
        return str(document["text"])
    try:
        return read_texts(document, "documents")[0]
    except InvalidRequestError:
        raise InvalidRequestError(
            f"the document at index {index} holds no text; pass a text, or an object with text, with content of text "
            "parts, or with the fields that rank_fields names"
        ) from None


def echo(document: Document, text: str) -> dict[str, Any]:
    """The document for the response: its text and its other fields."""
    if isinstance(document, str):
        return {"text": text}
    content: dict[str, Any] = repeatable({**document, "text": document.get("text", text)})
    return content
