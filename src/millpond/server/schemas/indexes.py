"""Requests and answers of ``/v1/indexes``."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Count = Annotated[int, Field(ge=1, le=10_000)]
Candidates = Annotated[int, Field(ge=1, le=1_000_000)]
Id = Annotated[str, Field(min_length=1)]
Conditions = dict[str, Any]

_FILTER = "Metadata values that must match; of a list, one of them."


class SearchRequest(BaseModel):
    """A query, or several."""

    model_config = ConfigDict(extra="forbid", strict=True)

    query: str | None = None
    queries: list[str] | None = Field(None, description="Several queries instead of one.")
    k: Count = Field(10, description="Most hits for each query.")
    filter: Conditions | None = Field(None, description=_FILTER)
    ids: list[Id] | None = Field(None, description="Search among these documents only.")
    candidates: Candidates | None = Field(None, description="Documents that the first stage keeps for exact scoring.")
    exact: bool = Field(False, description="Score every document, without a first stage.")

    @model_validator(mode="after")
    def _check_forms(self) -> Self:
        if (self.query is None) is (self.queries is None):
            raise ValueError("pass query or queries, one of them")
        return self


class IndexHit(BaseModel):
    """A document that was found."""

    id: str
    score: float = Field(description="MaxSim.")
    exact: bool = Field(description="Whether the score was computed from stored rows, not from residual codes.")
    text: str
    metadata: dict[str, Any]


class SearchAnswer(BaseModel):
    """The hits, best first; for ``queries`` a list of them for each query."""

    index: str
    model: str
    results: list[IndexHit] | list[list[IndexHit]]


class AddRequest(BaseModel):
    """Documents to add; those of equal ids are replaced."""

    model_config = ConfigDict(extra="forbid", strict=True)

    ids: list[Id]
    texts: list[str]
    metadata: list[dict[str, Any] | None] | None = None


class AddAnswer(BaseModel):
    """What was added."""

    index: str
    added: int
    replaced: int
    blank: int = Field(description="Left out, since the text has no visible character.")
    truncated: int = Field(description="Cut, since the text is longer than the model reads.")


class DeleteRequest(BaseModel):
    """Documents to delete, by id or by metadata."""

    model_config = ConfigDict(extra="forbid", strict=True)

    ids: list[Id] | None = None
    filter: Conditions | None = Field(None, description=_FILTER)

    @model_validator(mode="after")
    def _check_forms(self) -> Self:
        if (self.ids is None) is (self.filter is None):
            raise ValueError("pass ids or filter, one of them")
        return self


class DeleteAnswer(BaseModel):
    """How many documents were deleted."""

    index: str
    deleted: int


class ExplainRequest(BaseModel):
    """A query and a document of the index."""

    model_config = ConfigDict(extra="forbid", strict=True)

    query: str
    id: Id


class Match(BaseModel):
    """The best match of one token of the query."""

    token: str
    score: float
    start: int = Field(description="First character of the match in the document's text.")
    end: int
    text: str


class ExplainAnswer(BaseModel):
    """A match for each token of the query; the scores add up to the document's."""

    index: str
    id: str
    text: str
    score: float
    matches: list[Match]


class IndexInfo(BaseModel):
    """One index."""

    name: str
    model: str
    documents: int
    tokens: int
    width: int
    codec: str
    bytes: int


class IndexList(BaseModel):
    """The indexes of this server."""

    data: list[IndexInfo]
