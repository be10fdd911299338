"""JinaBERT v2 (jina-embeddings-v2, jina-reranker-v1): BERT with ALiBi and a gated feed forward, as code of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millpond.errors import UnsupportedArchitectureError

_GATES = {"geglu": "gelu", "reglu": "relu"}


def translate(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """config.json with the activation that its ``feed_forward_type`` stands for."""
    kind = config.get("feed_forward_type", "original")
    if kind not in _GATES:
        raise UnsupportedArchitectureError(
            f"{name}: feed_forward_type {kind!r}, which millpond does not run for JinaBERT; it runs the gated ones: "
            f"{', '.join(_GATES)}"
        )
    native = {
        key: value for key, value in config.items() if key not in ("position_embedding_type", "feed_forward_type")
    }
    return native | {"model_type": "jina_bert", "hidden_act": _GATES[kind], "positions_end": True}
