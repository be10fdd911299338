"""Weaviate's containers: t2v-transformers and reranker-transformers, for ``millpond serve --protocol weaviate``.

Weaviate sends one text a request, and many requests at once: the engine puts them into one batch. Its requests have no
Content-Type, and fields of the answer in them, which are ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from millpond.server.api import openapi
from millpond.server.api.service import ready as check_ready
from millpond.server.requests import bodies, calls
from millpond.server.requests.fields import INT64, one_of
from millpond.server.requests.pairs import Scoring, find_scorer
from millpond.server.responses import encoding
from millpond.server.state import find_model, named_model, state_of
from millpond.tasks import Role, Task
from millpond.values.outputs import EmbeddingOutput
from millpond.values.params import PoolingParams
from millpond.vllm.prompts import Tokenization

_TASKS: tuple[Task, ...] = ("embed",)
_ROLES: dict[str, Role] = {"query": "query", "passage": "document"}
# The containers cut over-long texts.
_CUT = Tokenization(truncate="end", side="end")


class VectorsConfig(BaseModel):
    """How a text is embedded."""

    model_config = ConfigDict(extra="allow", strict=True)

    pooling_strategy: str | None = Field(None, description="Ignored: the checkpoint says how it pools.")
    task_type: Literal["query", "passage", ""] | None = Field(None, description="Adds the model's prompt for it.")
    dimensions: Annotated[int, Field(ge=1, lt=INT64)] | None = Field(None, description="Matryoshka width.")


class VectorsRequest(BaseModel):
    """A text, or several in the newer format."""

    model_config = ConfigDict(extra="allow", strict=True)

    text: str | None = Field(None, description="The text.")
    texts: list[str] | None = Field(None, description="Several texts, for a list of vectors.")
    config: VectorsConfig | None = None

    _check = one_of("text", "texts")


class Vector(BaseModel):
    """The vector of a text."""

    text: str
    vector: list[float]
    dim: int


class Vectors(BaseModel):
    """The vectors of several texts."""

    vectors: list[list[float]]
    dims: int


class WeaviateRerankRequest(BaseModel):
    """A query, and documents or one text to score."""

    model_config = ConfigDict(extra="allow", strict=True)

    query: str
    documents: list[str] | None = Field(None, description="The documents.")
    property: str | None = Field(None, description="One text; read if there are no documents.")


class DocumentScore(BaseModel):
    """A document and its score."""

    document: str
    score: float


class WeaviateScores(BaseModel):
    """The documents in the order of the request, or the score of ``property``."""

    query: str
    scores: list[DocumentScore] | None = None
    property: str | None = None
    score: float | None = None


router = APIRouter(tags=["Weaviate"])
_VECTORS = openapi.operation(VectorsRequest, answer=Vector | Vectors, failure=openapi.TextErrorAnswer)


@router.post("/vectors", openapi_extra=_VECTORS)
@router.post("/vectors/", openapi_extra=_VECTORS)
async def vectors(request: Request) -> Response:
    """The vector of a text, as the model makes it; of several texts a list."""
    body = await bodies.read(request, VectorsRequest, untyped=True)
    model = find_model(request, named_model(request, None), tasks=_TASKS, api="Vectors API")
    config = body.config or VectorsConfig.model_validate({})
    params = PoolingParams(role=_ROLES.get(config.task_type or ""), dimensions=config.dimensions)
    if body.texts == []:
        return await encoding.json_response({"vectors": [], "dims": config.dimensions or model.engine.spec.dimensions})
    texts = body.texts if body.texts is not None else [body.text or ""]
    output: EmbeddingOutput = await calls.run_task(
        request, model, "embed", texts, params, _CUT, field="text" if body.texts is None else "texts"
    )
    rows = output.embeddings
    if body.texts is not None:
        return await encoding.json_response({"vectors": rows, "dims": rows.shape[1]})
    return await encoding.json_response({"text": body.text, "vector": rows[0], "dim": rows.shape[1]})


@router.post(
    "/rerank",
    openapi_extra=openapi.operation(WeaviateRerankRequest, answer=WeaviateScores, failure=openapi.TextErrorAnswer),
)
async def rerank(request: Request) -> Response:
    """The score of each document, in the order of the request."""
    body = await bodies.read(request, WeaviateRerankRequest, untyped=True)
    model = find_scorer(request, named_model(request, None), api="Rerank API")
    if body.documents == []:
        return await encoding.json_response({"query": body.query, "scores": [], "property": None, "score": None})
    documents = [body.property or ""] if body.documents is None else body.documents
    output = await Scoring(tokenization=_CUT).run(request, model, [body.query], documents)
    answer: dict[str, Any] = {"query": body.query, "scores": None, "property": None, "score": None}
    if body.documents is None:
        answer.update(property=body.property, score=float(output.scores[0]))
    else:
        pairs = zip(documents, output.scores, strict=True)
        answer["scores"] = [{"document": document, "score": float(score)} for document, score in pairs]
    return await encoding.json_response(answer)


@router.get("/meta")
async def meta(request: Request) -> dict[str, Any]:
    """The model, for Weaviate's own description of its modules."""
    models = state_of(request).models
    model = (
        models.find(named_model(request, None), tasks=(), api="Meta API") if len(models) == 1 else next(iter(models))
    )
    spec = model.engine.spec
    return {
        "model_name": model.name,
        "model_type": spec.model_type,
        "architectures": [spec.architecture],
        "hidden_size": spec.hidden_size,
        "dim": spec.dimensions,
        "max_position_embeddings": spec.max_length,
    }


@router.get("/.well-known/live", status_code=204, response_class=Response)
@router.get("/.well-known/ready", status_code=204, response_class=Response)
async def ready(request: Request) -> Response:
    """Whether to send requests here."""
    await check_ready(request)
    return Response(status_code=204)
