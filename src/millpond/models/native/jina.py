"""jina-embeddings-v3 as a plan: post-norm layers with rotary positions and low-rank adapters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from millpond.models.jina import JinaEncoder
from millpond.models.native.kernels import Kernels
from millpond.models.native.plan import Plan, PlanBuilder
from millpond.models.native.rotation import Rotation
from millpond.models.native.weight_packer import LowRank


def plan(backbone: JinaEncoder, kernels: Kernels, dtype: torch.dtype) -> Plan:
    """The plan of a backbone whose linear layers are in torch's own form."""
    words, types = backbone.words, backbone.types
    layers: Any = backbone.layers
    adapter = _adapter(words)
    rank = 0 if adapter is None else adapter.down.shape[2]
    builder = PlanBuilder(kernels, dtype, adapters=words.copies, rank=rank)
    builder.embed(words.weight, types=types.weight, adapter=adapter, type_adapter=_adapter(types))
    hidden = words.weight.shape[1]
    builder.norm(builder.norm_of(backbone.norm), hidden)
    rotation = Rotation(backbone.rotary)
    for i, layer in enumerate(layers):
        heads, dim = layer.heads, hidden // layer.heads
        builder.heads(layer.qkv.base, adapter=_adapter(layer.qkv))
        builder.rotary(heads=heads, kv_heads=heads, dim=dim, rotation=rotation)
        builder.attention(heads=heads, kv_heads=heads, dim=dim, scale=dim**-0.5, last=i == len(layers) - 1)
        builder.o_proj(layer.attention_out.base, adapter=_adapter(layer.attention_out))
        builder.norm(builder.norm_of(layer.attention_norm.norm), hidden, residual=True)
        up, down = layer.up, layer.down
        builder.mlp(up.base, down.base, up.activation, adapter=_adapter(up), down_adapter=_adapter(down))
        builder.norm(builder.norm_of(layer.norm.norm), hidden, residual=True)
    return builder.build()


def _adapter(part: nn.Module) -> LowRank | None:
    """The factors of a part's adapters; ``None`` if it has none."""
    down, up = part.adapter_down, part.adapter_up
    if down is None:
        return None
    assert isinstance(down, torch.Tensor) and isinstance(up, torch.Tensor)
    return LowRank(down=down, up=up)
