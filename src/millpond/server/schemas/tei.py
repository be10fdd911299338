"""Requests and answers of Text Embeddings Inference's own routes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from millpond.inputs import Item
from millpond.server.schemas.request import INT64
from millpond.vllm_dialect.prompts import Tokenization, read_prompts


def _lowered(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


class TeiRequest(BaseModel):
    """What every request of TEI's may have; unknown fields are let through."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = Field(None, description="Not of TEI: which model, where several serve the task.")
    truncate: bool | None = Field(None, description="Whether over-long texts are cut; they are, unless this is false.")
    truncation_direction: Annotated[
        Literal["left", "right"] | None,
        BeforeValidator(_lowered, json_schema_input_type=Literal["Left", "Right", "left", "right"] | None),
    ] = Field("right", description="The end that is cut: Left or Right.")

    def tokenization(self) -> Tokenization:
        """How the texts are to be tokenized."""
        return Tokenization.of({"truncation": self.truncate is not False, "truncation_side": self.truncation_direction})


Ids = list[Annotated[int, Field(ge=0, lt=INT64)]]


class TeiTexts(TeiRequest):
    """Texts, or the token ids of texts; one or several."""

    inputs: str | Ids | list[str | Ids] = Field(description="A text, its token ids, or a list of either.")
    prompt_name: str | None = Field(None, description="The prompt of the checkpoint that is put before each text.")

    def items(self) -> list[Item]:
        """What the engine is to read.

        Raises:
            InvalidRequestError: There is none.
        """
        return read_prompts(self.inputs)


class TeiEmbedRequest(TeiTexts):
    """Texts to embed."""

    normalize: bool | None = Field(None, description="L2-normalize the vectors; they are, unless this is false.")
    dimensions: Annotated[int, Field(lt=INT64)] | None = Field(None, description="Matryoshka width.")


class TeiPredictRequest(TeiRequest):
    """Texts or pairs of texts to classify."""

    inputs: str | list[str] | list[list[str]] = Field(
        description="A text; a pair as two texts; or a batch, each of its members a list of one or two texts."
    )
    raw_scores: bool | None = Field(False, description="Give logits.")
    parameters: PipelineParameters | None = Field(
        None, description="huggingface_hub's: with these, the answer is always a list of lists."
    )


class PipelineParameters(BaseModel):
    """What huggingface_hub sends beside a text to classify."""

    model_config = ConfigDict(extra="allow", strict=True)

    top_k: Annotated[int, Field(ge=1, lt=INT64)] | None = Field(None, description="The likeliest classes only.")
    function_to_apply: Literal["sigmoid", "softmax", "none"] | None = Field(
        None, description="In the place of the checkpoint's own activation."
    )


class TeiRerankRequest(TeiRequest):
    """A query and texts that may answer it."""

    query: str
    texts: list[str] = Field(description="The texts; /rerank answers in TEI's shape where the body has this field.")
    raw_scores: bool | None = Field(False, description="Give a cross-encoder's logits, not their sigmoid.")
    return_text: bool | None = Field(False, description="Repeat the texts.")


class Sentences(BaseModel):
    """A sentence, and others to compare it with."""

    source_sentence: str
    sentences: list[str]


class SimilarityParameters(TeiRequest):
    """How the sentences are embedded."""

    prompt_name: str | None = None


class TeiSimilarityRequest(BaseModel):
    """One sentence against others."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    inputs: Sentences
    parameters: SimilarityParameters | None = None


class Prediction(BaseModel):
    """A class, and how likely it is."""

    score: float
    label: str


class RankedText(BaseModel):
    """A text and how well it answers the query."""

    index: int
    score: float
    text: str | None = None


class SparseValue(BaseModel):
    """A token id, and its weight."""

    index: int
    value: float


class Info(BaseModel):
    """What TEI tells of the model and the server."""

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
