"""NomicBert and GTE as a plan: post-norm layers with rotary positions and a gated feed forward."""

from __future__ import annotations

from typing import Any

import torch

from millpond.models.native.kernels import Kernels
from millpond.models.native.plan import Plan, PlanBuilder
from millpond.models.native.rotation import Rotation
from millpond.models.rotary_encoder import PackedRotaryEncoder


def plan(backbone: PackedRotaryEncoder, kernels: Kernels, dtype: torch.dtype) -> Plan:
    """The plan of a packed backbone whose linear layers are in torch's own form."""
    builder = PlanBuilder(kernels, dtype)
    embeddings: Any = backbone.embeddings
    words = embeddings.word_embeddings.weight
    builder.embed(words, types=getattr(embeddings.token_type_embeddings, "weight", None))  # GTE may have no types
    builder.norm(builder.norm_of(embeddings.LayerNorm), words.shape[1])
    rotation = Rotation(backbone.rotary)
    layers: Any = backbone.layers
    for i, layer in enumerate(layers):
        _add_layer(builder, layer, rotation, last=i == len(layers) - 1)
    return builder.build()


def _add_layer(builder: PlanBuilder, layer: Any, rotation: Rotation, *, last: bool) -> None:
    qkv = layer.qkv
    hidden = qkv.weight.shape[1]
    heads, dim = layer.heads, qkv.weight.shape[0] // (3 * layer.heads)
    builder.heads(qkv)
    builder.rotary(heads=heads, kv_heads=heads, dim=dim, rotation=rotation)
    builder.attention(heads=heads, kv_heads=heads, dim=dim, scale=dim**-0.5, last=last)
    builder.o_proj(layer.attention_out)
    builder.norm(builder.norm_of(layer.attention_norm.norm), hidden, residual=True)
    gate = layer.gate_proj
    builder.mlp(layer.up_proj, layer.down_proj, gate.activation, gate=gate)
    builder.norm(builder.norm_of(layer.norm.norm), hidden, residual=True)
