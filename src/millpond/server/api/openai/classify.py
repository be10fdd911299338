"""/classify: the classes of texts, for vLLM's clients."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field

from millpond.server.api import openapi
from millpond.server.requests import bodies, prompts
from millpond.server.requests.fields import check_count
from millpond.server.requests.prompts import PromptRequest
from millpond.server.responses.encoding import json_response
from millpond.server.responses.response_fields import ListResponse, envelope, usage
from millpond.server.state import find_model
from millpond.tasks import Activation
from millpond.values.outputs import ClassificationOutput
from millpond.vllm.params import PoolingParams


class ClassificationRequest(PromptRequest):
    """Texts to classify."""

    use_activation: bool | None = Field(
        None, description="Whether logits become probabilities; by default as the model does."
    )
    activation: bool | Activation | None = Field(None, description="The same, or an activation by name.")
    softmax: bool | None = Field(None, description="vLLM's older name for use_activation.")
    labels: list[str] | None = Field(
        None, description="Labels of your own, for a model of natural language inference (entailment)."
    )
    template: str | None = Field(None, description="The hypothesis of a label, which takes the place of {}.")
    multi_label: bool = Field(False, description="Whether several labels may be true, each with its own probability.")

    def params(self) -> PoolingParams:
        """The options of the call."""
        return PoolingParams(
            use_activation=self.use_activation,
            activation=self.activation,
            softmax=self.softmax,
            labels=None if self.labels is None else tuple(self.labels),
            template=self.template,
            multi_label=self.multi_label,
        )


class ClassificationData(BaseModel):
    """The classes of a text."""

    index: int
    label: str = Field(description="The most probable class.")
    probs: list[float]
    num_classes: int


class ClassificationResponse(ListResponse[ClassificationData]):
    """The classes of each text, in the order of the request."""


router = APIRouter(tags=["vLLM"])


@router.post("/classify", openapi_extra=openapi.operation(ClassificationRequest, answer=ClassificationResponse))
async def classify(request: Request) -> Response:
    """The most probable class of each text, and the probability of every class."""
    body = await bodies.read(request, ClassificationRequest)
    model = find_model(request, body.model, tasks={"classify"}, api="Classification API")
    check_count(request, prompts.count(body, request) * len(body.labels or (0,)), field="pairs of a text and a label")
    output: ClassificationOutput = await prompts.run(request, model, "classify", body, body.params())
    best = output.probs.argmax(axis=1).tolist()
    data = [
        {"index": i, "label": output.labels[column], "probs": row, "num_classes": len(row)}
        for i, (column, row) in enumerate(zip(best, output.probs, strict=True))
    ]
    head = envelope(request, "classify", model, request_id=body.request_id)
    return await json_response({**head, "data": data, "usage": usage(output.usage.prompt_tokens)})
