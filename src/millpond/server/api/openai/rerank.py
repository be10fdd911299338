"""``/rerank``: documents ranked by relevance to a query, in the formats of four servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field, PlainValidator, TypeAdapter

from millpond.errors import InvalidRequestError
from millpond.server.api import openapi
from millpond.server.api.tei.schemas import RankedText, TeiRerankRequest
from millpond.server.requests import bodies
from millpond.server.requests.fields import INT64
from millpond.server.requests.pairs import BUDGET, BudgetMs, PairRequest, Scoring, Text, find_scorer
from millpond.server.responses import encoding
from millpond.server.responses.encoding import repeatable
from millpond.server.responses.response_fields import UsageInfo, cohere_meta, envelope, usage
from millpond.server.state import named_model
from millpond.tasks import ScoreMeasure, Stop
from millpond.values.outputs import RerankOutput
from millpond.vllm.prompts import read_texts


class RerankRequest(PairRequest):
    """A query and documents to rank."""

    query: Text = Field(description="A text, or an object with content.")
    documents: Text | list[Text] = Field(
        description="Texts, or objects with text, content, or the fields in rank_fields."
    )
    top_n: Annotated[int, Field(ge=0, lt=INT64)] | None = Field(
        None, description="Return only this many documents; 0 or absent: all."
    )
    return_documents: bool | None = Field(
        None, description="Whether the answer contains the documents; by default true."
    )
    rank_fields: list[str] | None = Field(
        None, description="Fields of document objects to read, in this order; by default text."
    )
    budget_ms: BudgetMs | None = Field(None, description=BUDGET)
    first_scores: list[float] | None = Field(
        None,
        description="With budget_ms: a number for each document, such as its score in a search; the documents are "
        "scored in the order of these, highest first.",
    )


class RankedDocument(BaseModel):
    """A document and its relevance to the query."""

    index: int = Field(description="Its index in the request.")
    relevance_score: float
    scored: bool | None = Field(None, description="With budget_ms: whether it was scored.")
    document: dict[str, Any] | None = Field(None, description="Its text as `text`, and its other fields.")


class RerankAnswer(BaseModel):
    """The documents, best first; ties in the order of the request."""

    id: str
    model: str
    usage: UsageInfo
    results: list[RankedDocument]
    method: ScoreMeasure = Field(description="What the scores are.")
    stopped: Stop | None = Field(None, description="With budget_ms: why no more documents were scored.")
    scored: int | None = Field(None, description="With budget_ms: how many documents were scored.")
    elapsed_ms: float | None = Field(None, description="With budget_ms: milliseconds since the request arrived.")
    meta: dict[str, Any] = Field(description="Cohere's api_version, billed_units and tokens.")


Document = str | Mapping[str, Any]


def _text_of(document: Document, index: int, fields: Sequence[str] | None) -> str:
    """The text of the document at ``index``."""
    if isinstance(document, str):
        return document
    if fields:
        values = [document[name] for name in fields if document.get(name) is not None]
        if not values:
            raise InvalidRequestError(f"the document at index {index} has none of rank_fields: {', '.join(fields)}")
        return "\n".join(value if isinstance(value, str) else str(value) for value in values)
    if isinstance(document.get("text"), str):
        return str(document["text"])
    try:
        return read_texts(document, "documents")[0]
    except InvalidRequestError:
        raise InvalidRequestError(
            f"the document at index {index} holds no text; pass a text, or an object with text, with content of text "
            "parts, or with the fields that rank_fields names"
        ) from None


def _echo(document: Document, text: str) -> dict[str, Any]:
    """The document for the response: its text and its other fields."""
    if isinstance(document, str):
        return {"text": text}
    content: dict[str, Any] = repeatable({**document, "text": document.get("text", text)})
    return content


router = APIRouter(tags=["Scores and rankings"])

_API = "Rerank (Score) API"


def _by_shape(body: Any) -> RerankRequest | TeiRerankRequest:
    tei = isinstance(body, dict) and "texts" in body and "documents" not in body
    return (TeiRerankRequest if tei else RerankRequest).model_validate(body)


# Not a pydantic union, so that errors refer to the matching format only.
AnyRerank = Annotated[
    RerankRequest | TeiRerankRequest, PlainValidator(_by_shape, json_schema_input_type=RerankRequest | TeiRerankRequest)
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
    texts = [_text_of(document, i, body.rank_fields) for i, document in enumerate(sent)]
    scoring = Scoring.of(body, request, model, truncate=version == "2")
    (query,), timed = read_texts(body.query, "query"), body.budget_ms is not None
    limits: dict[str, Any] = {"top_n": body.top_n or None, "budget_ms": body.budget_ms}
    output = await scoring.rank(request, model, query, texts, **limits, first_scores=body.first_scores)
    results = []
    for each, score in zip(output, _scores(output), strict=True):
        result: dict[str, Any] = {"index": each.index, "relevance_score": score}
        if timed:
            result["scored"] = each.scored
        if body.return_documents is not False:
            result["document"] = _echo(sent[each.index], each.document)
        results.append(result)
    head = envelope(request, "rerank", model, request_id=body.request_id)
    return await encoding.json_response(
        {
            "id": head["id"],
            "model": model.name,
            "usage": usage(output.usage.prompt_tokens),
            "results": results,
            "method": output.method,
            **(_progress(output) if timed else {}),
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
    )
    output = await scoring.rank(request, model, body.query, body.texts, top_n=None, budget_ms=body.budget_ms)
    ranked = []
    for each, score in zip(output, _scores(output), strict=True):
        result: dict[str, Any] = {"index": each.index, "score": score}
        if body.budget_ms is not None:
            result["scored"] = each.scored
        if output.method != "cross-encoder":  # the only kind that TEI ranks by
            result["method"] = output.method
        ranked.append({**result, "text": each.document} if body.return_text else result)
    return await encoding.json_response(ranked)


def _scores(output: RerankOutput) -> list[float]:
    """The score of each result. Clients need a number, in this order, also of documents that were not scored."""
    known = [each.relevance_score for each in output if each.scored]
    return known + [known[-1] if known else 0.0] * (len(output) - len(known))


def _progress(output: RerankOutput) -> dict[str, Any]:
    return {"stopped": output.stopped, "scored": int(output.scored.sum()), "elapsed_ms": output.elapsed_ms}
