"""The plan of ModernBERT: pre-norm, gated, with windows; the residual stream is in the sums."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millpond.backends.native.packing.weight_packer import Linear
from millpond.backends.native.plans.plan import PlanBuilder
from millpond.backends.native.plans.post_norm import layer_norm
from millpond.backends.native.plans.rotation import rotation_of
from millpond.backends.native.plans.tensors import Tensors


def modernbert_plan(builder: PlanBuilder, tensors: Tensors, config: Mapping[str, Any]) -> None:
    """The steps of a ModernBERT."""
    hidden, heads, dim = (int(config[name]) for name in ("hidden_size", "num_attention_heads", "head_dim"))

    def norm(name: str, *, keep: bool = False) -> None:
        weights = layer_norm(builder, tensors, name, hidden, float(config["norm_eps"]), biased=config["norm_bias"])
        builder.norm(weights, hidden, keep=keep)

    builder.embed(tensors.take("embeddings.tok_embeddings.weight", int(config["vocab_size"]), hidden))
    norm("embeddings.norm", keep=True)
    kinds: list[str] = config["layer_types"]
    rotations = {kind: rotation_of(config["rope_parameters"][kind], dim) for kind in dict.fromkeys(kinds)}
    for i, kind in enumerate(kinds):
        layer, biased = f"layers.{i}.", config["attention_bias"]
        if i:  # before its attention the first layer has no norm: the states are those of the embeddings already
            norm(f"{layer}attn_norm")
        builder.heads(tensors.linear(f"{layer}attn.Wqkv", 3 * hidden, hidden, biased=biased), dim=dim, turned=2 * heads)
        builder.rotary(heads=heads, kv_heads=heads, dim=dim, rotation=rotations[kind])
        window = config["sliding_window"] + 1 if kind == "sliding_attention" else None
        builder.attention(heads=heads, kv_heads=heads, dim=dim, scale=dim**-0.5, window=window)
        builder.o_proj(tensors.linear(f"{layer}attn.Wo", hidden, hidden, biased=biased), dim=dim, add=True)
        norm(f"{layer}mlp_norm")
        _feed(builder, tensors, config, f"{layer}mlp.")
    norm("final_norm")


def _feed(builder: PlanBuilder, tensors: Tensors, config: Mapping[str, Any], prefix: str) -> None:
    hidden, inner, biased = int(config["hidden_size"]), int(config["intermediate_size"]), config["mlp_bias"]
    both = tensors.linear(f"{prefix}Wi", 2 * inner, hidden, biased=biased)
    gate, up = (
        Linear(weight=both.weight[rows], bias=None if both.bias is None else both.bias[rows])
        for rows in (slice(inner), slice(inner, None))
    )
    down = tensors.linear(f"{prefix}Wo", hidden, inner, biased=biased)
    builder.mlp(up, down, config["hidden_activation"], gate=gate, add=True)
