"""The bodies of /v1/embeddings."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from millpond.server.schemas.usage import UsageInfo
from millpond.server.schemas.vectors import VectorRequest


class EmbeddingRequest(VectorRequest):
    """Texts to embed."""

    late_chunking_params: dict[str, Any] | None = Field(None, description="Refused: see docs/server.md.")


class EmbeddingData(BaseModel):
    """The vector of a text; from a late-interaction model a matrix."""

    index: int
    object: Literal["embedding"] = "embedding"
    embedding: list[float] | list[list[float]] | str = Field(description="Numbers, or a base64 string.")
    shape: list[int] | None = Field(None, description="Rows and columns of a base64 matrix.")


class EmbeddingResponse(BaseModel):
    """A vector for each text, in the order of the request."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[EmbeddingData]
    usage: UsageInfo
