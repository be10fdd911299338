"""MobileBERT: the form that its checkpoints have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millpond.errors import UnsupportedArchitectureError

# Fields of config.json with their defaults, the only values that are run.
_FIXED: Mapping[str, Any] = {
    "trigram_input": True,
    "use_bottleneck": True,
    "use_bottleneck_attention": False,
    "key_query_shared_bottleneck": True,
    "normalization_type": "no_norm",
}


def translate(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """config.json unchanged."""
    for key, only in _FIXED.items():
        if config.get(key, only) != only:
            raise UnsupportedArchitectureError(
                f"{name}: {key} {config[key]!r}, which millpond does not run for MobileBERT (only {only!r})"
            )
    return dict(config)
