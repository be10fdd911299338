"""Requests and answers of ``/rerank``, in the shape that vLLM, Cohere and Jina share."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field

from millpond.server.schemas.request import INT64
from millpond.server.schemas.score import PairRequest, Text
from millpond.server.schemas.usage import UsageInfo


class RerankRequest(PairRequest):
    """A query and the documents that may answer it."""

    query: Text = Field(description="A text, or an object with content.")
    documents: Text | list[Text] = Field(
        description="Texts, or objects with text, content, or the fields that rank_fields names."
    )
    top_n: Annotated[int, Field(ge=0, lt=INT64)] | None = Field(
        None, description="Answer with the best documents only; 0 and absent are all of them."
    )
    return_documents: bool | None = Field(
        None, description="Whether the answer repeats the documents; it does unless this is false."
    )
    rank_fields: list[str] | None = Field(
        None, description="Which fields of documents that are objects are read, in this order; by default text."
    )


class RankedDocument(BaseModel):
    """A document and how well it answers the query."""

    index: int = Field(description="Its place in the request.")
    relevance_score: float
    document: dict[str, Any] | None = Field(None, description="Its text as `text`, and its other fields if it had any.")


class RerankAnswer(BaseModel):
    """The documents, the best one first; of equal ones the earlier first."""

    id: str
    model: str
    usage: UsageInfo
    results: list[RankedDocument]
    meta: dict[str, Any] = Field(description="Cohere's api_version, billed_units and tokens.")
