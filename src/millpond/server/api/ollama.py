"""Ollama's API: vectors and the list of models for the many programs that know how to ask Ollama.

Models are loaded when the server starts and stay, so that ``keep_alive`` and most ``options`` mean nothing here; the
context length ``num_ctx`` cuts texts as in Ollama. Requests for generated text, and to pull or create models, are 404.
"""

from __future__ import annotations

import hashlib
import re
import time
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from millpond.server.api import openapi
from millpond.server.errors import RequestError
from millpond.server.requests import bodies, calls
from millpond.server.requests.fields import INT64
from millpond.server.responses import encoding
from millpond.server.served.models import ServedModel
from millpond.server.state import find_model, state_of
from millpond.tasks import Task
from millpond.values.outputs import EmbeddingOutput
from millpond.values.params import PoolingParams
from millpond.vllm.prompts import Tokenization

# Clients compare it with the version that brought what they send; this one brought ``dimensions``, the youngest field.
_VERSION = "0.11.11"
_LATEST = ":latest"  # the tag of a name without one
_DURATION = re.compile(r"[-+]?(0|((\d+\.?\d*|\.\d+)(ns|us|µs|μs|ms|s|m|h))+)", re.ASCII)
_TASKS: tuple[Task, ...] = ("embed",)


def _duration(value: Any) -> Any:
    if isinstance(value, str) and not _DURATION.fullmatch(value):
        raise ValueError(f'invalid duration {value[:40]!r}; pass seconds, or a text such as "5m"')
    return value


KeepAlive = Annotated[float | int | str | None, AfterValidator(_duration)]


def _texts(value: Any) -> Any:
    """The texts of ``input``; an empty text alone is none, as in Ollama."""
    if value is None or value == "":
        return []
    return [value] if isinstance(value, str) else value


Texts = Annotated[list[str], BeforeValidator(_texts, json_schema_input_type=str | list[str] | None)]


class OllamaRequest(BaseModel):
    """The fields of every request for vectors; unknown fields are ignored."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = Field(None, description="Optional if only one model embeds; a tag :latest may be left out.")
    keep_alive: KeepAlive = Field(None, description="Checked and ignored: models stay loaded.")
    options: dict[str, Any] | None = Field(None, description="`num_ctx` cuts texts; the others are ignored.")


class OllamaEmbedRequest(OllamaRequest):
    """Texts to embed."""

    input: Texts = Field([], description="A text, or a list of texts.")
    truncate: bool | None = Field(None, description="Whether to cut over-long texts; by default true.")
    dimensions: Annotated[int, Field(ge=0, lt=INT64)] | None = Field(None, description="Matryoshka width.")


class OllamaEmbeddingsRequest(OllamaRequest):
    """One text, in the older format."""

    prompt: str | None = Field(None, description="The text.")


class OllamaShowRequest(BaseModel):
    """The name of a model."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = Field(None, description="A model's name.")
    name: str | None = Field(None, description="Older name of the field.")


class OllamaEmbeddings(BaseModel):
    """The vectors, L2-normalized, in the order of the request."""

    model: str
    embeddings: list[list[float]]
    total_duration: int = Field(description="Nanoseconds.")
    load_duration: int = Field(description="Nanoseconds: 0, models are loaded when the server starts.")
    prompt_eval_count: int = Field(description="Tokens.")


class OllamaEmbedding(BaseModel):
    """The vector, as it was pooled: not normalized."""

    embedding: list[float]


class OllamaVersion(BaseModel):
    """The version of Ollama whose API is spoken."""

    version: str


class OllamaDetails(BaseModel):
    """What kind of model it is."""

    parent_model: str = ""
    format: str
    family: str
    families: list[str]
    parameter_size: str = ""
    quantization_level: str


class OllamaModel(BaseModel):
    """A model that embeds."""

    name: str
    model: str
    modified_at: str = Field(description="When it was loaded.")
    size: int = Field(0, description="Not known: 0.")
    digest: str = Field(description="A hash of the checkpoint's name and its options.")
    details: OllamaDetails


class OllamaModels(BaseModel):
    """Every model that embeds."""

    models: list[OllamaModel]


class OllamaRunningModel(OllamaModel):
    """A model in memory."""

    expires_at: str = Field(description="Far away: models stay loaded.")
    size_vram: int = 0
    context_length: int


class OllamaRunningModels(BaseModel):
    """Every model in memory."""

    models: list[OllamaRunningModel]


class OllamaDescription(BaseModel):
    """What a model is."""

    model_config = ConfigDict(protected_namespaces=())

    modelfile: str = ""
    parameters: str = ""
    template: str = ""
    details: OllamaDetails
    model_info: dict[str, Any] = Field(description="`ARCHITECTURE.embedding_length` is the width of a vector.")
    capabilities: list[str]
    modified_at: str


router = APIRouter(tags=["Ollama"])


