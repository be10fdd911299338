"""The plan of GPT-NeoX (Pythia): layer norms, and both halves of a layer may read the same states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from millpond.backends.native.packing.weight_packer import Linear
from millpond.backends.native.plans.decoder import ordered
from millpond.backends.native.plans.plan import PlanBuilder
from millpond.backends.native.plans.post_norm import layer_norm
from millpond.backends.native.plans.rotation import rotation_of
from millpond.backends.native.plans.tensors import Tensors
from millpond.errors import ModelLoadError


def gpt_neox_plan(builder: PlanBuilder, tensors: Tensors, config: Mapping[str, Any]) -> None:
    """The steps of a GPT-NeoX."""
    hidden, heads, inner = (int(config[name]) for name in ("hidden_size", "num_attention_heads", "intermediate_size"))
    if hidden % heads:
        raise ModelLoadError(f"hidden_size {hidden} is no multiple of num_attention_heads {heads} in config.json")
    dim, biased = hidden // heads, bool(config["attention_bias"])
    rotation = rotation_of(config["rope_parameters"], dim, most=int(config["max_position_embeddings"]), partial=True)
    causal = config.get("is_causal")

    def norm(name: str) -> None:
        builder.norm(layer_norm(builder, tensors, name, hidden, float(config["layer_norm_eps"])), hidden)

    builder.embed(tensors.take("embed_in.weight", int(config["vocab_size"]), hidden))
    for i in range(int(config["num_hidden_layers"])):
        layer = f"layers.{i}."
        norm(f"{layer}input_layernorm")
        together = tensors.linear(f"{layer}attention.query_key_value", 3 * hidden, hidden, biased=biased)
        query, key, value = _taken_apart(together, heads, dim)
        query, key = (ordered(part, dim, rotation.turned) for part in (query, key))
        builder.heads(query, key, value, dim=dim, turned=2 * heads)
        builder.rotary(heads=heads, kv_heads=heads, dim=dim, rotation=rotation)
        builder.attention(
            heads=heads, kv_heads=heads, dim=dim, scale=dim**-0.5, causal=True if causal is None else bool(causal)
        )
        if config["use_parallel_residual"]:  # before the attention's result is added
            norm(f"{layer}post_attention_layernorm")
        builder.o_proj(tensors.linear(f"{layer}attention.dense", hidden, hidden, biased=biased), dim=dim, add=True)
        if not config["use_parallel_residual"]:
            norm(f"{layer}post_attention_layernorm")
        up, down = (
            tensors.linear(f"{layer}mlp.{name}", *shape)
            for name, shape in (("dense_h_to_4h", (inner, hidden)), ("dense_4h_to_h", (hidden, inner)))
        )
        builder.mlp(up, down, config["hidden_act"], add=True)
    norm("final_layer_norm")


def _taken_apart(together: Linear, heads: int, dim: int) -> list[Linear]:
    """Queries, keys and values of a layer that has those of each head together."""
    rows = np.arange(3 * heads * dim).reshape(heads, 3, dim)
    orders = [rows[:, part].reshape(-1) for part in range(3)]
    bias = together.bias
    return [Linear(weight=together.weight[order], bias=None if bias is None else bias[order]) for order in orders]
