"""Llama without the causal mask, under its own ``model_type`` (llama-nemotron-embed and -rerank)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def translate(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """config.json in Llama's terms; ``pooling`` and ``temperature`` stay, since the head reads them."""
    return {**config, "model_type": "llama", "is_causal": False}
