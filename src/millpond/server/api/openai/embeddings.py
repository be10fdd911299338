"""/v1/embeddings: vectors for OpenAI's clients and vLLM's."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field

from millpond.server.api import openapi
from millpond.server.errors import RequestError
from millpond.server.requests import bodies, prompts
from millpond.server.requests.vectors import VectorRequest
from millpond.server.responses.response_fields import ListResponse, envelope, usage
from millpond.server.responses.vectors import vector_response
from millpond.server.state import find_model, state_of
from millpond.tasks import Task
from millpond.values.outputs import EmbeddingOutput, TokenEmbeddingOutput


class EmbeddingRequest(VectorRequest):
    """Texts to embed."""

    late_chunking_params: dict[str, Any] | None = Field(None, description="Refused: see docs/server.md.")


class EmbeddingData(BaseModel):
    """The vector of a text; from a late-interaction model a matrix."""

    index: int
    object: Literal["embedding"] = "embedding"
    embedding: list[float] | list[list[float]] | str = Field(description="Numbers, or a base64 string.")
    shape: list[int] | None = Field(None, description="Rows and columns of a base64 matrix.")


class EmbeddingResponse(ListResponse[EmbeddingData]):
    """A vector for each text, in the order of the request."""


router = APIRouter(tags=["OpenAI"])


@router.post("/v1/embeddings", openapi_extra=openapi.operation(EmbeddingRequest, answer=EmbeddingResponse, binary=True))
async def embeddings(request: Request) -> Response:
    """A vector for each text; from a model with token vectors only, a matrix."""
    body = await bodies.read(request, EmbeddingRequest)
    tasks: set[Task] = {"embed", "token_embed"}
    if not body.model and any("embed" in each.engine.tasks for each in state_of(request).models):
        tasks = {"embed"}  # a model that embeds texts is preferred to one that embeds tokens
    model = find_model(request, body.model, tasks=tasks, api="Embeddings API")
    if body.late_chunking_params is not None:
        raise RequestError(
            "late_chunking_params is not served; embed the chunks as texts of their own", param="late_chunking_params"
        )
    task: Task = "embed" if "embed" in model.engine.tasks else "token_embed"
    params = body.vector_params(model.engine.spec)
    output: EmbeddingOutput | TokenEmbeddingOutput = await prompts.run(request, model, task, body, params)
    head = envelope(request, "embd", model, request_id=body.request_id)
    return await vector_response(
        output.embeddings,
        body.number_format,
        head,
        usage(output.usage.prompt_tokens),
        item="embedding",
        field="embedding",
    )
