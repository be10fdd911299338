"""``/v2/embed`` and ``/v1/embed``: vectors in Cohere's format."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Request, Response

from millpond.errors import InvalidDimensionsError
from millpond.outputs import EmbeddingOutput
from millpond.quantization import eight_bits, quantize
from millpond.server import encoding, openapi
from millpond.server.answers.envelope import cohere_meta, envelope
from millpond.server.errors import RequestError, dimensions_message
from millpond.server.requests import bodies, calls
from millpond.server.schemas.cohere import CohereEmbedAnswer, CohereEmbedRequest, EmbeddingType
from millpond.server.schemas.input_types import params_of
from millpond.server.state import find_model
from millpond.tasks import Task, Truncate
from millpond.vllm.prompts import Tokenization

router = APIRouter(tags=["Cohere"])

_TASKS: tuple[Task, ...] = ("embed",)
_DOCUMENTED = openapi.operation(CohereEmbedRequest, answer=CohereEmbedAnswer)


@router.post("/v2/embed", openapi_extra=_DOCUMENTED)
async def embed_v2(request: Request) -> Response:
    """A vector for each text, in each of the requested types."""
    body = await bodies.read(request, CohereEmbedRequest)
    return await _answer(request, body, body.embedding_types or ["float"], version="2")


@router.post("/v1/embed", openapi_extra=_DOCUMENTED)
async def embed_v1(request: Request) -> Response:
    """The same for Cohere's older clients; without ``embedding_types``, a plain list of vectors."""
    body = await bodies.read(request, CohereEmbedRequest)
    return await _answer(request, body, body.embedding_types or None, version="1")


async def _answer(
    request: Request, body: CohereEmbedRequest, types: list[EmbeddingType] | None, *, version: str
) -> Response:
    model = find_model(request, body.model, tasks=_TASKS, api="Embeddings API")
    texts = body.read_texts()
    if not texts:
        raise RequestError("You must pass at least one text; got an empty list", param="texts")
    try:
        model.engine.spec.check_dimensions(body.output_dimension)
    except InvalidDimensionsError as error:
        raise RequestError(dimensions_message(error, model.name), param="output_dimension") from error
    params = replace(params_of(body.input_type, model.engine.spec), dimensions=body.output_dimension)
    output: EmbeddingOutput = await calls.run_task(
        request, model, "embed", texts, params, _tokenization(body, model.max_model_len), field="texts"
    )
    rows, tokens = output.embeddings, output.usage.prompt_tokens
    vectors = rows if types is None else await asyncio.to_thread(_by_type, rows, types)
    return await encoding.json_response(
        {
            "id": envelope(request, "embd", model, request_id=body.request_id)["id"],
            "embeddings": vectors,
            "texts": texts,
            "meta": cohere_meta(version, tokens, input_tokens=tokens, image_tokens=0),
            "response_type": "embeddings_floats" if types is None else "embeddings_by_type",
        }
    )


def _tokenization(body: CohereEmbedRequest, max_model_len: int) -> Tokenization:
    limit = None if body.max_tokens is None else min(body.max_tokens, max_model_len)
    side: Truncate = "start" if body.truncate == "START" else "end"
    return Tokenization(truncate="error" if body.truncate == "NONE" else side, limit=limit, side=side)


def _by_type(rows: npt.NDArray[np.float32], types: list[EmbeddingType]) -> dict[EmbeddingType, Any]:
    return {name: _converted(rows, name) for name in dict.fromkeys(types)}


def _converted(rows: npt.NDArray[np.float32], name: EmbeddingType) -> Any:
    if name == "float":
        return rows
    if name == "base64":
        return [encoding.Base64(rows=row) for row in rows]
    if name == "int8" or name == "uint8":
        return eight_bits(rows, name)
    return quantize(rows, name)
