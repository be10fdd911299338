"""/explain: for each token of a query, where in a text it finds its best match."""

from __future__ import annotations

import asyncio
from concurrent.futures import CancelledError, Future
from dataclasses import asdict, replace
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from millpond.engine.engine import Engine
from millpond.errors import EngineClosedError, InputTooLongError
from millpond.late_interaction import TokenMatch
from millpond.late_interaction.scoring import explanation
from millpond.server.api import openapi
from millpond.server.api.indexes import Match
from millpond.server.errors import RequestError
from millpond.server.requests import bodies, calls
from millpond.server.requests.fields import absent_if_null, check_length
from millpond.server.requests.result_size import reserve_comparison
from millpond.server.responses.encoding import json_response
from millpond.server.responses.response_fields import UsageInfo, usage
from millpond.server.state import find_model
from millpond.support.blank import is_blank
from millpond.tasks import Role, Truncate
from millpond.values.outputs import TokenEmbeddingOutput, TokenSpans
from millpond.values.params import PoolingParams
from millpond.vllm.model import Pending


class TextExplainRequest(BaseModel):
    """A query and a text to find its tokens in."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = Field(None, description="Optional if only one model has token vectors.")
    query: str
    document: str
    truncate: Annotated[Truncate, absent_if_null(Truncate)] = Field(
        "error", description="Which end of a text that is too long is cut; error refuses it."
    )


class TextExplainAnswer(BaseModel):
    """A match for each token of the query; the scores add up to MaxSim."""

    model: str
    score: float = Field(description="MaxSim of the query and the document.")
    truncated: bool = Field(description="Whether the query or the document was cut.")
    matches: list[Match]
    usage: UsageInfo


router = APIRouter(tags=["Late-interaction indexes"])


@router.post("/explain", openapi_extra=openapi.operation(TextExplainRequest, answer=TextExplainAnswer))
async def explain(request: Request) -> Response:
    """For each token of a query, the characters of a text that match it best, and the score. Needs no index."""
    body = await bodies.read(request, TextExplainRequest)
    model = find_model(request, body.model, tasks=["token_embed"], api="Explain API")
    for field, text in (("query", body.query), ("document", body.document)):
        if is_blank(text):
            raise RequestError(f"the {field} is blank; write a text with a visible character", param=field)
        check_length(text, model.max_model_len)
    engine, params = model.engine, PoolingParams(normalize=True, truncate=body.truncate)
    queued: list[Any] = []  # the query, which has another role, and the spans of the document

    def submit() -> Pending[TokenEmbeddingOutput]:
        query_spans, document_spans = _spans(engine, body, "query"), _spans(engine, body, "document")
        reserve_comparison(request, model, len(query_spans), len(document_spans))
        query = engine.submit("token_embed", [body.query], replace(params, role="query"))
        try:
            document = engine.submit("token_embed", [body.document], replace(params, role="document"))
        except BaseException:
            query.cancel()
            raise
        document.add_done_callback(lambda done: query.cancel() if done.cancelled() else None)
        queued.extend(((query_spans, query), document_spans))
        items = [body.query, body.document]
        return Pending(future=document, finish=lambda output: output, finished=True, items=items)

    document = await calls.run(request, submit, model=model, texts=2)
    query, matches = await asyncio.to_thread(_matched, queued[0], queued[1], document, body.document)
    tokens = query.usage.prompt_tokens + document.usage.prompt_tokens
    request.state.work = replace(request.state.work, tokens=tokens)  # so far those of the document alone
    request.state.tokens = tokens
    return await json_response(
        {
            "model": model.name,
            "score": sum(match.score for match in matches),
            "truncated": bool(query.truncated[0] or document.truncated[0]),
            "matches": [asdict(match) for match in matches],
            "usage": usage(tokens),
        }
    )


def _matched(
    query: tuple[TokenSpans, Future[TokenEmbeddingOutput]],
    spans: TokenSpans,
    document: TokenEmbeddingOutput,
    text: str,
) -> tuple[TokenEmbeddingOutput, list[TokenMatch]]:
    """(the query's output, the matches); the query was queued before the document, which is done."""
    try:
        output = query[1].result()
    except CancelledError:
        raise EngineClosedError("the engine was stopped before this request had its turn") from None
    return output, explanation.explain(query[0], output.embeddings.flat, spans, document.embeddings.flat, text)


def _spans(engine: Engine, body: TextExplainRequest, role: Role) -> TokenSpans:
    text = body.query if role == "query" else body.document
    try:
        return engine.token_spans([text], role=role, truncate=body.truncate)[0]
    except InputTooLongError as error:
        if error.tokens is None:  # a prompt leaves no room: the text is not at fault
            raise
        raise RequestError(
            f"the {role} is too long: it has {'at least ' if error.at_least else ''}{error.tokens} tokens, and this "
            f'model reads {error.limit}; shorten it, or cut it with "truncate": "end"',
            param=role,
        ) from error
