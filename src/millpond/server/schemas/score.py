"""Requests and answers of ``/score``, in vLLM's format."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from millpond.errors import InvalidRequestError
from millpond.server.schemas.absent import absent_if_null
from millpond.server.schemas.request import PoolingRequest
from millpond.server.schemas.usage import UsageInfo
from millpond.tasks import ScoreMethod
from millpond.vllm.arguments import one_value

# A text, or {"content": a text or a list of text parts}.
Text = str | dict[str, Any]
Side = Text | list[Text]
METHOD = (
    "How a pair is scored: `cosine` of two vectors, `maxsim` of token vectors, or `auto` (the default): what the model "
    "is; an embedder scores by cosine and reranks by MaxSim."
)
_SPELLINGS = (("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2"))


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

    @property
    def reranker_instruction(self) -> str | None:
        """The instruction, from its own field or from chat_template_kwargs."""
        other = (self.chat_template_kwargs or {}).get("instruction")
        return other if self.instruction is None and isinstance(other, str) else self.instruction

    @property
    def cross_encoder_activation(self) -> bool | None:
        """Whether to activate logits; ``None``: the checkpoint's default.

        Raises:
            InvalidRequestError: The three fields contradict each other.
        """
        switch: bool | None = one_value(
            {"use_activation": self.use_activation, "activation": self.activation, "softmax": self.softmax}
        )
        return switch


class ScoreRequest(PairRequest):
    """Pairs under any of four names: one to one, one to many, or n to n."""

    queries: Side | None = Field(None, description="One query, or one for each document.")
    documents: Side | None = Field(None, description="Paired with queries.")
    items: Side | None = Field(None, description="Paired with queries.")
    data_1: Side | None = Field(None, description="One text, or one for each of data_2.")
    data_2: Side | None = Field(None, description="Paired with data_1.")
    text_1: Side | None = Field(None, description="One text, or one for each of text_2.")
    text_2: Side | None = Field(None, description="Paired with text_1.")

    def sides(self) -> tuple[tuple[str, Side], tuple[str, Side]]:
        """The two sides of the pairs, each with its name.

        Raises:
            InvalidRequestError: A side is missing.
        """
        for first, second in _SPELLINGS:
            left, right = getattr(self, first), getattr(self, second)
            if left is not None and right is not None:
                return (first, left), (second, right)
        spelled = ", ".join(f"{first} and {second}" for first, second in _SPELLINGS)
        raise InvalidRequestError(f"the pairs have two sides, and one is missing; pass any of {spelled}")


class Score(BaseModel):
    """The score of one pair."""

    index: int
    object: Literal["score"]
    score: float


class ScoreAnswer(BaseModel):
    """A score for each pair, in the order of the request."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: UsageInfo
