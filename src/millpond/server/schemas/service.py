"""What the server says about itself."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Status(BaseModel):
    """The server can work."""

    status: Literal["ok"] = "ok"


class Version(BaseModel):
    """Which millpond this is."""

    version: str


class Load(BaseModel):
    """How busy the server is."""

    server_load: int = Field(description="Calls under way, of every model.")


class ModelCard(BaseModel):
    """A model, as OpenAI's clients and vLLM's list it, and what it can do."""

    model_config = ConfigDict(protected_namespaces=())

    id: str = Field(description="What requests call it.")
    object: Literal["model"] = "model"
    created: int = Field(description="Unix time of the load.")
    owned_by: str = "millpond"
    root: str = Field(description="Hub id or folder that it was loaded from.")
    parent: None = None
    max_model_len: int = Field(description="Most tokens per prompt.")
    tasks: list[str] = Field(description="What it serves.")
    dimensions: int | None = Field(None, description="Width of its vectors, where it has any.")
    matryoshka: bool | None = Field(None, description="Whether they may be asked for shorter.")
    matryoshka_dimensions: list[int] | None = Field(None, description="The widths it was trained for, where it says.")
    labels: list[str] = Field(description="Names of its classes.")
    score_type: str | None = Field(None, description="How it scores a pair: as a reranker, or by comparing vectors.")


class ModelList(BaseModel):
    """Every model."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
