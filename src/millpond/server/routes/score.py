"""``/score``: relevance scores of pairs of texts, in vLLM's format."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from millpond.server import encoding, openapi
from millpond.server.answers.envelope import envelope, usage
from millpond.server.requests import bodies
from millpond.server.requests.pairs import Scoring, find_scorer
from millpond.server.schemas.score import ScoreAnswer, ScoreRequest, Side
from millpond.vllm.prompts import read_texts

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
            "usage": usage(output.usage.prompt_tokens),
        }
    )


def _texts(name: str, side: Side) -> list[str]:
    return [] if side == [] else read_texts(side, name)
