"""InternLM2: Llama's arithmetic under other names, with q, k and v in one tensor."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from millpond.errors import UnsupportedArchitectureError

_NAMES = {
    "tok_embeddings": "embed_tokens",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_PATTERN = re.compile("|".join(rf"(?<![^.]){re.escape(name)}(?=\.)" for name in _NAMES))
_QKV = "attention.wqkv.weight"


def translate(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """config.json in Llama's terms."""
    if config.get("bias"):
        raise UnsupportedArchitectureError(f"{name}: bias true, which millpond does not run for InternLM2")
    native = {key: value for key, value in config.items() if key != "attn_implementation"}
    native |= {"model_type": "llama", "attention_bias": False, "mlp_bias": False}
    scaling = config.get("rope_scaling") or {}
    if "dynamic" in (scaling.get("type"), scaling.get("rope_type")):
        # It scales by the longest text of a batch, but only beyond max_position_embeddings, where texts end here.
        native |= {"rope_scaling": None, "positions_end": True}
    return native


def tensors(state: dict[str, torch.Tensor], config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors under Llama's names; the head keeps its names."""
    heads, kv_heads = int(config["num_attention_heads"]), int(config["num_key_value_heads"] or 0)
    renamed: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        if name.endswith(_QKV):
            parts = split_qkv(tensor, heads=heads, kv_heads=kv_heads or heads)
            renamed |= {
                f"{name.removesuffix(_QKV)}self_attn.{letter}_proj.weight": part
                for letter, part in zip("qkv", parts, strict=True)
            }
        else:
            renamed[_PATTERN.sub(lambda match: _NAMES[match[0]], name)] = tensor
    return renamed


def split_qkv(weight: torch.Tensor, *, heads: int, kv_heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``[(heads + 2 kv_heads) dim, hidden]`` as q, k and v; each key head follows the query heads that use it."""
    groups = weight.unflatten(0, (kv_heads, heads // kv_heads + 2, -1))  # [kv_heads, queries + 2, dim, hidden]
    query, key, value = groups[:, :-2], groups[:, -2], groups[:, -1]
    return query.flatten(0, 2).contiguous(), key.flatten(0, 1).contiguous(), value.flatten(0, 1).contiguous()
