"""Ministral 3: Mistral whose queries grow with the position beyond the length of the first training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def translate(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """config.json with the length up to which queries do not grow, where texts end here."""
    rope = dict(config.get("rope_scaling") or config.get("rope_parameters") or _ROPE)
    longest = int(config.get("max_position_embeddings", 262144))
    native = {**config, "rope_scaling": None, "rope_parameters": rope}
    trained = rope.get("original_max_position_embeddings")
    if not rope.get("llama_4_scaling_beta") or trained is None or longest <= trained:
        return native
    rope["factor"] = rope.get("factor") or longest / trained
    return {**native, "max_position_embeddings": int(trained), "positions_end": True}
