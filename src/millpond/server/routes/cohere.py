"""``/v2/embed`` and ``/v1/embed``: vectors in Cohere's shape."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Request, Response

from millpond.outputs import EmbeddingOutput
from millpond.quantization import eight_bits, quantize
from millpond.server import encoding
from millpond.server.answers.billing import meta
from millpond.server.answers.envelope import envelope
from millpond.server.errors import RequestError
from millpond.server.models import ServedModel
from millpond.server.requests import bodies, calls, widths
from millpond.server.requests.limits import check_count
from millpond.server.schemas.cohere import CohereEmbedAnswer, CohereEmbedRequest, EmbeddingType
from millpond.server.schemas.input_types import purpose
from millpond.server.state import meant, models_of
from millpond.tasks import Task, Truncate
from millpond.vllm_dialect.model import Pending
from millpond.vllm_dialect.prompts import Tokenization

router = APIRouter(tags=["Cohere"])

_TASKS: tuple[Task, ...] = ("embed",)
_DOCUMENTED = bodies.documented(CohereEmbedRequest, answer=CohereEmbedAnswer)


@router.post("/v2/embed", openapi_extra=_DOCUMENTED)
async def embed_v2(request: Request) -> Response:
    """A vector for each text, in each of the types that are asked for."""
    body = await bodies.read(request, CohereEmbedRequest)
    return await _answer(request, body, body.embedding_types or ["float"], version="2")


@router.post("/v1/embed", openapi_extra=_DOCUMENTED)
async def embed_v1(request: Request) -> Response:
    """The same for Cohere's older clients; without ``embedding_types``, a bare list of vectors."""
    body = await bodies.read(request, CohereEmbedRequest)
    return await _answer(request, body, body.embedding_types or None, version="1")


async def _answer(
    request: Request, body: CohereEmbedRequest, types: list[EmbeddingType] | None, *, version: str
) -> Response:
    model = meant(request, models_of(request).find(body.model, tasks=_TASKS, api="Embeddings API"))
    texts = body.given()
    if not texts:
        raise RequestError("You must pass at least one text; got an empty list", param="texts")
    check_count(len(texts), request, field="texts")
    widths.check(body.output_dimension, model, field="output_dimension")
    output: EmbeddingOutput = await calls.run(
        request, lambda: _submit(model, body, texts), model=model, texts=len(texts)
    )
    rows, tokens = output.embeddings, output.usage.prompt_tokens
    vectors = rows if types is None else await asyncio.to_thread(_typed, rows, types)
    return await encoding.json_answer(
        {
            "id": envelope(request, "embd", model, wanted=body.request_id)["id"],
            "embeddings": vectors,
            "texts": texts,
            "meta": meta(version, tokens, input_tokens=tokens, image_tokens=0),
            "response_type": "embeddings_floats" if types is None else "embeddings_by_type",
        }
    )


def _submit(model: ServedModel, body: CohereEmbedRequest, texts: list[str]) -> Pending[EmbeddingOutput]:
    limit = None if body.max_tokens is None else min(body.max_tokens, model.max_model_len)
    side: Truncate = "start" if body.truncate == "START" else "end"
    how = Tokenization(truncate="error" if body.truncate == "NONE" else side, limit=limit, side=side)
    params = replace(purpose(body.input_type, model.engine.spec), dimensions=body.output_dimension)
    params = model.pooling.complete("embed", params, how)
    return model.pooling.submit("embed", texts, params)


def _typed(rows: npt.NDArray[np.float32], types: list[EmbeddingType]) -> dict[EmbeddingType, Any]:
    return {name: _as(rows, name) for name in dict.fromkeys(types)}


def _as(rows: npt.NDArray[np.float32], name: EmbeddingType) -> Any:
    if name == "float":
        return rows
    if name == "base64":
        return [encoding.Base64(rows=row) for row in rows]
    if name == "int8" or name == "uint8":
        return eight_bits(rows, name)
    return quantize(rows, name)
