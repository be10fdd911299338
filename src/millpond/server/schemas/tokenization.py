"""The bodies of /tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from millpond.server.schemas.conversation import ChatFields, Switch
from millpond.server.schemas.request import INT64


class TokenizeRequest(ChatFields):
    """A text or a conversation to tokenize."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = Field(None, description="By default true for a prompt, false for messages.")
    return_token_strs: Switch = Field(False, description="Also return the tokens as strings of the vocabulary.")
    add_generation_prompt: Switch = Field(True, description="Let the template start the assistant's turn.")
    tools: list[dict[str, Any]] | None = Field(None, description="Passed to the template.")

    @model_validator(mode="after")
    def _check_forms(self) -> Self:
        if (self.prompt is None) is (self.messages is None):
            raise ValueError("pass prompt or messages, one of them")
        return self


class TokenizeResponse(BaseModel):
    """Token ids."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(BaseModel):
    """Token ids to convert to a text."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=INT64)]], Field(fail_fast=True)]


class DetokenizeResponse(BaseModel):
    """The text."""

    prompt: str
