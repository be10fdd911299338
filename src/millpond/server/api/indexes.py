"""/v1/indexes: late-interaction indexes, searched by everyone with access, changed by clients with an API key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import chain, islice
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from millpond.errors import InputTooLongError
from millpond.late_interaction.index.arguments import SearchOptions, check_queries, checked_search
from millpond.server.api import openapi
from millpond.server.errors import RequestError
from millpond.server.requests import bodies, calls
from millpond.server.requests.fields import absent_if_null, check_count, check_length, one_of
from millpond.server.requests.response_budget import response_budget_of
from millpond.server.requests.result_size import reserve_comparison, reserve_result
from millpond.server.responses.encoding import json_response, response_of, to_json
from millpond.server.served.indexes import ServedIndex
from millpond.server.state import record_model, state_of
from millpond.tasks import Truncate
from millpond.values.outputs import TokenEmbeddingOutput
from millpond.values.params import PoolingParams
from millpond.vectors.ragged import Ragged
from millpond.vllm.model import Pending

Count = Annotated[int, Field(ge=1, le=10_000)]
Candidates = Annotated[int, Field(ge=1, le=1_000_000)]
Id = Annotated[str, Field(min_length=1)]
_SCALAR = [{"type": kind} for kind in ("string", "number", "boolean")]
_BOUND = {"anyOf": [{"type": "number"}, {"type": "string", "description": "A date or time in ISO 8601."}]}
_RANGE = {
    "type": "object",
    "properties": dict.fromkeys(("gt", "gte", "lt", "lte"), _BOUND),
    "additionalProperties": False,
    "minProperties": 1,
}
_VALUES = {"type": "array", "items": {"anyOf": _SCALAR}, "minItems": 1}
# The index checks the conditions themselves.
Conditions = Annotated[
    dict[str, Any],
    WithJsonSchema({"type": "object", "additionalProperties": {"anyOf": [*_SCALAR, _VALUES, _RANGE]}}),
]
Cut = Literal["end", "error"]

_FILTER = (
    "For each metadata key a value, a list of which one must match, or a range of numbers or times, like "
    '`{"gte": 2020, "lt": 2024}`.'
)


class SearchRequest(BaseModel):
    """A query, or several."""

    model_config = ConfigDict(extra="forbid", strict=True)

    query: str | None = None
    queries: list[str] | None = Field(None, description="Several queries instead of one.")
    k: Count = Field(10, description="Most hits for each query.")
    filter: Conditions | None = Field(None, description=_FILTER)
    ids: list[Id] | None = Field(None, description="Search among these documents only.")
    candidates: Candidates | None = Field(None, description="Documents that the first stage keeps for exact scoring.")
    exact: bool = Field(False, description="Score every document, without a first stage.")
    truncate: Annotated[Truncate, absent_if_null(Truncate)] = Field(
        "auto", description="Which end of a query that is too long is cut (auto: the model's); error refuses it."
    )

    _check_forms = one_of("query", "queries")


class IndexHit(BaseModel):
    """A document that was found."""

    id: str
    score: float = Field(description="MaxSim.")
    exact: bool = Field(description="Whether the score was computed from stored rows, not from residual codes.")
    text: str
    metadata: dict[str, Any]


class SearchAnswer(BaseModel):
    """The hits, best first; for ``queries`` a list of them for each query."""

    index: str
    model: str
    results: list[IndexHit] | list[list[IndexHit]]
    truncated: bool | list[bool] = Field(description="Whether the query was cut; for ``queries``, of each.")


class AddRequest(BaseModel):
    """Documents to add; those of equal ids are replaced."""

    model_config = ConfigDict(extra="forbid", strict=True)

    ids: list[Id]
    texts: list[str]
    metadata: list[dict[str, Any] | None] | None = None


class AddAnswer(BaseModel):
    """What was added."""

    index: str
    added: int
    replaced: int
    blank: int = Field(description="Left out, since the text has no visible character.")
    truncated: int = Field(description="Cut, since the text is longer than the model reads.")


class DeleteRequest(BaseModel):
    """Documents to delete, by id or by metadata."""

    model_config = ConfigDict(extra="forbid", strict=True)

    ids: list[Id] | None = None
    filter: Conditions | None = Field(None, description=_FILTER)

    _check_forms = one_of("ids", "filter")


class DeleteAnswer(BaseModel):
    """How many documents were deleted."""

    index: str
    deleted: int


class ExplainRequest(BaseModel):
    """A query and a document of the index."""

    model_config = ConfigDict(extra="forbid", strict=True)

    query: str
    id: Id
    truncate: Annotated[Cut, absent_if_null(Cut)] = Field(
        "end", description="Whether the end of a query that is too long is cut; error refuses it."
    )


class Match(BaseModel):
    """The best match of one token of the query."""

    token: str
    score: float
    start: int = Field(description="First character of the match in the document's text.")
    end: int
    text: str


class ExplainAnswer(BaseModel):
    """A match for each token of the query; the scores add up to the document's."""

    index: str
    id: str
    text: str
    score: float
    truncated: bool = Field(description="Whether the query was cut.")
    matches: list[Match]


