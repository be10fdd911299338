"""Conversion of transformers' tensors to the names and shapes of a family's checkpoints on the hub."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tests import tiny_rotary

if TYPE_CHECKING:
    import torch

Tensors = dict[str, "torch.Tensor"]


def _gpt2(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """Adds the causal masks, a former buffer that the hub's files still contain."""
    import torch

    length = int(config["n_positions"])
    prefix = "transformer." if any(name.startswith("transformer.") for name in tensors) else ""
    mask = torch.tril(torch.ones(length, length))[None, None]
    return tensors | {f"{prefix}h.{i}.attn.bias": mask.clone() for i in range(int(config["n_layer"]))}


def _jamba(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """Splits the experts' fused tensors into three matrices per expert."""
    originals = {}
    for name, tensor in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            originals[name] = tensor
            continue
        prefix, _, kind = name.rpartition(".")
        for i, expert in enumerate(tensor):
            parts = {"gate_proj": expert.chunk(2)[0], "up_proj": expert.chunk(2)[1]} if "up" in kind else {kind: expert}
            originals |= {f"{prefix}.{i}.{part}.weight": value.contiguous() for part, value in parts.items()}
    return originals


def _internlm2(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """InternLM2's names; q, k and v are fused by key head, as the original's ``rearrange(.., "(h gs d) n")`` reads."""
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
    originals = {}
    for name, tensor in tensors.items():
        if "q_proj" in name:
            key, value = (tensors[name.replace("q_proj", other)] for other in ("k_proj", "v_proj"))
            dim, each = len(tensor) // heads, heads // kv_heads
            rows = []
            for head in range(kv_heads):
                rows += [tensor[head * each * dim : (head + 1) * each * dim]]
                rows += [part[head * dim : (head + 1) * dim] for part in (key, value)]
            originals[name.replace("self_attn.q_proj", "attention.wqkv")] = torch.cat(rows)
        elif not re.search(r"[kv]_proj", name):
            for native, original in names.items():
                name = name.replace(native, original)
            originals[name] = tensor
    return originals


ORIGINALS: Mapping[str, Callable[[Tensors, Mapping[str, Any]], Tensors]] = {
    "gpt2": _gpt2,
    "jamba": _jamba,
    "internlm2": _internlm2,
    "nomic_bert": tiny_rotary.nomic,
    "new": tiny_rotary.gte,
    "gte": tiny_rotary.gte,
    "xlm-roberta": tiny_rotary.jina,
}
