"""NomicBert, GTE and jina-embeddings-v3, implemented from their descriptions with the tensor names of the hub.

All three are BERT (post-norm: attention, add, norm, feed forward, add, norm) with rotary positions. They differ in
names, feed forward and frequencies; jina's adapters are merged into the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

Block = Callable[[str, torch.Tensor], torch.Tensor]  # (a layer's name, [n, hidden]) -> [n, hidden]
States = Callable[[torch.Tensor], torch.Tensor]  # ids [n] -> [n, hidden]


class Weights:
    """Tensors by name."""

    def __init__(self, tensors: dict[str, torch.Tensor], eps: float) -> None:
        self.tensors = tensors
        self.eps = eps

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"], eps=self.eps)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        words = self.tensors["embeddings.word_embeddings.weight"][ids]
        types = self.tensors.get("embeddings.token_type_embeddings.weight")
        return words if types is None else words + types[0]


def frequencies(dim: int, base: float) -> torch.Tensor:  # [dim / 2]
    """Radians per position."""
    return base ** -(torch.arange(0, dim, 2) / dim)


def stretched(dim: int, base: float, factor: float) -> torch.Tensor:  # [dim / 2]
    """GTE's fixed NTK scaling: a larger base, and all frequencies divided by the same factor."""
    return frequencies(dim, base * factor) / factor ** (2 / dim)


def attend(qkv: torch.Tensor, heads: int, speeds: torch.Tensor) -> torch.Tensor:  # [n, 3 hidden] -> [n, hidden]
    """Attention without a mask, one head at a time."""
    angles = torch.arange(len(qkv))[:, None] * speeds  # [n, dim / 2]

    def turned(x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)

    mixed = []
    for query, key, value in zip(*(part.chunk(heads, -1) for part in qkv.chunk(3, -1)), strict=True):
        scores = turned(query) @ turned(key).T / query.shape[-1] ** 0.5
        mixed.append(scores.softmax(-1) @ value)
    return torch.cat(mixed, -1)


def nomic(folder: Path, config: dict[str, Any], *, renormalized: bool = False) -> States:
    """With experts (v2) its feed forwards have no gate; ``renormalized``: a mistake, weights that add up to 1."""
    tensors = {name.removeprefix("bert."): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    w = Weights(tensors, config["layer_norm_epsilon"])
    speeds = frequencies(config["n_embd"] // config["n_head"], config["rotary_emb_base"])

    def mixed_experts(x: torch.Tensor, layer: str) -> torch.Tensor:
        shares = w.linear(x, f"{layer}.router.layer").softmax(-1)
        first, second = (w.tensors[f"{layer}.experts.mlp.{name}"].chunk(config["num_experts"]) for name in ("w1", "w2"))
        best = shares.argsort(-1, descending=True)[:, : config["moe_top_k"]]
        used = torch.zeros_like(shares).scatter(1, best, shares.gather(1, best))  # of the others 0
        used = used / used.sum(-1, keepdim=True) if renormalized else used
        out = w.tensors[f"{layer}.experts.bias"]
        for expert in range(config["num_experts"]):
            out = out + used[:, expert, None] * (F.gelu(x @ first[expert].T) @ second[expert])
        return out

    def states(ids: torch.Tensor) -> torch.Tensor:
        x = w.norm(w.embed(ids), "emb_ln")
        for i in range(config["n_layer"]):
            layer = f"encoder.layers.{i}"
            mixed = attend(w.linear(x, f"{layer}.attn.Wqkv"), config["n_head"], speeds)
            x = w.norm(x + w.linear(mixed, f"{layer}.attn.out_proj"), f"{layer}.norm1")
            if f"{layer}.mlp.router.layer.weight" in tensors:
                fed = mixed_experts(x, f"{layer}.mlp")
            else:
                gated = f"{layer}.mlp.fc11.weight" in tensors
                up = w.linear(x, f"{layer}.mlp.{'fc11' if gated else 'fc1'}")
                wide = up * F.silu(w.linear(x, f"{layer}.mlp.fc12")) if gated else F.gelu(up)
                fed = w.linear(wide, f"{layer}.mlp.fc2")
            x = w.norm(x + fed, f"{layer}.norm2")
        return x

    return states


def gte(folder: Path, config: dict[str, Any]) -> States:
    tensors = {name.removeprefix("new."): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    w = Weights(tensors, config["layer_norm_eps"])
    heads = config["num_attention_heads"]
    dim, scaling = config["hidden_size"] // heads, config["rope_scaling"]
    base = config["rope_theta"]
    speeds = frequencies(dim, base) if scaling is None else stretched(dim, base, scaling["factor"])

    def states(ids: torch.Tensor) -> torch.Tensor:
        x = w.norm(w.embed(ids), "embeddings.LayerNorm")
        for i in range(config["num_hidden_layers"]):
            layer = f"encoder.layer.{i}"
            mixed = attend(w.linear(x, f"{layer}.attention.qkv_proj"), heads, speeds)
            x = w.norm(x + w.linear(mixed, f"{layer}.attention.o_proj"), f"{layer}.attn_ln")
            up, gate = w.linear(x, f"{layer}.mlp.up_gate_proj").chunk(2, -1)
            x = w.norm(x + w.linear(F.gelu(gate) * up, f"{layer}.mlp.down_proj"), f"{layer}.mlp_ln")
        return x

    return states


def jina(folder: Path, config: dict[str, Any], adapter: str | None = "text-matching") -> States:
    w = Weights(merged(folder, config, adapter), config["layer_norm_eps"])
    heads = config["num_attention_heads"]
    speeds = frequencies(config["hidden_size"] // heads, config["rotary_emb_base"])

    def states(ids: torch.Tensor) -> torch.Tensor:
        x = w.norm(w.embed(ids), "emb_ln")
        for i in range(config["num_hidden_layers"]):
            layer = f"encoder.layers.{i}"
            mixed = attend(w.linear(x, f"{layer}.mixer.Wqkv"), heads, speeds)
            x = w.norm(x + w.linear(mixed, f"{layer}.mixer.out_proj"), f"{layer}.norm1")
            x = w.norm(x + w.linear(F.gelu(w.linear(x, f"{layer}.mlp.fc1")), f"{layer}.mlp.fc2"), f"{layer}.norm2")
        return x

    return states


def merged(folder: Path, config: dict[str, Any], adapter: str | None) -> dict[str, torch.Tensor]:
    """jina's tensors with one adapter (or none) added to every matrix, without the prefix ``roberta``."""
    tensors = {name.removeprefix("roberta."): t for name, t in load_file(folder / "model.safetensors").items()}
    plain = {}
    for name, tensor in tensors.items():
        module, parametrized, kind = name.partition(".parametrizations.weight.")
        if not parametrized:
            plain[name] = tensor
        elif kind == "original":
            plain[f"{module}.weight"] = tensor
            if adapter is not None:
                task = config["lora_adaptations"].index(adapter)
                first, second = (tensors[f"{module}{parametrized}0.lora_{letter}"][task] for letter in "AB")
                change = first @ second if module.startswith("embeddings.") else second @ first
                plain[f"{module}.weight"] = tensor + change * config["lora_alpha"] / config["lora_rank"]
    return plain
