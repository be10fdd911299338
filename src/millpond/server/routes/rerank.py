"""``/rerank``: documents ranked by relevance to a query, in the formats of four servers."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import PlainValidator, TypeAdapter

from millpond.outputs import RerankOutput, ScoreOutput
from millpond.server import encoding, openapi
from millpond.server.answers.envelope import cohere_meta, envelope, usage
from millpond.server.requests import bodies, documents
from millpond.server.requests.pairs import Scoring, find_scorer
from millpond.server.schemas.rerank import RerankAnswer, RerankRequest
from millpond.server.schemas.tei import RankedText, TeiRerankRequest
from millpond.server.state import named_model
from millpond.vllm.prompts import read_texts

router = APIRouter(tags=["Scores and rankings"])

_API = "Rerank (Score) API"


def _by_shape(body: Any) -> RerankRequest | TeiRerankRequest:
    tei = isinstance(body, dict) and "texts" in body and "documents" not in body
    return (TeiRerankRequest if tei else RerankRequest).model_validate(body)


# Not a pydantic union, so that errors refer to the matching format only.
AnyRerank = Annotated[
    RerankRequest | TeiRerankRequest,
    PlainValidator(_by_shape, json_schema_input_type=RerankRequest | TeiRerankRequest),
]
_ANY: TypeAdapter[RerankRequest | TeiRerankRequest] = TypeAdapter(AnyRerank)
_DOCUMENTED = openapi.operation(AnyRerank, answer=RerankAnswer | list[RankedText])


@router.post("/rerank", openapi_extra=_DOCUMENTED)
@router.post("/v1/rerank", openapi_extra=_DOCUMENTED)
async def rerank(request: Request) -> Response:
    """Rank documents. A body with ``texts`` instead of ``documents`` is TEI's, and the answer is a plain list."""
    return await _ranking(request, version="1")


@router.post("/v2/rerank", openapi_extra=_DOCUMENTED)
async def rerank_v2(request: Request) -> Response:
    """The same in Cohere's way: over-long documents are cut at their end."""
    return await _ranking(request, version="2")


async def _ranking(request: Request, *, version: str) -> Response:
    body = await bodies.read(request, _ANY)
    if isinstance(body, TeiRerankRequest):
        return await _tei(request, body)
    return await _cohere(request, body, version=version)


async def _cohere(request: Request, body: RerankRequest, *, version: str) -> Response:
    model = find_scorer(request, body.model, api=_API)
    sent = body.documents if isinstance(body.documents, list) else [body.documents]
    texts = [documents.text_of(document, i, body.rank_fields) for i, document in enumerate(sent)]
    scoring = Scoring.of(body, request, model, truncate=version == "2", ranking=True)
    output = await scoring.run(request, model, read_texts(body.query, "query"), texts)
    results = []
    for each in _ranked(output, texts, body.top_n):
        result: dict[str, Any] = {"index": each.index, "relevance_score": each.relevance_score}
        if body.return_documents is not False:
            result["document"] = documents.echo(sent[each.index], each.document)
        results.append(result)
    head = envelope(request, "rerank", model, request_id=body.request_id)
    return await encoding.json_response(
        {
            "id": head["id"],
            "model": model.name,
            "usage": usage(output.usage.prompt_tokens),
            "results": results,
            "meta": cohere_meta(version, output.usage.prompt_tokens, search_units=1),
        }
    )


async def _tei(request: Request, body: TeiRerankRequest) -> Response:
    model = find_scorer(request, named_model(request, body.model), api=_API)
    # TEI's scores are sigmoids, even if the checkpoint's default differs.
    scoring = Scoring(
        tokenization=body.tokenization(),
        activation=False if body.raw_scores else "sigmoid",
        method=body.method or "auto",
        ranking=True,
    )
    output = await scoring.run(request, model, [body.query], body.texts)
    ranked = []
    for each in _ranked(output, body.texts, None):
        result: dict[str, Any] = {"index": each.index, "score": each.relevance_score}
        ranked.append({**result, "text": each.document} if body.return_text else result)
    return await encoding.json_response(ranked)


def _ranked(output: ScoreOutput, texts: list[str], top_n: int | None) -> RerankOutput:
    return RerankOutput.ranked(
        output.scores, texts, top_n=top_n or None, truncated=output.truncated, usage=output.usage
    )
