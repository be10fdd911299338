"""A checkpoint's config.json in the terms of transformers' own class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millpond.checkpoints.architecture import Architecture
from millpond.errors import UnsupportedArchitectureError


def translate(row: Architecture, config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """``config`` as the native class reads it.

    Raises:
        UnsupportedArchitectureError: The config changes the arithmetic to something that class does not do.
    """
    hook = getattr(row.hooks(), "translate", None)
    native: dict[str, Any] = dict(config) if hook is None else hook(config, name)
    refusal = _changed_arithmetic(row, native)
    if refusal:
        raise UnsupportedArchitectureError(f"{name}: {refusal}, which millpond does not run for {row.model_class}")
    return native


def _changed_arithmetic(row: Architecture, config: Mapping[str, Any]) -> str | None:
    """The field of a config that would make the native class compute something the checkpoint was not trained with."""
    positions = config.get("position_embedding_type", "absolute")
    if row.positions == "absolute" and positions != "absolute":
        return f"position_embedding_type {positions!r}"
    if config.get("lora_adaptations") and not row.adapters:
        return "lora_adaptations"
    for key in ("is_decoder", "add_cross_attention"):
        if config.get(key) and not row.decoder:  # a BERT trained to attend to earlier tokens only
            return f"{key} {config[key]!r}"
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    by_layer = rope.values() if isinstance(rope, Mapping) else ()  # Gemma 3 has one for each type of layer
    for scaling in (rope, *by_layer):
        kind = scaling.get("rope_type", scaling.get("type")) if isinstance(scaling, Mapping) else None
        if kind in ("dynamic", "longrope"):
            return f"rope scaling {kind!r} (it would make one text's vector depend on its neighbours')"
    return None
