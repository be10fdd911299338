"""BigBird: where a text must end, since of longer ones it attends to some blocks of tokens only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def translate(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """config.json with the longest text that attends to all of its tokens, as transformers has it."""
    if config.get("attention_type", "block_sparse") == "original_full":
        return dict(config)
    blocks = 5 + 2 * int(config.get("num_random_blocks", 3))
    return {**config, "longest_text": blocks * int(config.get("block_size", 64))}
