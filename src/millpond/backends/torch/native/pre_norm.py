"""Plans of pre-norm models: decoders of Llama's kind, and ModernBERT. The residual stream is in the sums."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from millpond.backends.torch.forwards.decoder import PackedDecoder, PackedLayer
from millpond.backends.torch.forwards.modernbert import PackedModernBert
from millpond.backends.torch.forwards.rms_norm import RMSNorm
from millpond.backends.torch.native import structs
from millpond.backends.torch.native.kernels import Kernels
from millpond.backends.torch.native.plan import Plan, PlanBuilder
from millpond.backends.torch.native.rotation import Rotation


def decoder_plan(decoder: PackedDecoder, kernels: Kernels, dtype: torch.dtype) -> Plan:
    """The plan of a decoder, which loses its layers, but not if it is ``NotSupported``.

    Each weight is released as soon as it is packed, so that no more than one is in memory twice.
    """
    parts: Any = decoder
    words: torch.Tensor = parts.embeddings.weight
    # Gemma's scale, rounded to the precision of the weights as transformers does.
    scale = getattr(decoder.embeddings, "embed_scale", None)
    builder = PlanBuilder(kernels, dtype)
    builder.embed(words, scale=1.0 if scale is None else float(scale.to(words.dtype)))
    rotations: dict[str | None, Rotation] = {}
    for layer in parts.layers:
        if layer.kind not in rotations:
            rotations[layer.kind] = Rotation(decoder.rotary, *(() if layer.kind is None else (layer.kind,)))
        _add_decoder_layer(builder, layer, rotations[layer.kind], words.shape[1], last=layer is parts.layers[-1])
    builder.norm(_rms(builder, decoder.norm), words.shape[1])
    decoder.layers = nn.ModuleList()
    return builder.build()


def _add_decoder_layer(
    builder: PlanBuilder, layer: PackedLayer, rotation: Rotation, columns: int, *, last: bool
) -> None:
    sizes = {"heads": layer.heads, "kv_heads": layer.kv_heads, "dim": layer.dim}
    masks = {name: getattr(layer.masking, name) for name in ("scale", "causal", "window", "softcap")}
    builder.norm(_rms(builder, layer.attention_norm), columns)
    builder.heads(layer.qkv_proj)
    norm = key_norm = None
    if layer.qk_norm is not None:  # a row for each query head, then for each key head; those of a kind are equal
        norm, key_norm = (_rms(builder, layer.qk_norm, row) for row in (0, layer.heads))
    builder.rotary(**sizes, norm=norm, key_norm=key_norm, rotation=rotation)
    builder.attention(**sizes, **masks, last=last)
    sandwich = layer.attention_post is not None
    target: dict[str, Any] = {"add": not sandwich, "branch": sandwich}
    builder.o_proj(layer.o_proj, **target)
    if layer.attention_post is not None:
        builder.norm(_rms(builder, layer.attention_post), columns, branch=True)
    builder.norm(_rms(builder, layer.norm), columns)
    activation: Any = getattr(layer.gate_proj, "activation", None)
    builder.mlp(layer.up_proj, layer.down_proj, activation, gate=layer.gate_proj, **target)
    if layer.post is not None:
        builder.norm(_rms(builder, layer.post), columns, branch=True)


def _rms(builder: PlanBuilder, norm: nn.Module, row: int | None = None) -> structs.NormWeights:
    """A norm's weights, or one row of those of heads."""
    assert isinstance(norm, RMSNorm)
    weight = norm.weight if row is None else norm.weight[row]
    return builder.norm_weights(structs.RMS_NORM, weight, None, norm.eps, offset=1.0 if norm.centred else 0.0)


def modernbert_plan(backbone: PackedModernBert, kernels: Kernels, dtype: torch.dtype) -> Plan:
    """The plan of a ModernBERT."""
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
        rows, hidden = layer.qkv.weight.shape
        sizes = {"heads": layer.heads, "kv_heads": layer.heads, "dim": rows // (3 * layer.heads)}
        builder.heads(layer.qkv)
        builder.rotary(**sizes, rotation=rotations[layer.kind])
        builder.attention(**sizes, scale=sizes["dim"] ** -0.5, window=layer.window, last=layer is layers[-1])
        builder.o_proj(layer.attention_out, add=True)
        builder.norm(builder.norm_of(layer.norm), hidden)
        gate = layer.gate_proj
        builder.mlp(layer.up_proj, layer.down_proj, gate.activation, gate=gate, add=True)
    builder.norm(builder.norm_of(backbone.norm), words.shape[1])
    return builder.build()
