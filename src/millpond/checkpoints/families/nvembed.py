"""NV-Embed: Mistral's config.json inside its own; every token attends to all others, whatever the window says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millpond.errors import ModelLoadError

_NESTED = ("text_config", "latent_attention_config")


def translate(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """config.json with the fields of the backbone in it."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise ModelLoadError(f"{name}: text_config is {text!r} in config.json; it must be the object of a Mistral")
    own = {key: value for key, value in config.items() if key not in _NESTED}
    return {**own, **text, "architectures": config.get("architectures"), "sliding_window": None}
