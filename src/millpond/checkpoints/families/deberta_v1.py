"""DeBERTa v1 in the terms of v2: queries, keys and values are one tensor in it, and keys have no bias."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from millpond.checkpoints.families.renaming import AnyTensor
from millpond.errors import UnsupportedArchitectureError, WeightMismatchError

_JOINED = ".in_proj.weight"
_NAMES = {
    ".q_bias": ".query_proj.bias",
    ".v_bias": ".value_proj.bias",
    ".pos_proj.weight": ".pos_key_proj.weight",
    ".pos_q_proj.weight": ".pos_query_proj.weight",
    ".pos_q_proj.bias": ".pos_query_proj.bias",
}


def translate(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """config.json in the terms of v2; if there is a table of absolute positions, a text may not be longer."""
    kinds = config.get("pos_att_type") or []
    kinds = [kind.strip() for kind in kinds.lower().split("|")] if isinstance(kinds, str) else list(kinds)
    other = next((kind for kind in kinds if kind not in ("c2p", "p2c")), None)
    if other is not None or config.get("talking_head"):
        found = f"pos_att_type {other!r}" if other is not None else "talking_head true"
        raise UnsupportedArchitectureError(f"{name}: {found}, which millpond does not run for DeBERTa v1")
    own = {"position_buckets": -1, "share_att_key": False, "norm_rel_ebd": "none", "conv_kernel_size": 0}
    biased = bool(config.get("position_biased_input", True))
    return {**config, **own, "pos_att_type": kinds, "key_bias": False, "positions_end": biased}


def rename(tensors: Mapping[str, AnyTensor], config: Mapping[str, Any]) -> dict[str, AnyTensor]:
    """The checkpoint's tensors under the names of v2."""
    heads = int(config.get("num_attention_heads", 12))
    renamed: dict[str, AnyTensor] = {}
    for name, tensor in tensors.items():
        if not name.endswith(_JOINED):
            ending = next((ending for ending in _NAMES if name.endswith(f"attention.self{ending}")), "")
            renamed[name.removesuffix(ending) + _NAMES[ending] if ending else name] = tensor
            continue
        if tensor.shape[0] % (3 * heads):
            raise WeightMismatchError(f"{name} has {tensor.shape[0]} rows, which {heads} heads do not share")
        by_head = np.arange(tensor.shape[0]).reshape(heads, 3, -1)  # a head's query, key and value
        for i, part in enumerate(("query", "key", "value")):
            renamed[f"{name.removesuffix(_JOINED)}.{part}_proj.weight"] = tensor[by_head[:, i].ravel().tolist()]
    return renamed
