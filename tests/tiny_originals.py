"""Tensors under the names, and in the shapes, that a family's checkpoints on the hub have."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tests import tiny_rotary

if TYPE_CHECKING:
    import torch

Tensors = dict[str, "torch.Tensor"]


def _gpt2(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """The causal mask was a buffer once, and lies in the files still."""
    import torch

    length = int(config["n_positions"])
    prefix = "transformer." if any(name.startswith("transformer.") for name in tensors) else ""
    mask = torch.tril(torch.ones(length, length))[None, None]
    return tensors | {f"{prefix}h.{i}.attn.bias": mask.clone() for i in range(int(config["n_layer"]))}


def _jamba(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """Each expert's three products by themselves."""
    found = {}
    for name, tensor in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            found[name] = tensor
            continue
        place, _, kind = name.rpartition(".")
        for i, expert in enumerate(tensor):
            parts = {"gate_proj": expert.chunk(2)[0], "up_proj": expert.chunk(2)[1]} if "up" in kind else {kind: expert}
            found |= {f"{place}.{i}.{part}.weight": value.contiguous() for part, value in parts.items()}
    return found


def _internlm2(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """Its own names; q, k and v of each key head together, as ``rearrange(.., "(h gs d) n")`` of the original reads."""
    import torch

    heads, kv_heads = int(config["num_attention_heads"]), int(config["num_key_value_heads"])
    names = {
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "embed_tokens": "tok_embeddings",
        "lm_head": "output",
    }
    found = {}
    for name, tensor in tensors.items():
        if "q_proj" in name:
            key, value = (tensors[name.replace("q_proj", other)] for other in ("k_proj", "v_proj"))
            dim, each = len(tensor) // heads, heads // kv_heads
            rows = []
            for head in range(kv_heads):
                rows += [tensor[head * each * dim : (head + 1) * each * dim]]
                rows += [part[head * dim : (head + 1) * dim] for part in (key, value)]
            found[name.replace("self_attn.q_proj", "attention.wqkv")] = torch.cat(rows)
        elif not re.search(r"[kv]_proj", name):
            for theirs, own in names.items():
                name = name.replace(theirs, own)
            found[name] = tensor
    return found


ORIGINALS: Mapping[str, Callable[[Tensors, Mapping[str, Any]], Tensors]] = {
    "gpt2": _gpt2,
    "jamba": _jamba,
    "internlm2": _internlm2,
    "nomic_bert": tiny_rotary.nomic,
    "new": tiny_rotary.gte,
    "gte": tiny_rotary.gte,
    "xlm-roberta": tiny_rotary.jina,
}
