"""``/predict``: the classes of texts and of pairs, in TEI's format."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from millpond.server.api import openapi
from millpond.server.api.tei.schemas import Prediction, TeiPredictRequest
from millpond.server.errors import RequestError
from millpond.server.requests import bodies, calls
from millpond.server.responses import encoding
from millpond.server.state import find_model, named_model
from millpond.tasks import Activation, Task
from millpond.values.inputs import Pair
from millpond.values.outputs import ClassificationOutput
from millpond.values.params import PoolingParams

router = APIRouter(tags=["TEI"])

_TASKS: tuple[Task, ...] = ("classify",)
_CLASS_BYTES = 40  # of a class in the response, without its label
_NAMED: dict[str, bool | Activation] = {"sigmoid": "sigmoid", "softmax": "softmax", "none": False}


@router.post(
    "/predict", openapi_extra=openapi.operation(TeiPredictRequest, answer=list[Prediction] | list[list[Prediction]])
)
async def predict(request: Request) -> Response:
    """Every class of a text with its score, best first; for a batch, a list of these."""
    body = await bodies.read(request, TeiPredictRequest)
    model = find_model(request, named_model(request, body.model), tasks=_TASKS, api="Predict API")
    items, batch = _inputs(body)
    params = PoolingParams(activation=_activation(body, len(model.engine.spec.labels)))
    output: ClassificationOutput = await calls.run_task(
        request,
        model,
        "classify",
        items,
        params,
        body.tokenization(),
        field="inputs",
        bytes_per_number=_CLASS_BYTES + max(map(len, model.engine.spec.labels), default=0),
    )
    ranked = output.top((body.parameters and body.parameters.top_k) or len(output.labels))
    classes = [[{"score": each.prob, "label": each.label} for each in row] for row in ranked]
    return await encoding.json_response(classes if batch or body.parameters is not None else classes[0])


def _inputs(body: TeiPredictRequest) -> tuple[list[str | Pair], bool]:
    """(texts or pairs, whether they are a batch): a list of str is one of them, and a batch a list of such lists."""
    values = body.inputs
    if isinstance(values, str):
        return [values], False
    if not values:
        raise RequestError("inputs is an empty list; pass at least one text", param="inputs")
    if isinstance(values[0], str):
        return [_item(values, "")], False
    return [_item(each, f" at index {i}") for i, each in enumerate(values)], True


def _item(texts: Any, where: str) -> str | Pair:
    if len(texts) == 1:
        return str(texts[0])
    if len(texts) == 2:
        return Pair(*texts)
    raise RequestError(
        f"inputs{where} is a list of {len(texts)} texts, where one is a text and two are a pair; for a batch pass a "
        "list of such lists",
        param="inputs",
    )


def _activation(body: TeiPredictRequest, labels: int) -> bool | Activation | None:
    if body.raw_scores:
        return False
    if body.parameters is not None and body.parameters.function_to_apply is not None:
        return _NAMED[body.parameters.function_to_apply]
    # As in /rerank: TEI's scores are between 0 and 1, even if the checkpoint's default differs.
    return "sigmoid" if labels == 1 else None
