"""The plan of ALBERT: BERT's layer, whose weights all layers of a group share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millpond.backends.native import structs
from millpond.backends.native.plans.plan import PlanBuilder
from millpond.backends.native.plans.post_norm import EncoderLayer, embed, layer_norm
from millpond.backends.native.plans.tensors import Tensors
from millpond.checkpoints.architecture import EncoderNames
from millpond.errors import ModelLoadError

_NAMES = EncoderNames(
    prefix="albert",
    query="attention.query",
    key="attention.key",
    value="attention.value",
    attention_out="attention.dense",
    attention_norm="attention.LayerNorm",
    up="ffn",
    down="ffn_output",
    norm="full_layer_layer_norm",
)


def albert_plan(builder: PlanBuilder, tensors: Tensors, config: Mapping[str, Any]) -> None:
    """The steps of an ALBERT; those of a group's later layers read the weights of its first."""
    hidden, heads, narrow = (int(config[name]) for name in ("hidden_size", "num_attention_heads", "embedding_size"))
    if heads < 1 or hidden % heads:
        raise ModelLoadError(f"hidden_size {hidden} is no multiple of num_attention_heads {heads} in config.json")
    epsilon = float(config["layer_norm_eps"])
    rows = {"words": "vocab_size", "positions": "max_position_embeddings", "types": "type_vocab_size"}
    embed(builder, tensors, columns=narrow, **{name: int(config[field]) for name, field in rows.items()})
    builder.norm(layer_norm(builder, tensors, "embeddings.LayerNorm", narrow, epsilon), narrow)
    builder.up_proj(tensors.linear("encoder.embedding_hidden_mapping_in", hidden, narrow))
    builder.norm(structs.NormWeights(kind=structs.COPY), hidden)
    layers, groups = int(config["num_hidden_layers"]), int(config["num_hidden_groups"])
    begun: dict[int, tuple[int, int]] = {}  # the steps of each group
    for i in range(layers):
        group = int(i / (layers / groups))
        if group in begun:
            builder.repeat(*begun[group])
            continue
        first = builder.count
        for inner in range(int(config["inner_group_num"])):
            prefix = f"encoder.albert_layer_groups.{group}.albert_layers.{inner}."
            layer = EncoderLayer(builder, tensors, _NAMES, prefix, hidden)
            layer.attend(heads, epsilon)
            layer.feed(int(config["intermediate_size"]), str(config["hidden_act"]), epsilon)
        begun[group] = first, builder.count
