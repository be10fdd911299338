"""What OpenAI's and vLLM's answers have around their data."""

from __future__ import annotations

import time
from typing import Any

from fastapi import Request

from millpond.server.models import ServedModel


def envelope(request: Request, prefix: str, model: ServedModel, *, wanted: str | None = None) -> dict[str, Any]:
    """``id``, ``object``, ``created`` and ``model``.

    Args:
        request: Whose answer it is; its id, which the log and the headers have, stands in the answer's.
        prefix: What the id begins with: ``embd``.
        model: Who answered.
        wanted: The request's own ``request_id``.
    """
    return {
        "id": f"{prefix}-{wanted or request.state.request_id}",
        "object": "list",
        "created": int(time.time()),
        "model": model.name,
    }


def usage(prompt_tokens: int) -> dict[str, Any]:
    """Tokens as OpenAI counts them; nothing is generated."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens,
        "completion_tokens": 0,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }
