"""Usage: token counts of a request, in OpenAI's format."""

from __future__ import annotations

from pydantic import BaseModel


class UsageInfo(BaseModel):
    """Token counts."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: None = None
    completion_tokens_details: None = None
