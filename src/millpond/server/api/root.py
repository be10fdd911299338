"""``POST /``: TEI's shortest route, which huggingface_hub's InferenceClient uses for a plain address."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from millpond.server.api.openai import rerank
from millpond.server.api.tei import embed, predict
from millpond.server.state import state_of

router = APIRouter(include_in_schema=False)

_BY_KIND = {"embedding": embed.embed_or_compare, "classifier": predict.predict, "reranker": rerank.rerank}


@router.post("/")
async def root(request: Request) -> Response:
    """The model's main task: vectors, classes or a ranking."""
    model = state_of(request).models.find(request.query_params.get("model"), tasks=(), api="Root API")
    if model.engine.tasks == {"sparse_embed"}:
        return await embed.embed_sparse(request)
    return await _BY_KIND[embed.model_kind(model)](request)