class IndexInfo(BaseModel):
    """One index; one that is damaged has a name and a state only."""

    name: str
    state: Literal["ready", "damaged"]
    model: str | None = None
    documents: int | None = None
    tokens: int | None = None
    width: int | None = None
    codec: str | None = None
    bytes: int | None = None


class IndexList(BaseModel):
    """The indexes of this server."""

    data: list[IndexInfo]


# Queries that are searched together, and hits that are in memory as Python objects, at most.
_QUERIES = 32
_HITS = 20_000
# Bytes of a hit in the response without its text and metadata, at least; and of its text for each of its tokens, about.
_HIT_BYTES = 60
_TOKEN_BYTES = 6
_FEWER = "send fewer queries, or ask for fewer hits (k)"

router = APIRouter(prefix="/v1/indexes", tags=["Late-interaction indexes"])


@router.get("", response_model=IndexList)
async def list_indexes(request: Request) -> Response:
    """The indexes of this server."""
    indexes = state_of(request).indexes
    infos = [await _info(served) for served in indexes]
    return await json_response({"data": [*infos, *({"name": name, "state": "damaged"} for name in indexes.damaged)]})


@router.post("/{name}/search", openapi_extra=openapi.operation(SearchRequest, answer=SearchAnswer))
async def search(request: Request, name: str) -> Response:
    """The documents whose token vectors match a query best (MaxSim), best first."""
    served = _find(request, name)
    body = await bodies.read(request, SearchRequest)
    queries = body.queries if body.queries is not None else [str(body.query)]
    check_count(request, len(queries), field="queries")
    options = SearchOptions(k=body.k, filter=body.filter, ids=body.ids, candidates=body.candidates, exact=body.exact)
    check_queries(queries)
    checked_search(**options)  # before anything is encoded
    results: list[bytes] = []
    truncated: list[bool] = []
    if queries:
        engine = served.model.engine
        memory = await _memory_of_hits(request, served, len(queries), body.k)

        def submit() -> Pending[TokenEmbeddingOutput]:
            params = PoolingParams(role="query", normalize=True, truncate=body.truncate)
            reserve_result(request, served.model, "token_embed", queries, params, bytes_per_number=0, more=memory)
            future = engine.submit("token_embed", queries, params)
            return Pending(future=future, finish=lambda output: output, finished=True, items=queries)

        output = await calls.run(request, submit, model=served.model, texts=len(queries))
        results = await _found(request, served, output.embeddings, options)
        truncated = output.truncated.tolist()
    several = body.queries is not None
    head = {"index": name, "model": served.model.name, "truncated": truncated if several else truncated[0]}
    parts = [to_json(head)[:-1], b',"results":', *_listed(results, several=several), b"}"]
    return response_of(parts, "application/json")


@router.post("/{name}/add", openapi_extra=openapi.operation(AddRequest, answer=AddAnswer))
async def add(request: Request, name: str) -> Response:
    """Encode documents and add them; those of equal ids are replaced. The server must have an API key."""
    served = _find(request, name)
    _check_writable(request)
    body = await bodies.read(request, AddRequest)
    check_count(request, len(body.texts), field="texts")
    async with served.writing:
        report = await served.run(lambda: served.index.add(body.ids, body.texts, body.metadata))
    return await json_response({"index": name, **asdict(report)})


@router.post("/{name}/delete", openapi_extra=openapi.operation(DeleteRequest, answer=DeleteAnswer))
async def delete(request: Request, name: str) -> Response:
    """Delete documents by id or by metadata. The server must have an API key."""
    served = _find(request, name)
    _check_writable(request)
    body = await bodies.read(request, DeleteRequest, queued=False)
    async with served.writing:
        deleted = await served.run(lambda: served.index.delete(body.ids, filter=body.filter))
    return await json_response({"index": name, "deleted": deleted})


