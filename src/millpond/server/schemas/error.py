"""OpenAI's error object."""

from __future__ import annotations

from pydantic import BaseModel, Field


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str = Field(description="What is wrong, the limit, and the way out.")
    type: str = Field(description="The kind of error, as vLLM calls it.")
    param: str | None = Field(default=None, description="The field at fault.")
    code: int = Field(description="The HTTP status.")


class ErrorAnswer(BaseModel):
    """The body of every answer that is an error."""

    error: ErrorDetail
