"""Plan of DeBERTa v2 and v3."""

from __future__ import annotations

from typing import Any

import torch

from millpond.models.deberta import PackedDeberta
from millpond.models.native import structs
from millpond.models.native.distances import DistanceColumns, Distances, DistanceTerms
from millpond.models.native.kernels import Kernels
from millpond.models.native.plan import Plan, PlanBuilder
from millpond.models.native.weight_packer import NotSupported


def deberta_plan(encoder: PackedDeberta, kernels: Kernels, dtype: torch.dtype) -> Plan:
    """Post-norm layers whose attention adds two products with the embedding of each distance."""
    if encoder.convolution is not None:
        raise NotSupported("the convolution of DeBERTa v2 xlarge")
    embeddings: Any = encoder.embeddings
    builder = PlanBuilder(kernels, dtype)
    positions, types = (
        getattr(getattr(embeddings, name, None), "weight", None)
        for name in ("position_embeddings", "token_type_embeddings")
    )
    words = embeddings.word_embeddings.weight
    builder.embed(words, positions, types)
    if getattr(embeddings, "embed_proj", None) is not None:
        builder.norm(structs.NormWeights(kind=structs.COPY), words.shape[1])
        builder.up_proj(embeddings.embed_proj)
    layers: Any = encoder.layers
    hidden = layers[0].down.weight.shape[0]
    builder.norm(builder.norm_of(embeddings.LayerNorm), hidden)
    columns = None
    if encoder.distances is not None:
        own = encoder.distances
        columns = DistanceColumns.of(Distances(span=own.span, buckets=own.buckets, farthest=own.farthest))
    for layer in layers:
        sizes = {"heads": layer.heads, "kv_heads": layer.heads, "dim": layer.qkv.weight.shape[0] // (3 * layer.heads)}
        terms = None
        if columns is not None:
            terms = DistanceTerms(
                columns=columns,
                keys=_rows(layer.position_key, 1.0),
                queries=_rows(layer.position_query, 1 / layer.scale),
            )
        builder.heads(layer.qkv)
        builder.attention(**sizes, scale=layer.scale, terms=terms, last=layer is layers[-1])
        builder.o_proj(layer.attention_out)
        builder.norm(builder.norm_of(layer.attention_norm.norm), hidden, residual=True)
        builder.mlp(layer.up, layer.down, layer.up.activation)
        builder.norm(builder.norm_of(layer.norm.norm), hidden, residual=True)
    return builder.build()


def _rows(table: torch.Tensor | None, factor: float) -> Any:
    """``[heads, rows, dim]`` as float32 ``[rows, heads dim]``."""
    return None if table is None else (table.float() * factor).transpose(0, 1).flatten(1).numpy()
