"""Phi-3 (Phi-4-mini too): Llama with queries, keys and values in one tensor, gate and up in another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millpond.checkpoints.families.renaming import AnyTensor

_QKV, _FEED = "self_attn.qkv_proj.weight", "mlp.gate_up_proj.weight"


def translate(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """config.json with the length of the first training, where texts end here.

    Beyond it all positions of a text would have other angles ("longrope").
    """
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if rope.get("rope_type", rope.get("type")) not in ("longrope", "su", "yarn"):
        return dict(config)
    longest = int(config.get("max_position_embeddings", 4096))
    trained = int(config.get("original_max_position_embeddings", 4096))
    rope = {**rope, "rope_type": "longrope", "factor": rope.get("factor") or longest / trained}
    ends = {"max_position_embeddings": min(longest, trained), "positions_end": True}
    return {**config, "rope_scaling": rope, **ends}


def rename(tensors: Mapping[str, AnyTensor], config: Mapping[str, Any]) -> dict[str, AnyTensor]:
    """The checkpoint's tensors under Llama's names."""
    renamed: dict[str, AnyTensor] = {}
    for name, tensor in tensors.items():
        rows = tensor.shape[0]
        if name.endswith(_QKV):
            heads, kv_heads = int(config["num_attention_heads"]), int(config["num_key_value_heads"])
            queries = rows * heads // (heads + 2 * kv_heads)
            ends = (0, queries, queries + (rows - queries) // 2, rows)
            for i, letter in enumerate("qkv"):
                renamed[f"{name.removesuffix(_QKV)}self_attn.{letter}_proj.weight"] = tensor[ends[i] : ends[i + 1]]
        elif name.endswith(_FEED):
            lead = name.removesuffix(_FEED)
            renamed |= {
                f"{lead}mlp.gate_proj.weight": tensor[: rows // 2],
                f"{lead}mlp.up_proj.weight": tensor[rows // 2 :],
            }
        else:
            renamed[name] = tensor
    return renamed
