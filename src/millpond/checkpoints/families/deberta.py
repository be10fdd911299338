"""DeBERTa v2 and v3: where a text must end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def translate(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """config.json unchanged; if there is a table of absolute positions, a text may not be longer."""
    return {**config, "positions_end": bool(config.get("position_biased_input", True))}
