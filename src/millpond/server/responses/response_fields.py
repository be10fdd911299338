"""Envelope: the fields around the data of OpenAI's, vLLM's and Cohere's responses."""

from __future__ import annotations

import time
from typing import Any, Generic, Literal, TypeVar

from fastapi import Request
from pydantic import BaseModel

from millpond.server.served.models import ServedModel


class UsageInfo(BaseModel):
    """Token counts."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: None = None
    completion_tokens_details: None = None


_USAGE = UsageInfo(prompt_tokens=0, total_tokens=0).model_dump()

Item = TypeVar("Item")


class ListResponse(BaseModel, Generic[Item]):
    """Items in the order of the request."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Item]
    usage: UsageInfo


def envelope(request: Request, prefix: str, model: ServedModel, *, request_id: str | None = None) -> dict[str, Any]:
    """``id``, ``object``, ``created`` and ``model``."""
    return {
        "id": f"{prefix}-{request_id or request.state.request_id}",
        "object": "list",
        "created": int(time.time()),
        "model": model.name,
    }


def usage(prompt_tokens: int) -> dict[str, Any]:
    """Token counts in OpenAI's format; nothing is generated."""
    return _USAGE | {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}


def cohere_meta(version: str, tokens: int, **units: int) -> dict[str, Any]:
    """Cohere's ``meta``; nothing is billed."""
    return {
        "api_version": {"version": version},
        "billed_units": units,
        "tokens": {"input_tokens": tokens, "output_tokens": 0},
    }
