"""``/v2/embed`` and ``/v1/embed``: vectors in Cohere's format."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from millpond.errors import InvalidDimensionsError, InvalidRequestError
from millpond.server.api import openapi
from millpond.server.errors import RequestError, dimensions_message
from millpond.server.requests import bodies, calls
from millpond.server.requests.fields import INT64, Priority, absent_if_null
from millpond.server.requests.vectors import input_type_params
from millpond.server.responses import encoding
from millpond.server.responses.response_fields import cohere_meta, envelope
from millpond.server.state import find_model
from millpond.tasks import Task, Truncate
from millpond.values.outputs import EmbeddingOutput
from millpond.vectors.quantization import eight_bits, quantize
from millpond.vllm.prompts import Tokenization, read_texts

EmbeddingType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]
Cut = Literal["NONE", "START", "END"]


class CohereEmbedRequest(BaseModel):
    """Texts to embed; unknown fields are ignored."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = Field(None, description="Optional if only one model embeds.")
    texts: list[str] | None = Field(None, description="Either texts or inputs.")
    inputs: list[dict[str, Any]] | None = Field(None, description="Objects with content: a list of text parts.")
    images: list[Any] | None = Field(None, description="Refused: the models embed texts only.")
    input_type: str | None = Field(
        None,
        description="search_query, search_document, classification or clustering, or the name of one of the "
        "checkpoint's prompts; without it no prompt is added.",
    )
    embedding_types: list[EmbeddingType] | None = Field(None, description="Default: float.")
    output_dimension: Annotated[int, Field(lt=INT64)] | None = Field(None, description="Matryoshka width.")
    truncate: Annotated[Cut, absent_if_null(Cut)] = Field(
        "END", description="Which end of an over-long text is cut; NONE refuses it."
    )
    max_tokens: Annotated[int, Field(ge=1, lt=INT64)] | None = Field(
        None, description="Most tokens of a text; the model's limit, if lower, counts."
    )
    priority: Annotated[Priority, absent_if_null(Priority)] = Field(
        0, description="Accepted and ignored; calls are scheduled fairly."
    )
    request_id: Annotated[str, Field(max_length=256)] | None = Field(
        None, description="Becomes part of the answer's id."
    )

    def read_texts(self) -> list[str]:
        """The texts."""
        if self.images:
            raise InvalidRequestError("images are not embedded here, only texts; pass texts")
        if (self.texts is None) is (self.inputs is None):
            raise InvalidRequestError("exactly one of texts and inputs must be given")
        if self.texts is not None:
            return self.texts
        for i, each in enumerate(self.inputs or ()):
            parts = each.get("content")
            kinds = [part.get("type") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
            if "image_url" in kinds or "image" in kinds:
                raise InvalidRequestError(f"inputs has an image at index {i}; only texts are embedded here")
        return read_texts(self.inputs, "inputs") if self.inputs else []


class CohereEmbedAnswer(BaseModel):
    """Vectors by type; from ``/v1/embed`` without embedding_types a list of vectors."""

    id: str
    embeddings: dict[EmbeddingType, list[Any]] | list[list[float]]
    texts: list[str]
    meta: dict[str, Any] = Field(description="api_version, billed_units and tokens.")
    response_type: Literal["embeddings_by_type", "embeddings_floats"]


router = APIRouter(tags=["Cohere"])

_TASKS: tuple[Task, ...] = ("embed",)
# Of one number in the response; eight of them are one in the binary types.
_BYTES: dict[EmbeddingType, float] = {
    "float": encoding.JSON_BYTES,
    "int8": 5,
    "uint8": 4,
    "binary": 5 / 8,
    "ubinary": 4 / 8,
    "base64": encoding.NumberFormat().bytes_per_number,
}
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
    params = replace(input_type_params(body.input_type, model.engine.spec), dimensions=body.output_dimension)
    output: EmbeddingOutput = await calls.run_task(
        request,
        model,
        "embed",
        texts,
        params,
        _tokenization(body, model.max_model_len),
        field="texts",
        bytes_per_number=_bytes_per_number(types),
    )
    rows, tokens = output.embeddings, output.usage.prompt_tokens
    vectors = (
        rows if types is None else await asyncio.to_thread(lambda: {name: _converted(rows, name) for name in types})
    )
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


def _bytes_per_number(types: list[EmbeddingType] | None) -> float:
    """Bytes of a number in the response, in all its types."""
    return _BYTES["float"] if types is None else sum(_BYTES[name] for name in types)


def _converted(rows: npt.NDArray[np.float32], name: EmbeddingType) -> Any:
    if name == "float":
        return rows
    if name == "base64":
        return [encoding.Base64(rows=row) for row in rows]
    if name == "int8" or name == "uint8":
        return eight_bits(rows, name)
    return quantize(rows, name)
