"""The plan of BART: an encoder, and a decoder that reads the same text one token later and attends to the encoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millpond.backends.native.plans.plan import PlanBuilder
from millpond.backends.native.plans.tensors import Tensors


def bart_plan(builder: PlanBuilder, tensors: Tensors, config: Mapping[str, Any]) -> None:
    """The steps of both; the states are the decoder's."""
    hidden, words, positions = (int(config[name]) for name in ("hidden_size", "vocab_size", "max_position_embeddings"))
    scale = hidden**0.5 if config["scale_embedding"] else 1.0
    activation = str(config["hidden_act"])
    # Files have the one table under any of these names, or all.
    tables = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    table = tensors.take(next((name for name in tables if name in tensors), tables[0]), words, hidden)
    for name in tables:
        tensors.leave(name)

    def norm(name: str, *, residual: bool = True) -> None:
        weight, bias = (tensors.take(f"{name}.{part}", hidden) for part in ("weight", "bias"))
        builder.norm(builder.layer_norm(weight, bias, 1e-5), hidden, residual=residual)

    def attend(name: str, heads: int, *, cross: bool = False, causal: bool = False) -> None:
        dim = hidden // heads
        query, key, value = (tensors.linear(f"{name}.{letter}_proj", hidden, hidden) for letter in "qkv")
        if cross:
            builder.cross_heads(query, key, value, dim=dim)
        else:
            builder.heads(query, key, value, dim=dim)
        builder.attention(heads=heads, kv_heads=heads, dim=dim, scale=dim**-0.5, causal=causal)
        builder.o_proj(tensors.linear(f"{name}.out_proj", hidden, hidden), dim=dim)
        norm(f"{name}_layer_norm")

    for part in ("encoder", "decoder"):
        decodes = part == "decoder"
        start = int(config["decoder_start_token_id"]) if decodes else None
        places = tensors.take(f"{part}.embed_positions.weight", positions, hidden)
        builder.embed(table, places, scale=scale, start=start)
        norm(f"{part}.layernorm_embedding", residual=False)
        heads, inner = int(config[f"{part}_attention_heads"]), int(config[f"{part}_ffn_dim"])
        for i in range(int(config[f"{part}_layers"])):
            layer = f"{part}.layers.{i}."
            attend(f"{layer}self_attn", heads, causal=decodes)
            if decodes:
                attend(f"{layer}encoder_attn", heads, cross=True)
            up, down = tensors.linear(f"{layer}fc1", inner, hidden), tensors.linear(f"{layer}fc2", hidden, inner)
            builder.mlp(up, down, activation)
            norm(f"{layer}final_layer_norm")
        if not decodes:
            builder.keep_states()
