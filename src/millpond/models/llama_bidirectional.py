"""Llama without the causal mask, under a ``model_type`` of its own (llama-nemotron-embed and -rerank)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def translate(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """config.json in Llama's terms; ``pooling`` and ``temperature`` stay for the head that reads them."""
    return {**config, "model_type": "llama", "is_causal": False}
