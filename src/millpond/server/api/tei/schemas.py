"""Requests and answers of Text Embeddings Inference (TEI)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from millpond.server.requests.fields import INT64
from millpond.server.requests.pairs import BUDGET, METHOD, BudgetMs
from millpond.tasks import ScoreMethod
from millpond.values.inputs import Item
from millpond.vllm.prompts import Tokenization, read_prompts


class TeiRequest(BaseModel):
    """The fields of every TEI request; unknown fields are ignored."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = Field(None, description="Not in TEI: names the model if several serve the task.")
    truncate: bool | None = Field(None, description="Whether to cut over-long texts; by default true.")
    truncation_direction: Annotated[
        Literal["left", "right"] | None,
        BeforeValidator(
            lambda value: value.lower() if isinstance(value, str) else value,
            json_schema_input_type=Literal["Left", "Right", "left", "right"] | None,
        ),
    ] = Field("right", description="Which end is cut: Left or Right.")

    def tokenization(self) -> Tokenization:
        """How the texts are tokenized."""
        return Tokenization.of({"truncation": self.truncate is not False, "truncation_side": self.truncation_direction})


Ids = list[Annotated[int, Field(ge=0, lt=INT64)]]


class TeiTexts(TeiRequest):
    """One or several texts, or their token ids."""

    inputs: str | Ids | list[str | Ids] = Field(description="A text, its token ids, or a list of either.")
    prompt_name: str | None = Field(None, description="Name of the checkpoint's prompt to put before each text.")

    def items(self) -> list[Item]:
        """The items for the engine."""
        return read_prompts(self.inputs)


class TeiEmbedRequest(TeiTexts):
    """Texts to embed."""

    normalize: bool | None = Field(None, description="Whether to L2-normalize the vectors; by default true.")
    dimensions: Annotated[int, Field(lt=INT64)] | None = Field(None, description="Matryoshka width.")


class TeiPredictRequest(TeiRequest):
    """Texts or pairs of texts to classify."""

    inputs: str | list[str] | list[list[str]] = Field(
        description="A text; a pair as a list of two texts; or a batch of lists of one or two texts."
    )
    raw_scores: bool | None = Field(False, description="Return logits.")
    parameters: PipelineParameters | None = Field(
        None, description="From huggingface_hub: with parameters the answer is always a list of lists."
    )


class PipelineParameters(BaseModel):
    """The parameters that huggingface_hub sends with a text to classify."""

    model_config = ConfigDict(extra="allow", strict=True)

    top_k: Annotated[int, Field(ge=1, lt=INT64)] | None = Field(
        None, description="Return only the most probable classes."
    )
    function_to_apply: Literal["sigmoid", "softmax", "none"] | None = Field(
        None, description="Replaces the checkpoint's own activation."
    )


class TeiRerankRequest(TeiRequest):
    """A query and texts to rank."""

    query: str
    texts: list[str] = Field(description="The texts; a body with this field is answered in TEI's format.")
    raw_scores: bool | None = Field(False, description="Return a cross-encoder's logits instead of their sigmoid.")
    return_text: bool | None = Field(False, description="Include the texts in the answer.")
    budget_ms: BudgetMs | None = Field(None, description=f"Not in TEI. {BUDGET}")
    method: ScoreMethod | None = Field(None, description=METHOD)


class Sentences(BaseModel):
    """A sentence, and other sentences to compare it with."""

    source_sentence: str
    sentences: list[str]


class SimilarityParameters(TeiRequest):
    """How the sentences are embedded."""

    prompt_name: str | None = None


class TeiSimilarityRequest(BaseModel):
    """One sentence compared with others."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    inputs: Sentences
    parameters: SimilarityParameters | None = None


class Prediction(BaseModel):
    """A class and its probability."""

    score: float
    label: str


class RankedText(BaseModel):
    """A text and its relevance to the query."""

    index: int
    score: float
    scored: bool | None = Field(None, description="With budget_ms: whether it was scored.")
    text: str | None = None
    method: Literal["cosine", "maxsim"] | None = Field(
        None, description="Not in TEI, which ranks by cross-encoders only: what the score of another model is."
    )


class SparseValue(BaseModel):
    """A token id and its weight."""

    index: int
    value: float


class Info(BaseModel):
    """TEI's description of the model and the server."""

    model_id: str
    model_sha: str | None
    model_dtype: str
    model_type: dict[str, Any]
    max_concurrent_requests: int
    max_input_length: int
    max_batch_tokens: int
    max_batch_requests: int | None
    max_client_batch_size: int
    auto_truncate: bool
    tokenization_workers: int
    version: str
    sha: str | None
    docker_label: str | None
    served_models: list[str]


TeiPredictRequest.model_rebuild()
