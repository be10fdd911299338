"""/classify: the classes of texts, for vLLM's clients."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from millpond.outputs import ClassificationOutput
from millpond.server.answers.envelope import envelope, usage
from millpond.server.encoding import json_answer
from millpond.server.requests import bodies, calls, prompts
from millpond.server.schemas.classify import ClassificationRequest, ClassificationResponse
from millpond.server.state import config_of, meant, models_of

router = APIRouter(tags=["vLLM"])


@router.post("/classify", openapi_extra=bodies.documented(ClassificationRequest, answer=ClassificationResponse))
async def classify(request: Request) -> Response:
    """The likeliest class of each text, and how likely every class is."""
    body, config = await bodies.read(request, ClassificationRequest), config_of(request)
    model = meant(request, models_of(request).find(body.model, tasks={"classify"}, api="Classification API"))
    output: ClassificationOutput = await calls.run(
        request,
        lambda: prompts.submit("classify", body, body.params(), model, config),
        model=model,
        texts=prompts.count(body, request),
    )
    best = output.probs.argmax(axis=1).tolist()
    data = [
        {"index": i, "label": output.labels[column], "probs": row, "num_classes": len(row)}
        for i, (column, row) in enumerate(zip(best, output.probs, strict=True))
    ]
    head = envelope(request, "classify", model, wanted=body.request_id)
    return await json_answer({**head, "data": data, "usage": usage(output.usage.prompt_tokens)})
