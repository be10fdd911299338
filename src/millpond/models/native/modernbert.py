"""ModernBERT as a plan: pre-norm layers, the residual stream in the sums."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from millpond.models.modernbert import PackedModernBert
from millpond.models.native.kernels import Kernels
from millpond.models.native.plan import Plan, PlanBuilder
from millpond.models.native.rotation import Rotation


def plan(backbone: PackedModernBert, kernels: Kernels, dtype: torch.dtype) -> Plan:
    """The plan of a packed backbone whose linear layers are in torch's own form."""
    builder = PlanBuilder(kernels, dtype)
    embeddings: Any = backbone.embeddings
    words = embeddings.tok_embeddings.weight
    builder.embed(words)
    builder.norm(builder.norm_of(embeddings.norm), words.shape[1], keep=True)
    rotations: dict[str, Rotation] = {}
    layers: Any = backbone.layers
    for i, layer in enumerate(layers):
        if layer.kind not in rotations:
            rotations[layer.kind] = Rotation(backbone.rotary, layer.kind)
        # The first layer has no norm before its attention: the states are those of the embeddings already.
        if i or not isinstance(layer.attention_norm, nn.Identity):
            builder.norm(builder.norm_of(layer.attention_norm), words.shape[1])
        _add_layer(builder, layer, rotations[layer.kind], last=i == len(layers) - 1)
    builder.norm(builder.norm_of(backbone.norm), words.shape[1])
    return builder.build()


def _add_layer(builder: PlanBuilder, layer: Any, rotation: Rotation, *, last: bool) -> None:
    qkv = layer.qkv
    hidden = qkv.weight.shape[1]
    heads, dim = layer.heads, qkv.weight.shape[0] // (3 * layer.heads)
    builder.heads(qkv)
    builder.rotary(heads=heads, kv_heads=heads, dim=dim, rotation=rotation)
    builder.attention(heads=heads, kv_heads=heads, dim=dim, scale=dim**-0.5, window=layer.window, last=last)
    builder.o_proj(layer.attention_out, add=True)
    builder.norm(builder.norm_of(layer.norm), hidden)
    gate = layer.gate_proj
    builder.mlp(layer.up_proj, layer.down_proj, gate.activation, gate=gate, add=True)
