"""``/predict``: the classes of texts and of pairs, in TEI's shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response

from millpond.inputs import Pair
from millpond.outputs import ClassificationOutput
from millpond.params import PoolingParams
from millpond.server import encoding
from millpond.server.errors import RequestError
from millpond.server.models import ServedModel
from millpond.server.requests import bodies, calls
from millpond.server.requests.limits import check_count
from millpond.server.schemas.tei import Prediction, TeiPredictRequest
from millpond.server.state import meant, models_of
from millpond.tasks import Activation, Task
from millpond.vllm_dialect.model import Pending

router = APIRouter(tags=["TEI"])

_TASKS: tuple[Task, ...] = ("classify",)
_NAMED: dict[str, bool | Activation] = {"sigmoid": "sigmoid", "softmax": "softmax", "none": False}


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """The inputs of a request.

    Attributes:
        items: Texts, or pairs.
        batch: Whether several were meant, be it one.
    """

    items: list[str | Pair]
    batch: bool


@router.post(
    "/predict", openapi_extra=bodies.documented(TeiPredictRequest, answer=list[Prediction] | list[list[Prediction]])
)
async def predict(request: Request) -> Response:
    """Every class of a text with its score, best first; for a batch, a list of these."""
    body = await bodies.read(request, TeiPredictRequest)
    wanted = body.model or request.query_params.get("model")
    model = meant(request, models_of(request).find(wanted, tasks=_TASKS, api="Predict API"))
    asked = _asked(body)
    check_count(len(asked.items), request, field="inputs")
    output = await calls.run(request, lambda: _submit(model, body, asked), model=model, texts=len(asked.items))
    ranked = output.top((body.parameters and body.parameters.top_k) or len(output.labels))
    told = [[{"score": each.prob, "label": each.label} for each in one] for one in ranked]
    return await encoding.json_answer(told if asked.batch or body.parameters is not None else told[0])


def _asked(body: TeiPredictRequest) -> _Asked:
    """TEI's reading: a list of strings is one text or one pair, and a batch is a list of such lists.

    Raises:
        RequestError: Another number of texts.
    """
    given = body.inputs
    if isinstance(given, str):
        return _Asked(items=[given], batch=False)
    if not given:
        raise RequestError("inputs is an empty list; pass at least one text", param="inputs")
    if isinstance(given[0], str):
        return _Asked(items=[_item(given, "")], batch=False)
    return _Asked(items=[_item(each, f" at index {i}") for i, each in enumerate(given)], batch=True)


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


def _submit(model: ServedModel, body: TeiPredictRequest, asked: _Asked) -> Pending[ClassificationOutput]:
    activation: bool | Activation | None = None
    if body.raw_scores:
        activation = False
    elif body.parameters is not None and body.parameters.function_to_apply is not None:
        activation = _NAMED[body.parameters.function_to_apply]
    elif len(model.engine.spec.labels) == 1:
        activation = "sigmoid"  # as in /rerank: TEI's scores lie between 0 and 1, whatever the checkpoint's habit is
    pooling = model.pooling
    params = pooling.complete("classify", PoolingParams(activation=activation), body.tokenization())
    return pooling.submit("classify", asked.items, params)
