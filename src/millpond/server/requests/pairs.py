"""Scoring: a request's pairs, sent to the model that it means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from fastapi import Request

from millpond.engine.composite.scoring import pair_up
from millpond.errors import InvalidRequestError
from millpond.outputs import ScoreOutput
from millpond.params import PoolingParams
from millpond.server.errors import NotServedError, RequestError
from millpond.server.models import ServedModel, ServedModels
from millpond.server.requests import calls
from millpond.server.requests.chat import check_trusted
from millpond.server.requests.limits import check_count
from millpond.server.schemas.score import PairRequest
from millpond.server.state import config_of
from millpond.tasks import Activation, ScoreType
from millpond.vllm_dialect.model import Pending
from millpond.vllm_dialect.prompts import Tokenization

# A server with a reranker may have an embedder beside it, which could score, too, and is not what a reranking means.
_PREFERENCE: tuple[tuple[ScoreType, ...], ...] = (("cross-encoder", "late-interaction"), ("bi-encoder",))


def scorer(models: ServedModels, name: str | None, *, api: str) -> ServedModel:
    """The model that a request means; without a name, the only reranker, or else the only embedder.

    Raises:
        UnknownModelError: No model of that name (404).
        NotServedError: It gives a pair no score, or none does (501).
        InvalidRequestError: No name, and several that would do (400).
    """
    if name:
        model = models.find(name, tasks=(), api=api)
        if model.engine.spec.score_type is None:
            raise NotServedError(f"The model does not support {api}")
        return model
    for kinds in _PREFERENCE:
        able = [model for model in models if model.engine.spec.score_type in kinds]
        if len(able) == 1:
            return able[0]
        if able:
            names = ", ".join(model.name for model in able)
            raise InvalidRequestError(f"several models serve the {api}; name one as model: {names}")
    raise NotServedError(f"The model does not support {api}")


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """How the pairs of one request are scored.

    Attributes:
        how: How they are tokenized.
        activation: What a cross-encoder makes of its logit; ``None`` is its habit. Other models have none.
        instruction: Fills an LLM reranker's template slot.
        query_tokens: Tokens of each query that are kept; 0 keeps all.
        document_tokens: The same, of each document.
        template: A score template in the place of the checkpoint's own.
    """

    how: Tokenization
    activation: bool | Activation | None = None
    instruction: str | None = None
    query_tokens: int = 0
    document_tokens: int = 0
    template: str | None = None

    @classmethod
    def of(cls, body: PairRequest, request: Request, model: ServedModel, *, cuts: bool = False) -> Self:
        """What a request in vLLM's or Cohere's shape asks for.

        Args:
            body: The request.
            request: Whose it is.
            model: The model that it means.
            cuts: As Cohere does, over-long pairs are cut, and longer limits than the model's are no mistake.

        Raises:
            RequestError: A limit or a template that cannot be used.
        """
        limit = model.max_model_len
        how = body.tokenization(limit)
        if not how.special_tokens:
            raise RequestError(
                "add_special_tokens=false would leave a pair's two texts undivided; leave it out",
                param="add_special_tokens",
            )
        if cuts and how.limit is None:
            how = how.cutting_to(limit)
        check_trusted(body.chat_template, config_of(request))
        return cls(
            how=how,
            activation=body.asked_activation,
            instruction=body.asked_instruction,
            query_tokens=_kept("max_tokens_per_query", body.max_tokens_per_query, limit, cuts=cuts),
            document_tokens=_kept("max_tokens_per_doc", body.max_tokens_per_doc or 0, limit, cuts=cuts),
            template=body.chat_template,
        )

    async def run(
        self, request: Request, model: ServedModel, queries: Sequence[str], documents: Sequence[str]
    ) -> ScoreOutput:
        """The score of each pair: one to one, one to many, or as many as there are.

        Raises:
            RequestError: A side is empty, or the numbers do not pair up.
        """
        if not queries:
            raise RequestError("At least one text element must be given")
        if not documents:
            raise RequestError("At least one text_pair element must be given")
        if len(queries) not in (1, len(documents)):
            raise RequestError("Input lengths must be either 1:1, 1:N or N:N")
        check_count(len(documents), request, field="documents")
        return await calls.run(
            request, lambda: self._submit(model, queries, documents), model=model, texts=len(documents)
        )

    def _submit(self, model: ServedModel, queries: Sequence[str], documents: Sequence[str]) -> Pending[ScoreOutput]:
        engine = model.engine
        if self.query_tokens:
            queries = engine.truncate_texts(queries, self.query_tokens)
        if self.document_tokens:
            documents = engine.truncate_texts(documents, self.document_tokens)

        activation = self.activation if engine.spec.score_type == "cross-encoder" else None
        params = PoolingParams(activation=activation, instruction=self.instruction)
        params = model.pooling.complete("score", params, self.how)
        return model.pooling.submit_score(pair_up(queries, documents), params, template=self.template)


def _kept(name: str, tokens: int, limit: int, *, cuts: bool) -> int:
    if tokens < 0:
        raise RequestError(f"{name} must be a non-negative integer", param=name)
    if tokens >= limit and not cuts:
        raise RequestError(f"{name} ({tokens}) must be less than max_model_len ({limit}).", param=name)
    return tokens
