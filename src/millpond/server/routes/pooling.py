"""/pooling: any task, for vLLM's clients."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from millpond.errors import UnsupportedTaskError
from millpond.server.answers.binary import Rows
from millpond.server.answers.envelope import envelope, usage
from millpond.server.answers.vectors import vector_answer
from millpond.server.errors import NotServedError, RequestError
from millpond.server.models import ServedModel, ServedModels
from millpond.server.requests import bodies, calls, prompts
from millpond.server.schemas.pooling import PoolingResponse, PoolingTaskRequest
from millpond.server.settings.config import ServerConfig
from millpond.server.state import config_of, meant, models_of
from millpond.tasks import Task
from millpond.vllm_dialect.arguments import POOLING_TASKS
from millpond.vllm_dialect.model import Pending

router = APIRouter(tags=["vLLM"])


@router.post("/pooling", openapi_extra=bodies.documented(PoolingTaskRequest, answer=PoolingResponse, octets=True))
async def pooling(request: Request) -> Response:
    """The task's rows for each prompt: one for a text, or one for each of its tokens or steps."""
    body, config = await bodies.read(request, PoolingTaskRequest), config_of(request)
    if body.dimensions is not None:
        raise RequestError("dimensions is currently not supported; use /v1/embeddings", param="dimensions")
    model = meant(request, _model(models_of(request), body))
    output = await calls.run(
        request, lambda: _submit(body, model, config), model=model, texts=prompts.count(body, request)
    )
    head = envelope(request, "pooling", model, wanted=body.request_id)
    return await vector_answer(
        _rows(output), body, head, usage(output.usage.prompt_tokens), item="pooling", field="data"
    )


def _model(models: ServedModels, body: PoolingTaskRequest) -> ServedModel:
    """The model that is meant.

    Raises:
        RequestError: No such task.
    """
    if body.task is not None and body.task not in POOLING_TASKS:
        raise RequestError(f"Unsupported task: {body.task!r} Supported tasks: {_served(*models)}", param="task")
    if body.model or body.task is None:
        return models.find(body.model, tasks=(), api="Pooling API")
    try:
        return models.find(None, tasks=POOLING_TASKS[body.task], api="Pooling API")
    except NotServedError:  # the only model there is will say so, unless it is a language model that rewards steps
        return models.find(None, tasks=(), api="Pooling API")


def _submit(body: PoolingTaskRequest, model: ServedModel, config: ServerConfig) -> Pending[Any]:
    try:
        columns = None if body.returned_token_ids is None else "token_classify"  # which nothing else has
        task: Task = model.pooling.task(body.task or columns)
        return prompts.submit(task, body, body.params(task, model.engine.spec), model, config)
    except UnsupportedTaskError as error:
        told = str(error).replace(model.engine.spec.name, model.name)  # which may be a folder here
        message = f"Unsupported task: {body.task!r} Supported tasks: {_served(model)}. {told}"
        raise RequestError(message, param="task") from error


def _served(*models: ServedModel) -> tuple[Task, ...]:
    """The tasks of this route that any of the models serves."""
    asked = {task for choices in POOLING_TASKS.values() for task in choices}
    return tuple(sorted(asked & frozenset().union(*(model.engine.tasks for model in models))))


def _rows(output: Any) -> Rows:
    """The numbers of whichever output it is."""
    for name in ("embeddings", "rewards", "probs"):
        if hasattr(output, name):
            rows: Rows = getattr(output, name)
            return rows
    raise TypeError(f"a {type(output).__name__} holds no rows")
