"""The plan of T5's encoder (mT5, UMT5): pre-norm, scores that are not scaled but for a bias by distance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millpond.backends.native.packing.weight_packer import Floats
from millpond.backends.native.plans.plan import PlanBuilder
from millpond.backends.native.plans.post_norm import relative_bias
from millpond.backends.native.plans.tensors import Tensors


def t5_plan(builder: PlanBuilder, tensors: Tensors, config: Mapping[str, Any], *, shared: bool = True) -> None:
    """The steps of the encoder; ``shared``: all layers have the first one's bias."""
    hidden, heads, dim, inner, words = (
        int(config[name])
        for name in ("hidden_size", "num_attention_heads", "head_dim", "intermediate_size", "vocab_size")
    )
    epsilon, buckets = float(config["layer_norm_epsilon"]), int(config["relative_attention_num_buckets"])
    activation = str(config["hidden_act"])
    bias: Floats | None = None

    def norm(name: str) -> None:
        builder.norm(builder.rms_norm(tensors.take(f"{name}.weight", hidden), epsilon), hidden)

    # Files have the one table under either name, or both.
    tables = ("shared.weight", "encoder.embed_tokens.weight")
    builder.embed(tensors.take(next((name for name in tables if name in tensors), tables[0]), words, hidden))
    tensors.leave(tables[1])
    for i in range(int(config["num_hidden_layers"])):
        layer = f"encoder.block.{i}.layer."
        if bias is None or not shared:
            table = tensors.take(f"{layer}0.SelfAttention.relative_attention_bias.weight", buckets, heads)
            farthest = int(config["relative_attention_max_distance"])
            bias = relative_bias(builder.numbers(table), int(config["max_position_embeddings"]), farthest=farthest)
        norm(f"{layer}0.layer_norm")
        names = (f"{layer}0.SelfAttention.{letter}" for letter in "qkv")
        builder.heads(*(tensors.linear(name, heads * dim, hidden, biased=False) for name in names), dim=dim)
        builder.attention(heads=heads, kv_heads=heads, dim=dim, scale=1.0, distances=bias)
        builder.o_proj(
            tensors.linear(f"{layer}0.SelfAttention.o", hidden, heads * dim, biased=False), dim=dim, add=True
        )
        norm(f"{layer}1.layer_norm")
        feed = f"{layer}1.DenseReluDense."
        ups = [
            tensors.linear(feed + name, inner, hidden, biased=False)
            for name in (("wi_0", "wi_1") if config["gated"] else ("wi",))
        ]
        down = tensors.linear(f"{feed}wo", hidden, inner, biased=False)
        builder.mlp(ups[-1], down, activation, gate=ups[0] if config["gated"] else None, add=True)
    norm("encoder.final_layer_norm")
