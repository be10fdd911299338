"""OpenAI's error object."""

from __future__ import annotations

from pydantic import BaseModel, Field


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str = Field(description="What is wrong, the limit, and how to fix it.")
    type: str = Field(description="The type of error, with vLLM's name.")
    param: str | None = Field(default=None, description="The invalid field.")
    code: int = Field(description="The HTTP status.")


class ErrorAnswer(BaseModel):
    """The body of every error response."""

    error: ErrorDetail
