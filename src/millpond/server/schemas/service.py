"""Responses of the service routes."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Status(BaseModel):
    """The server works."""

    status: Literal["ok"] = "ok"


class Version(BaseModel):
    """The version of millpond."""

    version: str


class Load(BaseModel):
    """How busy the server is."""

    server_load: int = Field(description="Calls in progress, over all models.")


class ModelCard(BaseModel):
    """A model in the format of OpenAI and vLLM, and its capabilities."""

    model_config = ConfigDict(protected_namespaces=())

    id: str = Field(description="The name in requests.")
    object: Literal["model"] = "model"
    created: int = Field(description="Unix time of the load.")
    owned_by: str = "millpond"
    root: str = Field(description="Hub id or folder of the checkpoint.")
    parent: None = None
    max_model_len: int = Field(description="Most tokens per prompt.")
    tasks: list[str] = Field(description="The tasks that it serves.")
    dimensions: int | None = Field(None, description="Width of its vectors.")
    matryoshka: bool | None = Field(None, description="Whether vectors can be cut to fewer dimensions.")
    matryoshka_dimensions: list[int] | None = Field(
        None, description="The trained widths, if the checkpoint lists them."
    )
    labels: list[str] = Field(description="Names of its classes.")
    score_type: str | None = Field(
        None, description="How it scores a pair: cross-encoder, late-interaction or bi-encoder."
    )


class ModelList(BaseModel):
    """Every model."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
