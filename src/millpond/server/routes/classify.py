"""/classify: the classes of texts, for vLLM's clients."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from millpond.outputs import ClassificationOutput
from millpond.server import openapi
from millpond.server.answers.envelope import envelope, usage
from millpond.server.encoding import json_response
from millpond.server.requests import bodies, prompts
from millpond.server.schemas.classify import ClassificationRequest, ClassificationResponse
from millpond.server.state import find_model

router = APIRouter(tags=["vLLM"])


@router.post("/classify", openapi_extra=openapi.operation(ClassificationRequest, answer=ClassificationResponse))
async def classify(request: Request) -> Response:
    """The most probable class of each text, and the probability of every class."""
    body = await bodies.read(request, ClassificationRequest)
    model = find_model(request, body.model, tasks={"classify"}, api="Classification API")
    output: ClassificationOutput = await prompts.run(request, model, "classify", body, body.params())
    best = output.probs.argmax(axis=1).tolist()
    data = [
        {"index": i, "label": output.labels[column], "probs": row, "num_classes": len(row)}
        for i, (column, row) in enumerate(zip(best, output.probs, strict=True))
    ]
    head = envelope(request, "classify", model, request_id=body.request_id)
    return await json_response({**head, "data": data, "usage": usage(output.usage.prompt_tokens)})
