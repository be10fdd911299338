"""UltraBERT: EuroBERT with windows; its checkpoints give windows and rotary bases layer by layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from millpond.errors import UnsupportedArchitectureError

_FULL, _SLIDING = "full_attention", "sliding_attention"


def translate(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """config.json in transformers' terms, in which all layers of a kind have the same window and base."""
    native = {key: value for key, value in config.items() if key not in ("attention_windows", "rope_theta")}
    windows, thetas, kinds = config.get("attention_windows"), config.get("rope_theta"), native.get("layer_types")
    if windows is not None:
        native["sliding_window"] = _one(name, "attention_windows", filter(None, windows))
        kinds = kinds or [_SLIDING if window else _FULL for window in windows]
    if thetas is not None:
        kinds = kinds or [_SLIDING if (i + 1) % 3 else _FULL for i in range(len(thetas))]
        layers = list(zip(kinds, thetas, strict=True))
        rope = {
            kind: {
                "rope_type": "default",
                "rope_theta": _one(name, f"rope_theta of {kind}", (theta for layer, theta in layers if layer == kind)),
            }
            for kind in dict.fromkeys(kinds)
        }
        native["rope_parameters"] = native.get("rope_parameters") or rope
    return native | ({} if kinds is None else {"layer_types": kinds})


def _one(name: str, what: str, values: Iterable[Any]) -> Any:
    """The value that all layers of a kind have; ``None`` without such layers."""
    different = sorted(set(values))
    if len(different) > 1:
        raise UnsupportedArchitectureError(
            f"{name}: {what} are {', '.join(map(str, different))}, and all layers of a kind have one in UltraBERT"
        )
    return different[0] if different else None
