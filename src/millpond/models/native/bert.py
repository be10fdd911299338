"""The plan of BERT and its relatives: post-norm layers with learned positions, or MPNet's relative ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from millpond.models.encoder import PackedEncoder, RelativeBias
from millpond.models.native import structs
from millpond.models.native.kernels import Kernels
from millpond.models.native.plan import Plan, PlanBuilder
from millpond.models.native.weight_packer import NotSupported

_EMBEDDING_PARTS = {"word_embeddings", "position_embeddings", "token_type_embeddings", "LayerNorm", "dropout"}


def plan(encoder: PackedEncoder, kernels: Kernels, dtype: torch.dtype) -> Plan:
    """The plan of a packed encoder whose linear layers are in torch's own form."""
    builder = PlanBuilder(kernels, dtype)
    embeddings: Any = encoder.embeddings
    if not {name for name, _ in embeddings.named_children()} <= _EMBEDDING_PARTS:
        raise NotSupported(f"embeddings of {type(embeddings).__name__}")
    types = getattr(embeddings, "token_type_embeddings", None)
    words, positions = embeddings.word_embeddings.weight, embeddings.position_embeddings.weight
    builder.embed(words, positions, None if types is None else types.weight)
    builder.norm(_norm(builder, embeddings.LayerNorm), words.shape[1])
    layers: Any = encoder.layers
    hidden, heads = layers[0].attention_out.weight.shape[0], layers[0].heads
    dim = hidden // heads
    if encoder.widen is not None:
        builder.up_proj(encoder.widen)
        builder.norm(structs.NormWeights(kind=structs.COPY), hidden)
    distances = None if encoder.bias is None else _distances(encoder.bias, len(positions))
    for i, layer in enumerate(layers):
        builder.heads(layer.qkv)
        builder.attention(
            heads=heads, kv_heads=heads, dim=dim, scale=dim**-0.5, distances=distances, last=i == len(layers) - 1
        )
        builder.o_proj(layer.attention_out)
        builder.norm(_norm(builder, layer.attention_norm.norm), hidden, residual=True)
        builder.mlp(layer.up, layer.down, layer.up.activation)
        builder.norm(_norm(builder, layer.norm.norm), hidden, residual=True)
    return builder.build()


def _norm(builder: PlanBuilder, norm: nn.Module) -> structs.NormWeights:
    if type(norm) is not nn.LayerNorm:
        raise NotSupported(f"norm {type(norm).__name__}")
    return builder.norm_weights(structs.LAYER_NORM, norm.weight, norm.bias, norm.eps)


def _distances(bias: RelativeBias, reach: int) -> torch.Tensor:
    """``[heads, 2 reach - 1]``: the bias of a key that is ``reach - 1`` positions before its query, and so on."""
    return bias.by_distance(torch.arange(1 - reach, reach)).T
