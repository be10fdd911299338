"""InternLM2: Llama's arithmetic under other names, with q, k and v in one tensor."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from millpond.checkpoints.families.renaming import AnyTensor
from millpond.errors import UnsupportedArchitectureError, WeightMismatchError

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


def rename(tensors: Mapping[str, AnyTensor], config: Mapping[str, Any]) -> dict[str, AnyTensor]:
    """The checkpoint's tensors under Llama's names; the head keeps its names."""
    heads, kv_heads = int(config["num_attention_heads"]), int(config.get("num_key_value_heads") or 0)
    renamed: dict[str, AnyTensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(_QKV):
            rows = qkv_rows(tensor.shape[0], heads=heads, kv_heads=kv_heads or heads)
            for letter, indexes in zip("qkv", rows, strict=True):
                renamed[f"{name.removesuffix(_QKV)}self_attn.{letter}_proj.weight"] = tensor[indexes]
        else:
            renamed[_PATTERN.sub(lambda match: _NAMES[match[0]], name)] = tensor
    return renamed


def qkv_rows(rows: int, *, heads: int, kv_heads: int) -> tuple[list[int], list[int], list[int]]:
    """The rows of q, k and v in ``[(heads + 2 kv_heads) dim, hidden]``; each key head follows its query heads."""
    if rows % (kv_heads * (heads // kv_heads + 2)):
        raise WeightMismatchError(f"{_QKV} has {rows} rows, which {heads} heads and {kv_heads} key heads do not share")
    groups = np.arange(rows).reshape(kv_heads, heads // kv_heads + 2, -1)  # [kv_heads, queries + 2, dim]
    query, key, value = groups[:, :-2], groups[:, -2], groups[:, -1]
    return query.ravel().tolist(), key.ravel().tolist(), value.ravel().tolist()
