"""Requests and answers of ``/v2/embed`` and ``/v1/embed``, in Cohere's format."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from millpond.errors import InvalidRequestError
from millpond.server.schemas.absent import absent_if_null
from millpond.server.schemas.request import INT64, Priority
from millpond.vllm.prompts import read_texts

EmbeddingType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]
Cut = Literal["NONE", "START", "END"]


class CohereEmbedRequest(BaseModel):
    """Texts to embed; unknown fields are ignored."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = Field(None, description="Optional if only one model embeds.")
    texts: list[str] | None = Field(None, description="Either texts or inputs.")
    inputs: list[dict[str, Any]] | None = Field(None, description="Objects with content: a list of text parts.")
    images: list[Any] | None = Field(None, description="Refused: the models embed texts only.")
    input_type: str | None = Field(
        None,
        description="search_query, search_document, classification or clustering, or the name of one of the "
        "checkpoint's prompts; without it no prompt is added.",
    )
    embedding_types: list[EmbeddingType] | None = Field(None, description="Default: float.")
    output_dimension: Annotated[int, Field(lt=INT64)] | None = Field(None, description="Matryoshka width.")
    truncate: Annotated[Cut, absent_if_null(Cut)] = Field(
        "END", description="Which end of an over-long text is cut; NONE refuses it."
    )
    max_tokens: Annotated[int, Field(ge=1, lt=INT64)] | None = Field(
        None, description="Most tokens of a text; the model's limit, if lower, counts."
    )
    priority: Annotated[Priority, absent_if_null(Priority)] = Field(
        0, description="Accepted and ignored; calls are scheduled fairly."
    )
    request_id: Annotated[str, Field(max_length=256)] | None = Field(
        None, description="Becomes part of the answer's id."
    )

    def read_texts(self) -> list[str]:
        """The texts.

        Raises:
            InvalidRequestError: Not exactly one of texts and inputs, or an input that is not text.
        """
        if self.images:
            raise InvalidRequestError("images are not embedded here, only texts; pass texts")
        if (self.texts is None) is (self.inputs is None):
            raise InvalidRequestError("exactly one of texts and inputs must be given")
        if self.texts is not None:
            return self.texts
        for i, each in enumerate(self.inputs or ()):
            parts = each.get("content")
            kinds = [part.get("type") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
            if "image_url" in kinds or "image" in kinds:
                raise InvalidRequestError(f"inputs has an image at index {i}; only texts are embedded here")
        return read_texts(self.inputs, "inputs") if self.inputs else []


class CohereEmbedAnswer(BaseModel):
    """Vectors by type; from ``/v1/embed`` without embedding_types a list of vectors."""

    id: str
    embeddings: dict[EmbeddingType, list[Any]] | list[list[float]]
    texts: list[str]
    meta: dict[str, Any] = Field(description="api_version, billed_units and tokens.")
    response_type: Literal["embeddings_by_type", "embeddings_floats"]
