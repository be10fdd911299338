"""Billing: what Cohere's answers say of versions and tokens in their ``meta``."""

from __future__ import annotations

from typing import Any


def meta(version: str, tokens: int, **units: int) -> dict[str, Any]:
    """Cohere's ``meta``; nothing is billed here.

    Args:
        version: Of Cohere's API: ``1`` or ``2``.
        tokens: How many were read.
        units: What Cohere would bill.
    """
    return {
        "api_version": {"version": version},
        "billed_units": units,
        "tokens": {"input_tokens": tokens, "output_tokens": 0},
    }
