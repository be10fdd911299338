"""Service routes: health, readiness, version, load, and the list of models."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from millpond.errors import EngineClosedError, UnknownModelError
from millpond.server.errors import RequestError
from millpond.server.models import ServedModel
from millpond.server.schemas.service import Load, ModelCard, ModelList, Status, Version
from millpond.server.state import drain_of, models_of

router = APIRouter(tags=["The server"])


async def health(request: Request) -> Response:
    """Whether the server works: after 503 an orchestrator should replace it.

    One lost device is enough for 503, since only a new process gets it back; the others serve until then.
    """
    for model in models_of(request):
        if model.engine.closed:
            raise EngineClosedError(f"the engine of {model.name} was closed")
        for error in model.engine.lost_devices:
            raise error
    return JSONResponse({"status": "ok"})


async def ready(request: Request) -> Response:
    """Whether to send new requests here: 503 from the start of the shutdown, or if a model has no device left."""
    if drain_of(request).begun:
        raise RequestError(
            "The server is about to stop", status=503, type="ServiceUnavailableError", headers={"Retry-After": "1"}
        )
    for model in models_of(request):
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
    return Load(server_load=sum(model.engine.stats().running_calls for model in models_of(request)))


@router.get("/v1/models")
async def list_models(request: Request) -> ModelList:
    """Every model, once for each of its names."""
    return ModelList(data=[_card(model, name) for model in models_of(request) for name in model.names])


@router.get("/v1/models/{name:path}")
async def show_model(request: Request, name: str) -> ModelCard:
    """One model; its name may contain slashes."""
    for model in models_of(request):
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
