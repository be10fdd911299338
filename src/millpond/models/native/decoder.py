"""The plan of a decoder's forward: pre-norm layers of RMS norms, rotary positions and a gated feed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from millpond.models.decoder import PackedDecoder, PackedLayer
from millpond.models.native import structs
from millpond.models.native.kernels import Kernels
from millpond.models.native.plan import Plan, PlanBuilder
from millpond.models.native.rotation import Rotation
from millpond.models.rms_norm import RMSNorm


def plan(decoder: PackedDecoder, kernels: Kernels, dtype: torch.dtype) -> Plan:
    """The plan of a packed decoder whose linear layers are in torch's own form; it loses its layers.

    Each weight is released as soon as it is packed, so that no more than one is in memory twice.
    """
    parts: Any = decoder
    words: torch.Tensor = parts.embeddings.weight
    builder = PlanBuilder(kernels, dtype)
    builder.embed(words, scale=_embedding_scale(decoder.embeddings, words.dtype))
    rotations: dict[str | None, Rotation] = {}
    last = len(decoder.layers) - 1
    for i, layer in enumerate(decoder.layers):
        assert isinstance(layer, PackedLayer)
        kind = layer.kind
        if kind not in rotations:
            rotations[kind] = Rotation(decoder.rotary, *(() if kind is None else (kind,)))
        _add_layer(builder, layer, rotations[kind], words.shape[1], last=i == last)
    builder.norm(_norm_weights(builder, decoder.norm), words.shape[1])
    decoder.layers = nn.ModuleList()
    return builder.build()


def _add_layer(builder: PlanBuilder, layer: PackedLayer, rotation: Rotation, columns: int, *, last: bool) -> None:
    sizes = {"heads": layer.heads, "kv_heads": layer.kv_heads, "dim": layer.dim}
    masking = layer.masking
    builder.norm(_norm_weights(builder, layer.attention_norm), columns)
    builder.heads(layer.qkv_proj)
    norm = key_norm = None
    if layer.qk_norm is not None:  # a row for each query head, then for each key head; those of a kind are equal
        norm = _norm_weights(builder, layer.qk_norm, 0)
        key_norm = _norm_weights(builder, layer.qk_norm, layer.heads)
    builder.rotary(**sizes, norm=norm, key_norm=key_norm, rotation=rotation)
    builder.attention(
        **sizes,
        scale=masking.scale,
        causal=masking.causal,
        window=masking.window,
        softcap=masking.softcap,
        last=last,
    )
    sandwich = layer.attention_post is not None
    builder.o_proj(layer.o_proj, add=not sandwich, branch=sandwich)
    if layer.attention_post is not None:
        builder.norm(_norm_weights(builder, layer.attention_post), columns, branch=True)
    builder.norm(_norm_weights(builder, layer.norm), columns)
    builder.mlp(
        layer.up_proj,
        layer.down_proj,
        getattr(layer.gate_proj, "activation", None),
        gate=layer.gate_proj,
        add=not sandwich,
        branch=sandwich,
    )
    if layer.post is not None:
        builder.norm(_norm_weights(builder, layer.post), columns, branch=True)


def _norm_weights(builder: PlanBuilder, norm: nn.Module, row: int | None = None) -> structs.NormWeights:
    """A norm's weights, or one row of those of heads."""
    assert isinstance(norm, RMSNorm)
    weight = norm.weight if row is None else norm.weight[row]
    return builder.norm_weights(structs.RMS_NORM, weight, None, norm.eps, offset=1.0 if norm.centred else 0.0)


def _embedding_scale(embeddings: Any, dtype: torch.dtype) -> float:
    """Gemma's, rounded to the precision of the weights as transformers does."""
    scale = getattr(embeddings, "embed_scale", None)
    return 1.0 if scale is None else float(scale.to(dtype))
