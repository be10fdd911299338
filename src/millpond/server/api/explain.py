"""/explain: for each token of a query, where in a text it finds its best match."""

from __future__ import annotations

from concurrent.futures import CancelledError, Future
from dataclasses import asdict, dataclass, replace
from typing import Annotated

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
from millpond.server.responses.encoding import json_response
from millpond.server.responses.response_fields import UsageInfo, usage
from millpond.server.served.models import ServedModel
from millpond.server.state import find_model
from millpond.support.blank import is_blank
from millpond.tasks import Role, Truncate
from millpond.values.outputs import TokenEmbeddingOutput, TokenSpans, Usage
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


@dataclass(frozen=True, kw_only=True)
class _Explained:
    """The matches of a query's tokens."""

    matches: list[TokenMatch]  # one for each token
    truncated: bool  # whether one of the texts was cut
    usage: Usage  # tokens of both texts


@router.post("/explain", openapi_extra=openapi.operation(TextExplainRequest, answer=TextExplainAnswer))
async def explain(request: Request) -> Response:
    """For each token of a query, the characters of a text that match it best, and the score. Needs no index."""
    body = await bodies.read(request, TextExplainRequest)
    model = find_model(request, body.model, tasks=["token_embed"], api="Explain API")
    for field, text in (("query", body.query), ("document", body.document)):
        if is_blank(text):
            raise RequestError(f"the {field} is blank; write a text with a visible character", param=field)
        check_length(text, model.max_model_len)
    explained: _Explained = await calls.run(request, lambda: _submit(body, model), model=model, texts=2)
    if (work := getattr(request.state, "work", None)) is not None:  # so far that of the document alone
        request.state.work = replace(work, tokens=explained.usage.prompt_tokens)
    return await json_response(
        {
            "model": model.name,
            "score": sum(match.score for match in explained.matches),
            "truncated": explained.truncated,
            "matches": [asdict(match) for match in explained.matches],
            "usage": usage(explained.usage.prompt_tokens),
        }
    )


def _submit(body: TextExplainRequest, model: ServedModel) -> Pending[_Explained]:
    """Queue both texts; they have different roles, so they are two calls."""
    engine = model.engine
    query_spans = _spans(engine, body, "query")
    document_spans = _spans(engine, body, "document")
    params = PoolingParams(normalize=True, truncate=body.truncate)
    query = engine.submit("token_embed", [body.query], replace(params, role="query"))
    try:
        document = engine.submit("token_embed", [body.document], replace(params, role="document"))
    except BaseException:
        query.cancel()
        raise
    document.add_done_callback(lambda done: query.cancel() if done.cancelled() else None)

    def finish(document_output: TokenEmbeddingOutput) -> _Explained:
        query_output = _result(query)
        matches = explanation.explain(
            query_spans, query_output.embeddings.flat, document_spans, document_output.embeddings.flat, body.document
        )
        outputs = (query_output, document_output)
        return _Explained(
            matches=matches,
            truncated=any(bool(output.truncated[0]) for output in outputs),
            usage=Usage(prompt_tokens=sum(output.usage.prompt_tokens for output in outputs)),
        )

    return Pending(future=document, finish=finish, items=[body.query, body.document])


def _result(query: Future[TokenEmbeddingOutput]) -> TokenEmbeddingOutput:
    """The query's output; it was queued before the document, which is done."""
    try:
        return query.result()
    except CancelledError:
        raise EngineClosedError("the engine was stopped before this request had its turn") from None


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
