"""Requests and answers of ``/rerank``, in the format that vLLM, Cohere and Jina share."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field

from millpond.server.schemas.request import INT64
from millpond.server.schemas.score import PairRequest, Text
from millpond.server.schemas.usage import UsageInfo


class RerankRequest(PairRequest):
    """A query and documents to rank."""

    query: Text = Field(description="A text, or an object with content.")
    documents: Text | list[Text] = Field(
        description="Texts, or objects with text, content, or the fields in rank_fields."
    )
    top_n: Annotated[int, Field(ge=0, lt=INT64)] | None = Field(
        None, description="Return only this many documents; 0 or absent: all."
    )
    return_documents: bool | None = Field(
        None, description="Whether the answer contains the documents; by default true."
    )
    rank_fields: list[str] | None = Field(
        None, description="Fields of document objects to read, in this order; by default text."
    )


class RankedDocument(BaseModel):
    """A document and its relevance to the query."""

    index: int = Field(description="Its index in the request.")
    relevance_score: float
    document: dict[str, Any] | None = Field(None, description="Its text as `text`, and its other fields.")


class RerankAnswer(BaseModel):
    """The documents, best first; ties in the order of the request."""

    id: str
    model: str
    usage: UsageInfo
    results: list[RankedDocument]
    meta: dict[str, Any] = Field(description="Cohere's api_version, billed_units and tokens.")