@router.post("/{name}/explain", openapi_extra=openapi.operation(ExplainRequest, answer=ExplainAnswer))
async def explain(request: Request, name: str) -> Response:
    """For each token of a query, the characters of a document that it matched, and the score."""
    served = _find(request, name)
    body = await bodies.read(request, ExplainRequest)
    document = await served.run(lambda: served.index.get(body.id))
    if document is None:
        raise RequestError(
            f"The index `{name}` has no document `{body.id[:128]}`.", status=404, type="NotFoundError", param="id"
        )
    check_queries([body.query])
    truncated = await calls.prepared(request, partial(_is_cut, request, served, body, document.text))
    matches = await served.run(lambda: served.index.explain(body.query, body.id))
    return await json_response(
        {
            "index": name,
            "id": document.id,
            "text": document.text,
            "score": sum(match.score for match in matches),
            "truncated": truncated,
            "matches": [asdict(match) for match in matches],
        }
    )


async def _memory_of_hits(request: Request, served: ServedIndex, queries: int, k: int) -> int:
    """Bytes that the hits of a search may take; one whose hits are too large even without their texts is refused."""
    stats = await served.run(served.index.stats)
    hits = queries * min(k, stats.documents)
    budget = response_budget_of(request)
    budget.check(_HIT_BYTES * hits, _FEWER, param="k")
    text = _TOKEN_BYTES * stats.tokens // max(1, stats.documents)
    return min(budget.largest, (_HIT_BYTES + text) * hits)


async def _found(request: Request, served: ServedIndex, queries: Ragged, options: SearchOptions) -> list[bytes]:
    """The hits of each query, searched and written some queries at a time, as long as the response is not too large."""
    step = max(1, min(_QUERIES, _HITS // options["k"]))
    results: list[bytes] = []
    size = 0
    for start in range(0, len(queries), step):
        some = Ragged.from_matrices(queries[start : start + step], width=queries.flat.shape[1])
        results += await served.run(partial(_hits, served, some, options))
        size += sum(map(len, results[start:]))
        response_budget_of(request).check(size, _FEWER, param="k")
    return results


def _listed(results: Sequence[bytes], *, several: bool) -> Iterator[bytes]:
    """The parts of a list of lists; a single list if there are not ``several``."""
    if not several:
        return iter(results)
    divided = (part for each in results for part in (b",", each))
    return chain((b"[",), islice(divided, 1, None), (b"]",))


def _hits(served: ServedIndex, queries: Ragged, options: SearchOptions) -> list[bytes]:
    found = served.index.search_embeddings(queries, **options)
    return [to_json([asdict(hit) for hit in hits]) for hits in found]


def _find(request: Request, name: str) -> ServedIndex:
    served = state_of(request).indexes.find(name)
    record_model(request, served.model)
    return served


def _check_writable(request: Request) -> None:
    """Without a key everyone who reaches the server could change the index."""
    if not state_of(request).config.api_keys:
        raise RequestError(
            "This server has no API key, so its indexes cannot be changed over HTTP; start it with one "
            "(MILLPOND_API_KEY or --api-key)",
            status=403,
            type="PermissionDeniedError",
        )


def _is_cut(request: Request, served: ServedIndex, body: ExplainRequest, document: str) -> bool:
    """Whether the query is longer than the model reads, which ``truncate`` may refuse; reserves the result's room."""
    model = served.model
    check_length(body.query, model.max_model_len)
    (of_document,) = model.engine.token_spans([document], role="document")
    cut = False
    try:
        (of_query,) = model.engine.token_spans([body.query], role="query", truncate="error")
    except InputTooLongError:
        if body.truncate == "error":
            raise
        (of_query,) = model.engine.token_spans([body.query], role="query")
        cut = True
    reserve_comparison(request, model, len(of_query), len(of_document))
    return cut


async def _info(served: ServedIndex) -> dict[str, Any]:
    try:
        stats = await served.run(served.index.stats)
    except RequestError:  # it is damaged, and the others are listed
        return {"name": served.name, "state": "damaged", "model": served.model.name}
    return {
        "name": served.name,
        "state": "ready",
        "model": served.model.name,
        "documents": stats.documents,
        "tokens": stats.tokens,
        "width": stats.dimensions,
        "codec": stats.codec,
        "bytes": stats.bytes,
    }
