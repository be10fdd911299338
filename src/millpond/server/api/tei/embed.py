"""The routes of Text Embeddings Inference (TEI); their responses are plain lists."""

from __future__ import annotations

import asyncio
from importlib.metadata import version
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import PlainValidator, TypeAdapter

from millpond.server.api import openapi
from millpond.server.api.tei.schemas import (
    Info,
    SimilarityParameters,
    SparseValue,
    TeiEmbedRequest,
    TeiSimilarityRequest,
    TeiTexts,
)
from millpond.server.errors import RequestError
from millpond.server.requests import bodies, calls
from millpond.server.requests.response_budget import response_budget_of
from millpond.server.responses import encoding
from millpond.server.served.models import ServedModel
from millpond.server.state import find_model, named_model, state_of
from millpond.tasks import Task
from millpond.values.inputs import Item, TokenIds
from millpond.values.outputs import EmbeddingOutput, SparseEmbeddingOutput, TokenEmbeddingOutput
from millpond.values.params import PoolingParams
from millpond.vllm.prompts import Tokenization

router = APIRouter(tags=["TEI"])


def _by_shape(body: Any) -> TeiEmbedRequest | TeiSimilarityRequest:
    compares = isinstance(body, dict) and isinstance(body.get("inputs"), dict)
    return (TeiSimilarityRequest if compares else TeiEmbedRequest).model_validate(body)


_EITHER: TypeAdapter[TeiEmbedRequest | TeiSimilarityRequest] = TypeAdapter(
    Annotated[TeiEmbedRequest | TeiSimilarityRequest, PlainValidator(_by_shape)]
)
_WEIGHT_BYTES = 40  # of a weight in the response: a token id and a number, with their names
_API: dict[Task, str] = {"embed": "Embed API", "token_embed": "Embed All API", "sparse_embed": "Embed Sparse API"}


@router.post("/embed", openapi_extra=openapi.operation(TeiEmbedRequest, answer=list[list[float]]))
async def embed(request: Request) -> Response:
    """A vector for each text, L2-normalized unless ``normalize`` is false."""
    return await _embedding_response(request, await bodies.read(request, TeiEmbedRequest))


async def embed_or_compare(request: Request) -> Response:
    """:func:`embed`, or :func:`similarity` if the body has that format."""
    body = await bodies.read(request, _EITHER)
    if isinstance(body, TeiSimilarityRequest):
        return await _similarity_response(request, body)
    return await _embedding_response(request, body)


async def _embedding_response(request: Request, body: TeiEmbedRequest) -> Response:
    model = _model(request, body.model, "embed")
    params = PoolingParams(
        normalize=body.normalize is not False, dimensions=body.dimensions, prompt_name=body.prompt_name
    )
    output: EmbeddingOutput = await _run(request, model, "embed", body.items(), params, body.tokenization())
    return await encoding.json_response(output.embeddings)


@router.post("/embed_all", openapi_extra=openapi.operation(TeiTexts, answer=list[list[list[float]]]))
async def embed_all(request: Request) -> Response:
    """A matrix for each text, with a row for each token; normalized for ColBERT only."""
    body = await bodies.read(request, TeiTexts)
    model = _model(request, body.model, "token_embed")
    late = model.engine.spec.score_type == "late-interaction"
    params = PoolingParams(normalize=None if late else False, prompt_name=body.prompt_name)
    output: TokenEmbeddingOutput = await _run(request, model, "token_embed", body.items(), params, body.tokenization())
    return await encoding.json_response(list(output.embeddings))


