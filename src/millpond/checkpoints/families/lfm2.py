"""LFM2, and LFM2.5's embedders and encoders, whose own code drops the causal mask and centres the convolutions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millpond.errors import ModelLoadError

_BIDIRECTIONAL = "Lfm2Bidirectional"


def translate(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """config.json with the kind of each layer, the width of the feed forward, and whether it is causal."""
    native = {**config, "model_type": "lfm2"}
    own = config.get("auto_map") or {}
    claims = (*(config.get("architectures") or ()), *own.values())
    if config.get("model_type") == "lfm2_bidirectional" or any(_BIDIRECTIONAL in str(claim) for claim in claims):
        native.setdefault("is_causal", False)
    count, attending, kinds = (config.get(key) for key in ("num_hidden_layers", "full_attn_idxs", "layer_types"))
    count = 32 if count is None else int(count)
    if kinds is None:
        kinds = ["full_attention" if attending is None or i in attending else "conv" for i in range(count)]
    if len(kinds) != count or not set(kinds) <= {"full_attention", "conv"}:
        raise ModelLoadError(f"{name}: layer_types of config.json must name full_attention or conv for {count} layers")
    inner = int(config.get("block_ff_dim") or config.get("intermediate_size") or 12288)
    if config.get("block_auto_adjust_ff_dim", True):
        multiple = int(config.get("block_multiple_of", 256))
        inner = int(float(config.get("block_ffn_dim_multiplier") or 1.0) * int(2 * inner / 3))
        inner = -(-inner // multiple) * multiple
    return native | {"mixers": list(kinds), "intermediate_size": inner}
