"""Pairs: the queries and documents of a request, scored by its model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Self

from fastapi import Request
from pydantic import Field

from millpond.engine.composite.scoring import pair_up
from millpond.engine.composite.timed_ranking import TimeBudget
from millpond.engine.engine import submission_of
from millpond.engine.timed_rerank import timed_ranking
from millpond.errors import EngineOverloadedError
from millpond.server.errors import RequestError
from millpond.server.requests import calls
from millpond.server.requests.chat import check_trusted
from millpond.server.requests.fields import PoolingRequest, absent_if_null, check_count
from millpond.server.requests.result_size import reserve_result
from millpond.server.served.models import ServedModel, only
from millpond.server.state import record_model, state_of
from millpond.tasks import Activation, ScoreMethod, ScoreType
from millpond.values.inputs import Pair
from millpond.values.outputs import RerankOutput, ScoreOutput
from millpond.values.params import PoolingParams
from millpond.vllm.arguments import one_value
from millpond.vllm.model import Pending
from millpond.vllm.prompts import Tokenization

# A text, or {"content": a text or a list of text parts}.
Text = str | dict[str, Any]
Side = Text | list[Text]
METHOD = (
    "How a pair is scored: `cosine` of two vectors, `maxsim` of token vectors, or `auto` (the default): what the model "
    "is, which is the cosine for an embedder, and MaxSim for a late-interaction model."
)

BUDGET = (
    "Answer within so many milliseconds of the request's arrival: documents are scored in the given order, until the "
    "best ones can no longer change or the time is over. Those that were not scored follow with `scored` false and the "
    "lowest score of the others (0 without any)."
)
BudgetMs = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class PairRequest(PoolingRequest):
    """The fields of every request that scores pairs."""

    max_tokens_per_query: Annotated[int, absent_if_null(int)] = Field(
        0, description="Keep this many tokens of each query; 0 keeps all."
    )
    max_tokens_per_doc: int | None = Field(None, description="Keep this many tokens of each document; 0 keeps all.")
    instruction: str | None = Field(None, description="Fills the slot in an LLM reranker's template.")
    use_activation: bool | None = Field(
        None, description="Whether to apply the activation to a cross-encoder's logit; ignored by other models."
    )
    activation: bool | None = Field(None, description="Older name of use_activation.")
    softmax: bool | None = Field(None, description="Oldest name of use_activation.")
    chat_template: str | None = Field(
        None, description="A score template that replaces the model's own, if the server accepts one."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Only `instruction` is read.")
    method: ScoreMethod | None = Field(None, description=METHOD)


# An embedder can score pairs too, but if there is a reranker, a rerank request means that one.
_PREFERENCE: tuple[tuple[ScoreType, ...], ...] = (("cross-encoder", "listwise", "late-interaction"), ("bi-encoder",))


def find_scorer(request: Request, name: str | None, *, api: str) -> ServedModel:
    """The model that scores the request's pairs; without a name, the only reranker, or else the only embedder."""
    models = state_of(request).models
    candidates = [models.find(name, tasks=(), api=api)] if name else list(models)
    by_kind = ([each for each in candidates if each.engine.spec.score_type in kinds] for kinds in _PREFERENCE)
    return record_model(request, only(next(filter(None, by_kind), []), api))


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """How the pairs of one request are scored."""

    tokenization: Tokenization
    activation: bool | Activation | None = None  # of a cross-encoder's logit; None is the checkpoint's default
    instruction: str | None = None  # fills the slot in an LLM reranker's template
    query_tokens: int = 0  # cut each query to this many tokens; 0 keeps all
    document_tokens: int = 0  # the same for each document
    template: str | None = None  # a score template that replaces the checkpoint's own
    method: ScoreMethod = "auto"  # as of millpond.Engine.score, also to rank: clients have thresholds for cosines

    @classmethod
    def of(cls, body: PairRequest, request: Request, model: ServedModel, *, truncate: bool = False) -> Self:
        """The options of a request in vLLM's or Cohere's format."""
        limit = model.max_model_len
        tokenization = body.tokenization(limit)
        if not tokenization.special_tokens:
            raise RequestError(
                "add_special_tokens=false would leave a pair's two texts undivided; leave it out",
                param="add_special_tokens",
            )
        if truncate and tokenization.limit is None:
            tokenization = tokenization.cutting_to(limit)
        check_trusted(body.chat_template, state_of(request).config)
        other = (body.chat_template_kwargs or {}).get("instruction")
        return cls(
            tokenization=tokenization,
            activation=one_value({name: getattr(body, name) for name in ("use_activation", "activation", "softmax")}),
            instruction=other if body.instruction is None and isinstance(other, str) else body.instruction,
            query_tokens=_cut_length("max_tokens_per_query", body.max_tokens_per_query, limit, truncate=truncate),
            document_tokens=_cut_length("max_tokens_per_doc", body.max_tokens_per_doc or 0, limit, truncate=truncate),
            template=body.chat_template,
            method=body.method or "auto",
        )

    async def run(
        self, request: Request, model: ServedModel, queries: Sequence[str], documents: Sequence[str]
    ) -> ScoreOutput:
        """The score of each pair: one to one, one to many, or n to n."""
        if not queries:
            raise RequestError("At least one text element must be given")
        if not documents:
            raise RequestError("At least one text_pair element must be given")
        if len(queries) not in (1, len(documents)):
            raise RequestError("Input lengths must be either 1:1, 1:N or N:N")
        check_count(request, len(documents), field="documents")
        return await calls.run(
            request, lambda: self._submit(request, model, queries, documents), model=model, texts=len(documents)
        )

    async def rank(
        self,
        request: Request,
        model: ServedModel,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None,
        budget_ms: float | None = None,
        first_scores: Sequence[float] | None = None,
    ) -> RerankOutput:
        """The ranking, within a budget that began when the request arrived if there is one."""
        if not documents:
            raise RequestError("At least one text_pair element must be given")
        check_count(request, len(documents), field="documents")
        count, begun = len(documents), calls.arrived(request)
        budget = TimeBudget.of(budget_ms, documents=count, top_n=top_n, first_scores=first_scores, begun=begun)
        if budget is None:
            scored = await self.run(request, model, [query], documents)
            return RerankOutput.ranked(
                scored.scores,
                documents,
                top_n=top_n,
                method=scored.method,
                truncated=scored.truncated,
                usage=scored.usage,
            )
        request.state.texts = count
        pairs = [Pair(query, document) for document in documents]
        method: ScoreMethod = self.method
        if method == "auto" and model.engine.spec.score_type == "bi-encoder":
            method = "cosine"  # as submit_score
        submission = submission_of(model.engine)
        ranking = timed_ranking(submission, pairs, self._params(model), method, budget)
        while ranking.goes_on():
            turn = submission.turns.ask()
            try:
                async with asyncio.timeout(ranking.left()):
                    await asyncio.wrap_future(turn)
                    if part := ranking.next_part(waiting=submission.turns.waiting):
                        texts = [documents[index] for index in part]
                        submit = partial(self._submit, request, model, [query], texts, part)
                        ranking.took(await calls.run(request, submit, model=model, texts=len(part)))
            except TimeoutError:
                ranking.cut_off()
            except EngineOverloadedError:
                if not ranking.begun:
                    raise
                ranking.cut_off()
            finally:
                submission.turns.leave(turn)
        request.state.texts = count
        return ranking.output()

    def _params(self, model: ServedModel) -> PoolingParams:
        activation = self.activation if model.engine.spec.score_type == "cross-encoder" else None
        params = PoolingParams(activation=activation, instruction=self.instruction)
        return model.pooling.complete("score", params, self.tokenization)

    def _submit(
        self,
        request: Request,
        model: ServedModel,
        queries: Sequence[str],
        documents: Sequence[str],
        indices: Sequence[int] | None = None,  # of the documents in the request, if they are some of them
    ) -> Pending[ScoreOutput]:
        engine = model.engine
        if self.query_tokens:
            queries = engine.truncate_texts(queries, self.query_tokens)
        if self.document_tokens:
            documents = engine.truncate_texts(documents, self.document_tokens)

        params = self._params(model)
        late = self.method == "maxsim" or (self.method == "auto" and engine.spec.score_type == "late-interaction")
        if late and len(queries) > 1 and "token_embed" in engine.tasks:
            # The token rows of queries are kept until their documents were computed.
            rows = replace(params, task=None, activation=None, instruction=None, role="query")
            reserve_result(request, model, "token_embed", queries, rows, bytes_per_number=0)
        return model.pooling.submit_score(
            pair_up(queries, documents), params, template=self.template, method=self.method, indices=indices
        )


def _cut_length(name: str, tokens: int, limit: int, *, truncate: bool) -> int:
    if tokens < 0:
        raise RequestError(f"{name} must be a non-negative integer", param=name)
    if tokens >= limit and not truncate:
        raise RequestError(f"{name} ({tokens}) must be less than max_model_len ({limit}).", param=name)
    return tokens
