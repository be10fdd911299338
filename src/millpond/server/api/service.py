"""Service routes: health, readiness, version, load, and the list of models."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from millpond.errors import UnknownModelError
from millpond.server.errors import RequestError
from millpond.server.served.models import ServedModel
from millpond.server.state import state_of


class Status(BaseModel):
    """The server works."""

    status: Literal["ok"] = "ok"


class Version(BaseModel):
    """The version of millpond."""

    version: str


class Load(BaseModel):
    """How busy the server is."""

    server_load: int = Field(description="Calls in progress, over all models.")


class ModelCard(BaseModel):
    """A model in the format of OpenAI and vLLM, and its capabilities."""

    model_config = ConfigDict(protected_namespaces=())

    id: str = Field(description="The name in requests.")
    object: Literal["model"] = "model"
    created: int = Field(description="Unix time of the load.")
    owned_by: str = "millpond"
    root: str = Field(description="Hub id or folder of the checkpoint.")
    parent: None = None
    max_model_len: int = Field(description="Most tokens per prompt.")
    tasks: list[str] = Field(description="The tasks that it serves.")
    dimensions: int | None = Field(None, description="Width of its vectors.")
    matryoshka: bool | None = Field(None, description="Whether vectors can be cut to fewer dimensions.")
    matryoshka_dimensions: list[int] | None = Field(
        None, description="The trained widths, if the checkpoint lists them."
    )
    labels: list[str] = Field(description="Names of its classes.")
    score_type: str | None = Field(
        None, description="How it scores a pair: cross-encoder, listwise, late-interaction or bi-encoder."
    )


class ModelList(BaseModel):
    """Every model."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class CacheStats(BaseModel):
    """A model's vector cache."""

    hits: int = Field(description="Texts found in the cache.")
    misses: int = Field(description="Texts not found in the cache.")


class ModelStats(BaseModel):
    """The activity of a model; throughput is over the last ten seconds."""

    name: str
    tasks: list[str]
    waiting_texts: int = Field(description="Texts of calls in progress, bounded by `max_queue`.")
    running_calls: int
    tokens_per_second: float
    texts_per_second: float
    batches: int = Field(description="Batches since the start.")
    cache: CacheStats | None = Field(description="null if the model has no cache.")


class Stats(BaseModel):
    """The activity of the server."""

    models: list[ModelStats]
    requests_per_second: float = Field(description="POST requests, over the last ten seconds.")
    uptime_seconds: float


router = APIRouter(tags=["The server"])

_FORMATS = {
    "description": "The text format, or OpenMetrics where the Accept header asks for it.",
    "content": {"text/plain": {"schema": {"type": "string"}}, "application/openmetrics-text": {}},
}


@router.get("/metrics", response_class=Response, responses={200: _FORMATS})
def metrics(request: Request) -> Response:
    """Metrics for Prometheus."""
    # Not a coroutine, so that it runs in a thread: with many routes and models it takes a while.
    content, content_type = state_of(request).metrics.text(request.headers.get("accept"))
    return Response(content, headers={"Content-Type": content_type})


@router.get("/stats")
async def stats(request: Request) -> Stats:
    """Queues, and the throughput of the last seconds."""
    return Stats.model_validate(state_of(request).metrics.stats())


async def health(request: Request) -> Response:
    """Whether the server works: after 503 an orchestrator should replace it.

    One lost device is enough for 503, since only a new process gets it back; the others serve until then.
    """
    state_of(request).models.check_health()
    return JSONResponse({"status": "ok"})


async def ready(request: Request) -> Response:
    """Whether to send new requests here: 503 from the start of the shutdown, or if a model has no device left."""
    if state_of(request).drain.begun:
        raise RequestError(
            "The server is about to stop", status=503, type="ServiceUnavailableError", headers={"Retry-After": "1"}
        )
    for model in state_of(request).models:
        model.engine.check_room(0)  # closed, or without a device
    return JSONResponse({"status": "ok"})


# SageMaker sends /ping; load balancers use HEAD.
for _path, _answer, _methods in (("/health", health, ["GET"]), ("/ready", ready, ["GET"]), ("/ping", health, ["GET"])):
    router.add_api_route(_path, _answer, methods=_methods, response_model=Status)
    router.add_api_route(_path, _answer, methods=["HEAD"], include_in_schema=False)
router.add_api_route("/ping", health, methods=["POST"], response_model=Status, name="ping")


@router.get("/version")
async def show_version() -> Version:
    """The version of millpond."""
    return Version(version=version("millpond"))


@router.get("/load")
async def load(request: Request) -> Load:
    """The number of calls in progress."""
    return Load(server_load=sum(model.engine.stats().running_calls for model in state_of(request).models))


@router.get("/v1/models")
async def list_models(request: Request) -> ModelList:
    """Every model, once for each of its names."""
    return ModelList(data=[_card(model, name) for model in state_of(request).models for name in model.names])


@router.get("/v1/models/{name:path}")
async def show_model(request: Request, name: str) -> ModelCard:
    """One model; its name may contain slashes."""
    for model in state_of(request).models:
        if name in model.names:
            return _card(model, name)
    raise UnknownModelError(f"The model `{name}` does not exist.")


def _card(model: ServedModel, name: str) -> ModelCard:
    spec = model.engine.spec
    embeds: dict[str, Any] = {}
    if spec.tasks & {"embed", "token_embed"}:
        embeds["dimensions"] = spec.dimensions if "embed" in spec.tasks else spec.hidden_size
        embeds["matryoshka"] = spec.matryoshka
        if spec.matryoshka_dimensions is not None:
            embeds["matryoshka_dimensions"] = list(spec.matryoshka_dimensions)
    return ModelCard(
        id=name,
        created=model.created,
        root=model.root,
        max_model_len=model.max_model_len,
        tasks=sorted(spec.tasks),
        labels=list(spec.labels),
        score_type=spec.score_type,
        **embeds,
    )
