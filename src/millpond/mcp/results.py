"""What the tools return: objects with an output schema."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, Field

from millpond.mcp.targets.target import Found


class Hit(BaseModel):
    """A text that a search found."""

    id: str = Field(description="Names the text for get and explain; of a file: path:first-last line")
    score: float = Field(description="Higher is better; comparable within this answer and target only")
    text: str
    truncated: bool = Field(default=False, description="Whether the text is cut here; get returns more of it")
    metadata: dict[str, Any] = Field(default_factory=dict)


class TargetFacts(BaseModel):
    """What was searched."""

    target: str
    facts: dict[str, Any] = Field(description="Its size; of a folder also how many files are skipped for which reason")


class Hits(BaseModel):
    """The answer to a search."""

    hits: list[Hit] = Field(description="Best first")
    searched: list[TargetFacts]


class Text(BaseModel):
    """A text."""

    id: str
    text: str
    truncated: bool = Field(description="Whether the text is cut to what an answer may have")
    metadata: dict[str, Any]


class Match(BaseModel):
    """Where a token of the query matches best."""

    token: str
    score: float = Field(description="Similarity, at most 1")
    start: int = Field(description="Characters of the text")
    end: int
    text: str


class Explanation(BaseModel):
    """Why a text matches a query."""

    id: str
    score: float = Field(description="MaxSim: the sum of the matches' scores")
    matches: list[Match] = Field(description="For each token of the query its best match in the text")


class Added(BaseModel):
    """What add did."""

    target: str
    stored: int


class Deleted(BaseModel):
    """What delete did."""

    target: str
    ids: list[str]


class Document(BaseModel):
    """A text to add."""

    id: str = Field(description="A text with this id is replaced")
    text: str
    metadata: dict[str, Any] = Field(default_factory=dict)


def fit(found: Sequence[Found], budget: int) -> list[Hit]:
    """The hits, with texts cut so that all of them and their metadata have at most ``budget`` characters together.

    Short texts stay whole; the long ones get equal parts of what is left.
    """
    sizes = [len(str(dict(each.metadata))) + len(each.id) + 80 for each in found]
    kept = len(found)
    while kept > 1 and sum(sizes[:kept]) > budget // 2:
        kept -= 1
    left = budget - sum(sizes[:kept])
    shares: dict[int, int] = {}
    order = sorted(range(kept), key=lambda index: len(found[index].text))
    for place, index in enumerate(order):
        shares[index] = max(0, min(len(found[index].text), left // (kept - place)))
        left -= shares[index]
    return [
        Hit(
            id=each.id,
            score=round(each.score, 6),
            text=each.text[: shares[index]],
            truncated=shares[index] < len(each.text),
            metadata=dict(each.metadata),
        )
        for index, each in enumerate(found[:kept])
    ]
