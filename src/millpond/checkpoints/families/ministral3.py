"""Ministral 3: Mistral whose queries grow with the position beyond the length of the first training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millpond.checkpoints.defaults import MINISTRAL_ROPE


def translate(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """config.json with the length up to which queries do not grow, where texts end here."""
    rope = dict(config.get("rope_scaling") or config.get("rope_parameters") or MINISTRAL_ROPE)
    longest, trained = int(config.get("max_position_embeddings", 262144)), rope.get("original_max_position_embeddings")
    if not rope.get("llama_4_scaling_beta") or trained is None or longest <= trained:
        return dict(config)
    rope["factor"] = rope.get("factor") or longest / trained
    ends = {"max_position_embeddings": int(trained), "positions_end": True}
    return {**config, "rope_scaling": None, "rope_parameters": rope, **ends}
