"""/v1/embeddings: vectors for OpenAI's clients and vLLM's."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from millpond.outputs import EmbeddingOutput, TokenEmbeddingOutput
from millpond.server import openapi
from millpond.server.answers.envelope import envelope, usage
from millpond.server.answers.vectors import vector_response
from millpond.server.errors import NotServedError, RequestError
from millpond.server.models import ServedModel, ServedModels
from millpond.server.requests import bodies, prompts
from millpond.server.schemas.embeddings import EmbeddingRequest, EmbeddingResponse
from millpond.server.state import models_of, record_model
from millpond.tasks import Task

router = APIRouter(tags=["OpenAI"])


@router.post("/v1/embeddings", openapi_extra=openapi.operation(EmbeddingRequest, answer=EmbeddingResponse, binary=True))
async def embeddings(request: Request) -> Response:
    """A vector for each text; from a model with token vectors only, a matrix."""
    body = await bodies.read(request, EmbeddingRequest)
    model = record_model(request, _model(models_of(request), body.model))
    if body.late_chunking_params is not None:
        raise RequestError(
            "late_chunking_params is not served; embed the chunks as texts of their own", param="late_chunking_params"
        )
    task: Task = "embed" if "embed" in model.engine.tasks else "token_embed"
    params = body.vector_params(model.engine.spec)
    output: EmbeddingOutput | TokenEmbeddingOutput = await prompts.run(request, model, task, body, params)
    head = envelope(request, "embd", model, request_id=body.request_id)
    return await vector_response(
        output.embeddings, body, head, usage(output.usage.prompt_tokens), item="embedding", field="embedding"
    )


def _model(models: ServedModels, name: str | None) -> ServedModel:
    """The model for a request; without a name, a model that embeds texts is preferred to one that embeds tokens."""
    api = "Embeddings API"
    if not name:
        try:
            return models.find(None, tasks={"embed"}, api=api)
        except NotServedError:
            pass
    return models.find(name, tasks={"embed", "token_embed"}, api=api)
