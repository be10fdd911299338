"""``/score``: relevance scores of pairs of texts, in vLLM's format."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field

from millpond.errors import InvalidRequestError
from millpond.server.api import openapi
from millpond.server.requests import bodies
from millpond.server.requests.pairs import PairRequest, Scoring, Side, find_scorer
from millpond.server.responses import encoding
from millpond.server.responses.response_fields import UsageInfo, envelope, usage
from millpond.tasks import ScoreMeasure
from millpond.vllm.prompts import read_texts

_SPELLINGS = (("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2"))


class ScoreRequest(PairRequest):
    """Pairs under any of four names: one to one, one to many, or n to n."""

    queries: Side | None = Field(None, description="One query, or one for each document.")
    documents: Side | None = Field(None, description="Paired with queries.")
    items: Side | None = Field(None, description="Paired with queries.")
    data_1: Side | None = Field(None, description="One text, or one for each of data_2.")
    data_2: Side | None = Field(None, description="Paired with data_1.")
    text_1: Side | None = Field(None, description="One text, or one for each of text_2.")
    text_2: Side | None = Field(None, description="Paired with text_1.")

    def sides(self) -> tuple[tuple[str, Side], tuple[str, Side]]:
        """The two sides of the pairs, each with its name."""
        for first, second in _SPELLINGS:
            left, right = getattr(self, first), getattr(self, second)
            if left is not None and right is not None:
                return (first, left), (second, right)
        spelled = ", ".join(f"{first} and {second}" for first, second in _SPELLINGS)
        raise InvalidRequestError(f"the pairs have two sides, and one is missing; pass any of {spelled}")


class Score(BaseModel):
    """The score of one pair."""

    index: int
    object: Literal["score"]
    score: float


class ScoreAnswer(BaseModel):
    """A score for each pair, in the order of the request."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    method: ScoreMeasure = Field(description="What the scores are.")
    usage: UsageInfo


router = APIRouter(tags=["Scores and rankings"])

_DOCUMENTED = openapi.operation(ScoreRequest, answer=ScoreAnswer)


@router.post("/score", openapi_extra=_DOCUMENTED)
@router.post("/v1/score", openapi_extra=_DOCUMENTED)
async def score(request: Request) -> Response:
    """A score for each pair, by a cross-encoder, late interaction or the cosine, depending on the model."""
    body = await bodies.read(request, ScoreRequest)
    model = find_scorer(request, body.model, api="Score API")
    left, right = body.sides()
    scoring = Scoring.of(body, request, model)
    output = await scoring.run(request, model, _texts(*left), _texts(*right))
    return await encoding.json_response(
        {
            **envelope(request, "score", model, request_id=body.request_id),
            "data": [{"index": i, "object": "score", "score": float(each)} for i, each in enumerate(output.scores)],
            "method": output.method,
            "usage": usage(output.usage.prompt_tokens),
        }
    )


def _texts(name: str, side: Side) -> list[str]:
    return [] if side == [] else read_texts(side, name)