@router.post(
    "/api/embed",
    openapi_extra=openapi.operation(OllamaEmbedRequest, answer=OllamaEmbeddings, failure=openapi.TextErrorAnswer),
)
async def embed(request: Request) -> Response:
    """An L2-normalized vector for each text."""
    start = time.perf_counter_ns()
    body = await bodies.read(request, OllamaEmbedRequest)
    model = _find(request, body.model)
    vectors, tokens = await _vectors(
        request,
        model,
        body,
        body.input,
        PoolingParams(normalize=True, dimensions=body.dimensions or None),
        truncate=body.truncate is not False,
    )
    return await encoding.json_response(
        {
            "model": body.model or model.name,
            "embeddings": vectors,
            "total_duration": time.perf_counter_ns() - start,
            "load_duration": 0,
            "prompt_eval_count": tokens,
        }
    )


@router.post(
    "/api/embeddings",
    openapi_extra=openapi.operation(OllamaEmbeddingsRequest, answer=OllamaEmbedding, failure=openapi.TextErrorAnswer),
)
async def embeddings(request: Request) -> Response:
    """The vector of one text, not normalized; for Ollama's older clients."""
    body = await bodies.read(request, OllamaEmbeddingsRequest)
    model = _find(request, body.model)
    texts = [body.prompt] if body.prompt else []
    rows, _ = await _vectors(request, model, body, texts, PoolingParams(normalize=False), truncate=True)
    return await encoding.json_response({"embedding": rows[0] if texts else []})


@router.post(
    "/api/show",
    openapi_extra=openapi.operation(OllamaShowRequest, answer=OllamaDescription, failure=openapi.TextErrorAnswer),
)
async def show(request: Request) -> Response:
    """What a model is: its architecture, the width of its vectors, its context length."""
    body = await bodies.read(request, OllamaShowRequest, queued=False)
    name = body.model or body.name
    if not name:
        raise RequestError("model is required", param="model")
    model = _find(request, name)
    spec, family = model.engine.spec, model.engine.spec.model_type
    return await encoding.json_response(
        OllamaDescription(
            details=_details(model),
            model_info={
                "general.architecture": family,
                f"{family}.embedding_length": spec.default_dimensions or spec.dimensions,
                f"{family}.context_length": spec.max_length,
            },
            capabilities=["embedding"],
            modified_at=_time(model.created),
        ).model_dump()
    )


@router.get("/api/tags")
async def tags(request: Request) -> OllamaModels:
    """Every model that embeds, once for each of its names."""
    return OllamaModels(models=[OllamaModel(**_entry(model, name)) for model, name in _named(request)])


@router.get("/api/ps")
async def running(request: Request) -> OllamaRunningModels:
    """The same: every model is loaded, and stays."""
    never = _time(0xFFFFFFFF)
    return OllamaRunningModels(
        models=[
            OllamaRunningModel(**_entry(model, name), expires_at=never, context_length=model.max_model_len)
            for model, name in _named(request)
        ]
    )


@router.get("/api/version")
async def show_version() -> OllamaVersion:
    """The version of Ollama whose API is spoken; millpond's own is at `/version`."""
    return OllamaVersion(version=_VERSION)


def _find(request: Request, name: str | None) -> ServedModel:
    """The model of that name, with or without the tag ``:latest``."""
    names = {each for model in state_of(request).models for each in model.names}
    chosen = next((each for each in (name, _untagged(name), f"{name}{_LATEST}") if not each or each in names), ...)
    if chosen is ...:
        raise RequestError(f'model "{name}" not found, try pulling it first', status=404, type="NotFoundError")
    return find_model(request, chosen, tasks=_TASKS, api="Embeddings API")


def _untagged(name: str | None) -> str | None:
    return name.removesuffix(_LATEST) if name else name


async def _vectors(
    request: Request,
    model: ServedModel,
    body: OllamaRequest,
    texts: list[str],
    params: PoolingParams,
    *,
    truncate: bool,
) -> tuple[Any, int]:
    """(a vector for each text, the number of tokens)."""
    if not texts:
        return [], 0
    limit = (body.options or {}).get("num_ctx")
    if limit is not None and (type(limit) is not int or limit < 1):
        raise RequestError(f"num_ctx={str(limit)[:40]} must be a whole number of tokens above 0", param="options")
    tokenization = Tokenization(
        truncate="end" if truncate else "error",
        limit=None if limit is None else min(limit, model.max_model_len),
        side="end",
        refuses=not truncate,
    )
    output: EmbeddingOutput = await calls.run_task(request, model, "embed", texts, params, tokenization, field="input")
    return output.embeddings, output.usage.prompt_tokens


def _named(request: Request) -> list[tuple[ServedModel, str]]:
    """The models that embed, by each of their names with its tag."""
    return [
        (model, name if ":" in name.rpartition("/")[2] else f"{name}{_LATEST}")
        for model in state_of(request).models
        if model.engine.tasks & frozenset(_TASKS)
        for name in model.names
    ]


def _entry(model: ServedModel, name: str) -> dict[str, Any]:
    return {
        "name": name,
        "model": name,
        "modified_at": _time(model.created),
        "digest": hashlib.sha256(f"{model.root} {dict(model.engine.spec.settings)}".encode()).hexdigest(),
        "details": _details(model),
    }


def _details(model: ServedModel) -> OllamaDetails:
    family = model.engine.spec.model_type
    return OllamaDetails(
        format="safetensors", family=family, families=[family], quantization_level=str(model.engine.dtype)
    )


def _time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
