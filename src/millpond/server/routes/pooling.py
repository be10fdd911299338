"""/pooling: any task, for vLLM's clients."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from millpond.errors import UnsupportedTaskError
from millpond.server import openapi
from millpond.server.answers.binary import RowsOrMatrices
from millpond.server.answers.envelope import envelope, usage
from millpond.server.answers.vectors import vector_response
from millpond.server.errors import NotServedError, RequestError
from millpond.server.models import ServedModel, ServedModels
from millpond.server.requests import bodies, calls, prompts
from millpond.server.schemas.pooling import PoolingResponse, PoolingTaskRequest
from millpond.server.settings.config import ServerConfig
from millpond.server.state import config_of, models_of, record_model
from millpond.tasks import Task
from millpond.vllm.arguments import POOLING_TASKS
from millpond.vllm.model import Pending

router = APIRouter(tags=["vLLM"])


@router.post("/pooling", openapi_extra=openapi.operation(PoolingTaskRequest, answer=PoolingResponse, binary=True))
async def pooling(request: Request) -> Response:
    """The task's rows for each prompt: one for a text, or one for each of its tokens or steps."""
    body, config = await bodies.read(request, PoolingTaskRequest), config_of(request)
    if body.dimensions is not None:
        raise RequestError("dimensions is currently not supported; use /v1/embeddings", param="dimensions")
    model = record_model(request, _model(models_of(request), body))
    output = await calls.run(
        request, lambda: _submit(body, model, config), model=model, texts=prompts.count(body, request)
    )
    head = envelope(request, "pooling", model, request_id=body.request_id)
    return await vector_response(
        _rows(output), body, head, usage(output.usage.prompt_tokens), item="pooling", field="data"
    )


def _model(models: ServedModels, body: PoolingTaskRequest) -> ServedModel:
    """The model for a request.

    Raises:
        RequestError: The route has no such task.
    """
    if body.task is not None and body.task not in POOLING_TASKS:
        raise RequestError(f"Unsupported task: {body.task!r} Supported tasks: {_served(*models)}", param="task")
    if body.model or body.task is None:
        return models.find(body.model, tasks=(), api="Pooling API")
    try:
        return models.find(None, tasks=POOLING_TASKS[body.task], api="Pooling API")
    except NotServedError:  # the only model raises in _submit, unless it is a language model that rewards steps
        return models.find(None, tasks=(), api="Pooling API")


def _submit(body: PoolingTaskRequest, model: ServedModel, config: ServerConfig) -> Pending[Any]:
    try:
        columns = None if body.returned_token_ids is None else "token_classify"  # the only task with this option
        task: Task = model.pooling.task(body.task or columns)
        return prompts.submit(task, body, body.params(task, model.engine.spec), model, config)
    except UnsupportedTaskError as error:
        message = str(error).replace(model.engine.spec.name, model.name)  # the engine's name may be a folder
        message = f"Unsupported task: {body.task!r} Supported tasks: {_served(model)}. {message}"
        raise RequestError(message, param="task") from error


def _served(*models: ServedModel) -> tuple[Task, ...]:
    """The tasks of this route that at least one of the models serves."""
    tasks = {task for choices in POOLING_TASKS.values() for task in choices}
    return tuple(sorted(tasks & frozenset().union(*(model.engine.tasks for model in models))))


def _rows(output: Any) -> RowsOrMatrices:
    """The numbers of any kind of output."""
    for name in ("embeddings", "rewards", "probs"):
        if hasattr(output, name):
            rows: RowsOrMatrices = getattr(output, name)
            return rows
    raise TypeError(f"a {type(output).__name__} holds no rows")
