"""Usage: the tokens of a request, as OpenAI counts them."""

from __future__ import annotations

from pydantic import BaseModel


class UsageInfo(BaseModel):
    """Tokens read."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: None = None
    completion_tokens_details: None = None
