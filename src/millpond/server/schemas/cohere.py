"""Requests and answers of ``/v2/embed`` and ``/v1/embed``, in Cohere's shape."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from millpond.errors import InvalidRequestError
from millpond.server.schemas.absent import absent_if_null
from millpond.server.schemas.request import INT64, Priority
from millpond.vllm_dialect.prompts import read_texts

EmbeddingType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]
Cut = Literal["NONE", "START", "END"]


class CohereEmbedRequest(BaseModel):
    """Texts to embed; unknown fields are let through."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = Field(None, description="May be left out where one model embeds.")
    texts: list[str] | None = Field(None, description="Either these, or inputs.")
    inputs: list[dict[str, Any]] | None = Field(None, description="Objects with content: a list of text parts.")
    images: list[Any] | None = Field(None, description="Refused: the models here read texts.")
    input_type: str | None = Field(
        None,
        description="search_query, search_document, classification or clustering, or the name of one of the "
        "checkpoint's prompts; without it no prompt is put before the texts.",
    )
    embedding_types: list[EmbeddingType] | None = Field(None, description="float, unless others are named.")
    output_dimension: Annotated[int, Field(lt=INT64)] | None = Field(None, description="Matryoshka width.")
    truncate: Annotated[Cut, absent_if_null(Cut)] = Field(
        "END", description="The end of an over-long text that is cut."
    )
    max_tokens: Annotated[int, Field(ge=1, lt=INT64)] | None = Field(
        None, description="The length above which a text is over-long, where that is less than the model's."
    )
    priority: Annotated[Priority, absent_if_null(Priority)] = Field(0, description="Accepted; calls are served fairly.")
    request_id: Annotated[str, Field(max_length=256)] | None = Field(None, description="Stands in the answer's id.")

    def given(self) -> list[str]:
        """The texts.

        Raises:
            InvalidRequestError: None or several of texts, inputs and images, or something that is no text.
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
    """Vectors by type; for ``/v1/embed`` without embedding_types a list of vectors."""

    id: str
    embeddings: dict[EmbeddingType, list[Any]] | list[list[float]]
    texts: list[str]
    meta: dict[str, Any] = Field(description="api_version, and input_tokens among the billed_units.")
    response_type: Literal["embeddings_by_type", "embeddings_floats"]
