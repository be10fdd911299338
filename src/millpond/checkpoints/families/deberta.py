"""DeBERTa v2 and v3: where a text must end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def translate(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """config.json unchanged; if there is a table of absolute positions, a text may not be longer.

    Nor where the logarithmic buckets of far distances would begin behind the last position: they have no width.
    """
    is_bounded = bool(config.get("position_biased_input", True)) or has_near_distances_only(config)
    return {**config, "positions_end": is_bounded}


def has_near_distances_only(config: Mapping[str, Any]) -> bool:
    """Whether all positions are so near to each other that each distance has a bucket of its own."""
    buckets = int(config.get("position_buckets") or -1)
    return 0 < int(config.get("max_position_embeddings") or 512) <= buckets // 2 + 1
