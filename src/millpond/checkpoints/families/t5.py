"""T5, mT5 and UMT5: the encoder under the names that other families use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NAMES = {
    "d_model": "hidden_size",
    "d_kv": "head_dim",
    "d_ff": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
}
# Distances have no end, but the table of what is added by distance has one: texts end there.
_LONGEST = 8192


def translate(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """config.json with the encoder's sizes and activation."""
    native = {_NAMES.get(key, key): value for key, value in config.items()}
    gate, _, kind = str(config.get("feed_forward_proj") or _default_feed(config)).rpartition("-")
    # T5 1.1 means the approximation by tanh.
    native["hidden_act"] = "gelu_new" if (gate, kind) == ("gated", "gelu") else kind
    return native | {"gated": gate == "gated", "max_position_embeddings": _LONGEST, "positions_end": True}


def _default_feed(config: Mapping[str, Any]) -> str:
    return "relu" if config.get("model_type") == "t5" else "gated-gelu"