@router.post("/embed_sparse", openapi_extra=openapi.operation(TeiTexts, answer=list[list[SparseValue]]))
async def embed_sparse(request: Request) -> Response:
    """The vocabulary weights of each text, without the zeros."""
    body = await bodies.read(request, TeiTexts)
    model = _model(request, body.model, "sparse_embed")
    output: SparseEmbeddingOutput = await _run(
        request, model, "sparse_embed", body.items(), PoolingParams(prompt_name=body.prompt_name), body.tokenization()
    )

    # Only now it is known how many weights are not zero.
    size = _WEIGHT_BYTES * sum(map(len, output))
    way_out = "send fewer texts"
    response_budget_of(request).reserve(request.scope, size=size, memory=2 * size, way_out=way_out, param="inputs")

    def parts() -> list[encoding.Json]:
        return [
            encoding.Json(encoding.to_json([{"index": token, "value": each[token]} for token in sorted(each)]))
            for each in output
        ]

    return await encoding.json_response(await asyncio.to_thread(parts))


@router.post("/similarity", openapi_extra=openapi.operation(TeiSimilarityRequest, answer=list[float]))
async def similarity(request: Request) -> Response:
    """The cosine similarity of one sentence to each of the others."""
    return await _similarity_response(request, await bodies.read(request, TeiSimilarityRequest))


async def _similarity_response(request: Request, body: TeiSimilarityRequest) -> Response:
    model = _model(request, body.model, "embed")
    options = body.parameters or SimilarityParameters.model_validate({})
    sentences = body.inputs.sentences
    if not sentences:
        raise RequestError("sentences is an empty list; pass at least one", param="inputs")
    params = PoolingParams(normalize=True, prompt_name=options.prompt_name)
    texts: list[Item] = [
        *sentences,
        body.inputs.source_sentence,
    ]  # so that the index in an error is that of the sentence
    output: EmbeddingOutput = await _run(request, model, "embed", texts, params, options.tokenization())
    return await encoding.json_response(output.embeddings[:-1] @ output.embeddings[-1])


@router.get("/info", response_model=Info)
async def info(request: Request, model: str | None = None) -> Info:
    """The served model in TEI's format; with several models the first, unless ``model`` names another."""
    models = state_of(request).models
    served = models.find(model, tasks=(), api="Info API") if model else next(iter(models))
    engine = served.engine
    return Info(
        model_id=served.name,
        model_sha=engine.config.revision,
        model_dtype=str(engine.dtype).removeprefix("torch."),
        model_type=_model_type(served),
        max_concurrent_requests=engine.config.max_queue,
        max_input_length=served.max_model_len,
        max_batch_tokens=engine.max_batch_tokens,
        max_batch_requests=None,
        max_client_batch_size=state_of(request).config.max_inputs,
        auto_truncate=True,
        tokenization_workers=1,
        version=version("millpond"),
        sha=None,
        docker_label=None,
        served_models=[name for each in models for name in each.names],
    )


def _model(request: Request, name: str | None, task: Task) -> ServedModel:
    return find_model(request, named_model(request, name), tasks=(task,), api=_API[task])


async def _run(
    request: Request,
    model: ServedModel,
    task: Task,
    items: list[Item],
    params: PoolingParams,
    tokenization: Tokenization,
) -> Any:
    ids = next((i for i, item in enumerate(items) if isinstance(item, TokenIds)), None)
    if params.prompt_name is not None and ids is not None:
        raise RequestError(
            f"a prompt stands before texts, and inputs has token ids at index {ids}; put the prompt there yourself",
            param="prompt_name",
        )
    return await calls.run_task(request, model, task, items, params, tokenization, field="inputs")


def model_kind(model: ServedModel) -> Literal["reranker", "classifier", "embedding"]:
    """Which of TEI's three kinds of model this is."""
    spec = model.engine.spec
    if spec.score_type in ("cross-encoder", "listwise"):
        return "reranker"
    return "classifier" if "classify" in spec.tasks else "embedding"


def _model_type(model: ServedModel) -> dict[str, Any]:
    spec = model.engine.spec
    if model_kind(model) == "embedding":
        return {"embedding": {"pooling": "splade" if "embed" not in spec.tasks else "+".join(spec.pooling)}}
    return {
        model_kind(model): {
            "id2label": {str(i): label for i, label in enumerate(spec.labels)},
            "label2id": {label: i for i, label in enumerate(spec.labels)},
        }
    }
