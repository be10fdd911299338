"""/pooling: any task, for vLLM's clients."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field

from millpond.errors import UnsupportedTaskError
from millpond.server.api import openapi
from millpond.server.errors import NotServedError, RequestError
from millpond.server.requests import bodies, calls, prompts
from millpond.server.requests.fields import INT64
from millpond.server.requests.vectors import VectorRequest
from millpond.server.responses.response_fields import ListResponse, envelope, usage
from millpond.server.responses.vectors import vector_response
from millpond.server.served.models import ServedModel, ServedModels
from millpond.server.state import record_model, state_of
from millpond.tasks import Activation, Task
from millpond.values.spec import ModelSpec
from millpond.vllm.arguments import POOLING_TASKS
from millpond.vllm.model import Pending, rows_of_output
from millpond.vllm.params import PoolingParams

TokenId = Annotated[int, Field(ge=0, lt=INT64)]


class PoolingTaskRequest(VectorRequest):
    """Prompts for any task."""

    task: str | None = Field(
        None,
        description="`embed`, `classify`, `token_embed`, `token_classify` or `reward`; by default the "
        "model's own task.",
    )
    activation: bool | Activation | None = Field(
        None, description="Applied to logits: on, off, or an activation by name."
    )
    softmax: bool | None = Field(None, description="vLLM's older name for `activation`.")
    step_tag_id: TokenId | None = Field(None, description="Step rewards: keep the rows of this token.")
    returned_token_ids: list[TokenId] | None = Field(None, description="Step rewards: keep these columns.")

    def params(self, task: Task, spec: ModelSpec) -> PoolingParams:
        """The options of ``task``."""
        ids = self.returned_token_ids
        return replace(
            self.vector_params(spec),
            activation=self.activation,
            softmax=self.softmax,
            step_tag_id=self.step_tag_id,
            returned_token_ids=None if ids is None else tuple(ids),
        )


class PoolingData(BaseModel):
    """The result of a prompt."""

    index: int
    object: Literal["pooling"] = "pooling"
    data: list[float] | list[list[float]] | str = Field(description="One row, one row per token, or a base64 string.")
    shape: list[int] | None = Field(None, description="Rows and columns of a base64 matrix.")


class PoolingResponse(ListResponse[PoolingData]):
    """A result for each prompt, in the order of the request."""


router = APIRouter(tags=["vLLM"])


@router.post("/pooling", openapi_extra=openapi.operation(PoolingTaskRequest, answer=PoolingResponse, binary=True))
async def pooling(request: Request) -> Response:
    """The task's rows for each prompt: one for a text, or one for each of its tokens or steps."""
    body = await bodies.read(request, PoolingTaskRequest)
    if body.dimensions is not None:
        raise RequestError("dimensions is currently not supported; use /v1/embeddings", param="dimensions")
    model = record_model(request, _model(state_of(request).models, body))
    output = await calls.run(
        request, lambda: _submit(body, model, request), model=model, texts=prompts.count(body, request)
    )
    head = envelope(request, "pooling", model, request_id=body.request_id)
    return await vector_response(
        rows_of_output(output),
        body.number_format,
        head,
        usage(output.usage.prompt_tokens),
        item="pooling",
        field="data",
    )


def _model(models: ServedModels, body: PoolingTaskRequest) -> ServedModel:
    """The model for a request."""
    if body.task is not None and body.task not in POOLING_TASKS:
        raise RequestError(f"Unsupported task: {body.task!r} Supported tasks: {_served(*models)}", param="task")
    if body.model or body.task is None:
        return models.find(body.model, tasks=(), api="Pooling API")
    try:
        return models.find(None, tasks=POOLING_TASKS[body.task], api="Pooling API")
    except NotServedError:  # the only model raises in _submit, unless it is a language model that rewards steps
        return models.find(None, tasks=(), api="Pooling API")


def _submit(body: PoolingTaskRequest, model: ServedModel, request: Request) -> Pending[Any]:
    try:
        columns = None if body.returned_token_ids is None else "token_classify"  # the only task with this option
        task: Task = model.pooling.task(body.task or columns)
        return prompts.submit(task, body, body.params(task, model.engine.spec), model, request)
    except UnsupportedTaskError as error:
        message = str(error).replace(model.engine.spec.name, model.name)  # the engine's name may be a folder
        message = f"Unsupported task: {body.task!r} Supported tasks: {_served(model)}. {message}"
        raise RequestError(message, param="task") from error


def _served(*models: ServedModel) -> tuple[Task, ...]:
    """The tasks of this route that at least one of the models serves."""
    tasks = {task for choices in POOLING_TASKS.values() for task in choices}
    return tuple(sorted(tasks & frozenset().union(*(model.engine.tasks for model in models))))
