"""Requests and answers of ``/explain``."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from millpond.server.schemas.absent import absent_if_null
from millpond.server.schemas.indexes import Match
from millpond.server.schemas.usage import UsageInfo
from millpond.tasks import Truncate


class TextExplainRequest(BaseModel):
    """A query and a text to find its tokens in."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = Field(None, description="Optional if only one model has token vectors.")
    query: str
    document: str
    truncate: Annotated[Truncate, absent_if_null(Truncate)] = Field(
        "error", description="Which end of a text that is too long is cut; error refuses it."
    )


class TextExplainAnswer(BaseModel):
    """A match for each token of the query; the scores add up to MaxSim."""

    model: str
    score: float = Field(description="MaxSim of the query and the document.")
    truncated: bool = Field(description="Whether the query or the document was cut.")
    matches: list[Match]
    usage: UsageInfo
