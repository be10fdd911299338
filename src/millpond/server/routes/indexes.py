"""/v1/indexes: late-interaction indexes, searched by everyone with access, changed by clients with an API key."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request, Response

from millpond.late_interaction.documents import Hit
from millpond.late_interaction.index_arguments import SearchOptions, check_queries, checked_search
from millpond.outputs import TokenEmbeddingOutput
from millpond.params import PoolingParams
from millpond.server import openapi
from millpond.server.encoding import json_response
from millpond.server.errors import RequestError
from millpond.server.indexes import ServedIndex
from millpond.server.requests import bodies, calls
from millpond.server.requests.limits import check_count
from millpond.server.schemas.indexes import (
    AddAnswer,
    AddRequest,
    DeleteAnswer,
    DeleteRequest,
    ExplainAnswer,
    ExplainRequest,
    IndexList,
    SearchAnswer,
    SearchRequest,
)
from millpond.server.state import config_of, indexes_of, record_model
from millpond.vllm_dialect.model import Pending

router = APIRouter(prefix="/v1/indexes", tags=["Late-interaction indexes"])


@router.get("", response_model=IndexList)
async def list_indexes(request: Request) -> Response:
    """The indexes of this server."""
    infos = await asyncio.to_thread(lambda: [_info(served) for served in indexes_of(request)])
    return await json_response({"data": infos})


@router.post("/{name}/search", openapi_extra=openapi.operation(SearchRequest, answer=SearchAnswer))
async def search(request: Request, name: str) -> Response:
    """The documents whose token vectors match a query best (MaxSim), best first."""
    served = _find(request, name)
    body = await bodies.read(request, SearchRequest)
    queries = body.queries if body.queries is not None else [str(body.query)]
    check_count(len(queries), config_of(request).max_inputs, field="queries")
    options = SearchOptions(k=body.k, filter=body.filter, ids=body.ids, candidates=body.candidates, exact=body.exact)
    check_queries(queries)
    checked_search(**options)  # before anything is encoded
    results: list[list[dict[str, Any]]] = []
    if queries:
        output = await _encoded(request, served, queries)
        found = await asyncio.to_thread(served.index.search_embeddings, output.embeddings, **options)
        results = [[_hit(hit) for hit in hits] for hits in found]
    return await json_response(
        {"index": name, "model": served.model.name, "results": results if body.queries is not None else results[0]}
    )


@router.post("/{name}/add", openapi_extra=openapi.operation(AddRequest, answer=AddAnswer))
async def add(request: Request, name: str) -> Response:
    """Encode documents and add them; those of equal ids are replaced. The server must have an API key."""
    served = _find(request, name)
    _check_writable(request)
    body = await bodies.read(request, AddRequest)
    check_count(len(body.texts), config_of(request).max_inputs, field="texts")
    async with served.writing:
        report = await asyncio.to_thread(served.index.add, body.ids, body.texts, body.metadata)
    return await json_response({"index": name, **asdict(report)})


@router.post("/{name}/delete", openapi_extra=openapi.operation(DeleteRequest, answer=DeleteAnswer))
async def delete(request: Request, name: str) -> Response:
    """Delete documents by id or by metadata. The server must have an API key."""
    served = _find(request, name)
    _check_writable(request)
    body = await bodies.read(request, DeleteRequest, queued=False)
    async with served.writing:
        deleted = await asyncio.to_thread(served.index.delete, body.ids, filter=body.filter)
    return await json_response({"index": name, "deleted": deleted})


@router.post("/{name}/explain", openapi_extra=openapi.operation(ExplainRequest, answer=ExplainAnswer))
async def explain(request: Request, name: str) -> Response:
    """For each token of a query, the characters of a document that it matched, and the score."""
    served = _find(request, name)
    body = await bodies.read(request, ExplainRequest)
    document = await asyncio.to_thread(served.index.get, body.id)
    if document is None:
        raise RequestError(
            f"The index `{name}` has no document `{body.id[:128]}`.", status=404, type="NotFoundError", param="id"
        )
    matches = await asyncio.to_thread(served.index.explain, body.query, body.id)
    return await json_response(
        {
            "index": name,
            "id": document.id,
            "text": document.text,
            "score": sum(match.score for match in matches),
            "matches": [asdict(match) for match in matches],
        }
    )


def _find(request: Request, name: str) -> ServedIndex:
    served = indexes_of(request).find(name)
    record_model(request, served.model)
    return served


def _check_writable(request: Request) -> None:
    """Without a key everyone who reaches the server could change the index."""
    if not config_of(request).api_keys:
        raise RequestError(
            "This server has no API key, so its indexes cannot be changed over HTTP; start it with one "
            "(MILLPOND_API_KEY or --api-key)",
            status=403,
            type="PermissionDeniedError",
        )


async def _encoded(request: Request, served: ServedIndex, queries: Sequence[str]) -> TokenEmbeddingOutput:
    engine = served.model.engine

    def submit() -> Pending[TokenEmbeddingOutput]:
        future = engine.submit("token_embed", queries, PoolingParams(role="query", normalize=True))
        return Pending(future=future, finish=lambda output: output, finished=True, items=queries)

    return await calls.run(request, submit, model=served.model, texts=len(queries))


def _hit(hit: Hit) -> dict[str, Any]:
    return {"id": hit.id, "score": hit.score, "exact": hit.exact, "text": hit.text, "metadata": dict(hit.metadata)}


def _info(served: ServedIndex) -> dict[str, Any]:
    stats = served.index.stats()
    return {
        "name": served.name,
        "model": served.model.name,
        "documents": stats.documents,
        "tokens": stats.tokens,
        "width": stats.dimensions,
        "codec": stats.codec,
        "bytes": stats.bytes,
    }
