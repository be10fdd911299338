"""Plans of post-norm encoders: BERT and its relatives, NomicBert and GTE, and jina-embeddings-v3 with its adapters."""

from __future__ import annotations

from typing import Any

import torch

from millpond.backends.torch.forwards.encoder import PackedEncoder
from millpond.backends.torch.forwards.jina import JinaEncoder
from millpond.backends.torch.forwards.rotary_encoder import PackedRotaryEncoder
from millpond.backends.torch.native import structs
from millpond.backends.torch.native.kernels import Kernels
from millpond.backends.torch.native.plan import Plan, PlanBuilder
from millpond.backends.torch.native.rotation import Rotation
from millpond.backends.torch.native.weight_packer import LowRank, NotSupported

_EMBEDDING_PARTS = {"word_embeddings", "position_embeddings", "token_type_embeddings", "LayerNorm", "dropout"}


def bert_plan(encoder: PackedEncoder, kernels: Kernels, dtype: torch.dtype) -> Plan:
    """Learned positions, or MPNet's relative ones."""
    builder = PlanBuilder(kernels, dtype)
    embeddings: Any = encoder.embeddings
    if not {name for name, _ in embeddings.named_children()} <= _EMBEDDING_PARTS:
        raise NotSupported(f"embeddings of {type(embeddings).__name__}")
    types = getattr(embeddings, "token_type_embeddings", None)
    words, positions = embeddings.word_embeddings.weight, embeddings.position_embeddings.weight
    builder.embed(words, positions, None if types is None else types.weight)
    builder.norm(builder.norm_of(embeddings.LayerNorm), words.shape[1])
    layers: Any = encoder.layers
    if encoder.widen is not None:
        builder.up_proj(encoder.widen)
        builder.norm(structs.NormWeights(kind=structs.COPY), layers[0].attention_out.weight.shape[0])
    distances = None
    if encoder.bias is not None:
        # [heads, 2 reach - 1]: the bias of a key that is reach - 1 positions before its query, and so on.
        reach = len(positions)
        distances = encoder.bias.by_distance(torch.arange(1 - reach, reach)).T
    for layer in layers:
        _add_layer(builder, layer, distances=distances, last=layer is layers[-1])
    return builder.build()


def rotary_plan(encoder: PackedRotaryEncoder, kernels: Kernels, dtype: torch.dtype) -> Plan:
    """Rotary positions and a gated feed forward."""
    builder = PlanBuilder(kernels, dtype)
    embeddings: Any = encoder.embeddings
    words = embeddings.word_embeddings.weight
    builder.embed(words, types=getattr(embeddings.token_type_embeddings, "weight", None))  # GTE may have no types
    builder.norm(builder.norm_of(embeddings.LayerNorm), words.shape[1])
    rotation = Rotation(encoder.rotary)
    for layer in encoder.layers:
        _add_layer(builder, layer, rotation=rotation, last=layer is encoder.layers[-1])
    return builder.build()


def jina_plan(encoder: JinaEncoder, kernels: Kernels, dtype: torch.dtype) -> Plan:
    """Rotary positions and low-rank adapters."""
    words, types = encoder.words, encoder.types
    adapter = _adapter(words)
    builder = PlanBuilder(kernels, dtype, adapters=words.copies, rank=0 if adapter is None else adapter.down.shape[2])
    builder.embed(words.weight, types=types.weight, adapter=adapter, type_adapter=_adapter(types))
    builder.norm(builder.norm_of(encoder.norm), words.weight.shape[1])
    rotation = Rotation(encoder.rotary)
    for layer in encoder.layers:
        _add_layer(builder, layer, rotation=rotation, last=layer is encoder.layers[-1])
    return builder.build()


def _add_layer(
    builder: PlanBuilder,
    layer: Any,
    *,
    rotation: Rotation | None = None,
    distances: torch.Tensor | None = None,
    last: bool,
) -> None:
    rows, hidden = _base(layer.qkv).weight.shape
    sizes = {"heads": layer.heads, "kv_heads": layer.heads, "dim": rows // (3 * layer.heads)}
    builder.heads(_base(layer.qkv), adapter=_adapter(layer.qkv))
    if rotation is not None:
        builder.rotary(**sizes, rotation=rotation)
    builder.attention(**sizes, scale=sizes["dim"] ** -0.5, distances=distances, last=last)
    builder.o_proj(_base(layer.attention_out), adapter=_adapter(layer.attention_out))
    builder.norm(builder.norm_of(layer.attention_norm.norm), hidden, residual=True)
    gate = getattr(layer, "gate_proj", None)
    up, down = (layer.up, layer.down) if gate is None else (layer.up_proj, layer.down_proj)
    activation = (up if gate is None else gate).activation
    low, narrow = _adapter(up), _adapter(down)
    builder.mlp(_base(up), _base(down), activation, gate=gate, adapter=low, down_adapter=narrow)
    builder.norm(builder.norm_of(layer.norm.norm), hidden, residual=True)


def _base(part: Any) -> Any:
    """The linear layer under an adapter, or the part itself."""
    return getattr(part, "base", part)


def _adapter(part: Any) -> LowRank | None:
    """The factors of a part's adapters; ``None`` if it has none."""
    down = getattr(part, "adapter_down", None)
    return None if down is None else LowRank(down=down, up=part.adapter_up)
