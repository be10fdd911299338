"""Plan of DeBERTa: post-norm layers whose attention adds two products with the embedding of each distance."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import numpy as np

from millpond.backends.native import structs
from millpond.backends.native.packing.weight_packer import Floats, Linear, NotSupported
from millpond.backends.native.plans.distances import ComputedTensor, DistanceColumns, Distances, DistanceTerms
from millpond.backends.native.plans.plan import PlanBuilder
from millpond.backends.native.plans.post_norm import embed, layer_norm
from millpond.backends.native.plans.tensors import Tensors
from millpond.checkpoints.families.deberta import has_near_distances_only
from millpond.checkpoints.stored_tensor import StoredTensor


def deberta_plan(builder: PlanBuilder, tensors: Tensors, config: Mapping[str, Any]) -> None:
    """The steps of a DeBERTa; that with a convolution beside its first layer (v2 xlarge) has none."""
    if config["conv_kernel_size"] > 0:
        raise NotSupported("the convolution of DeBERTa v2 xlarge")
    model = _Deberta(builder, tensors, config)
    model.embed()
    for i in range(config["num_hidden_layers"]):
        model.add_layer(f"encoder.layer.{i}.")


class _Deberta:
    """Adds the steps of a model."""

    def __init__(self, builder: PlanBuilder, tensors: Tensors, config: Mapping[str, Any]) -> None:
        self._builder, self._tensors, self._config = builder, tensors, config
        self._hidden, self._heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        self._width = int(config.get("attention_head_size") or self._hidden // self._heads) * self._heads
        self._used = frozenset(config["pos_att_type"] or ()) & {"c2p", "p2c"}
        self._epsilon = float(config["layer_norm_eps"])
        self._columns: DistanceColumns | None = None
        self._normed = "layer_norm" in str(config["norm_rel_ebd"]).lower()
        if config["relative_attention"]:
            distances = _distances(config)
            self._columns = DistanceColumns.of(distances)
            self._rows = 2 * distances.span
            self._table = self._table_of(self._rows)
        elif self._normed:
            self._scale_and_shift()  # which the file has, and nothing reads

    def embed(self) -> None:
        """The sum of the tables, widened if it is narrower than the layers, and its norm."""
        config, tensors, builder = self._config, self._tensors, self._builder
        narrow, hidden = int(config["embedding_size"]), self._hidden
        positions = config["max_position_embeddings"] if config["position_biased_input"] else 0
        if narrow != hidden and (positions or config["type_vocab_size"]):  # these tables are as wide as the layers
            raise NotSupported("positions or token types of other columns than the words")
        if not positions:  # most files have a table of the training
            tensors.leave("embeddings.position_embeddings.weight")
        embed(
            builder,
            tensors,
            words=config["vocab_size"],
            positions=positions,
            types=config["type_vocab_size"],
            columns=narrow,
        )
        if narrow != hidden:
            builder.norm(structs.NormWeights(kind=structs.COPY), narrow)
            builder.up_proj(tensors.linear("embeddings.embed_proj", hidden, narrow, biased=False))
        builder.norm(layer_norm(builder, tensors, "embeddings.LayerNorm", hidden, self._epsilon), hidden)

    def add_layer(self, prefix: str) -> None:
        """A layer, whose scores have the variance of a single product by one factor for all their terms."""
        config, builder, hidden, width = self._config, self._builder, self._hidden, self._width
        linear = partial(self._linear, prefix)
        heads, dim = self._heads, width // self._heads
        own = {name: linear(f"attention.self.{name}_proj", width, hidden) for name in ("query", "key", "value")}
        builder.heads(*own.values(), dim=dim)
        scale = (dim * (1 + len(self._used))) ** -0.5
        terms = self._terms(prefix, own)
        builder.attention(heads=heads, kv_heads=heads, dim=dim, scale=scale, distances=terms)
        builder.o_proj(linear("attention.output.dense", hidden, width), dim=dim)
        self._norm(f"{prefix}attention.output.LayerNorm")
        up, inner = config["hidden_act"], int(config["intermediate_size"])
        builder.mlp(linear("intermediate.dense", inner, hidden), linear("output.dense", hidden, inner), up)
        self._norm(f"{prefix}output.LayerNorm")

    def _terms(self, prefix: str, own: Mapping[str, Linear]) -> DistanceTerms | None:
        """A layer's projections of the table of distances, which never change."""
        if self._columns is None or not self._used:
            return None
        parts: dict[str, ComputedTensor] = {}
        for kind, name in (("c2p", "key"), ("p2c", "query")):
            if kind in self._used:
                shared = self._config["share_att_key"]
                name_of_own = f"attention.self.pos_{name}_proj"
                layer = own[name] if shared else self._linear(prefix, name_of_own, self._width, self._hidden)
                parts[name] = self._projected(layer)
        return DistanceTerms(columns=self._columns, keys=parts.get("key"), queries=parts.get("query"))

    def _projected(self, layer: Linear) -> ComputedTensor:
        table, builder = self._table, self._builder

        def numbers() -> Floats:
            product: Floats = table() @ builder.numbers(layer.weight).T
            return product if layer.bias is None else product + builder.numbers(layer.bias)

        return ComputedTensor.of(layer.weight.name, (self._rows, self._width), numbers)

    def _table_of(self, rows: int) -> Callable[[], Floats]:
        """The embeddings of distances, normed if config.json says so; computed once, when they are read."""
        builder, epsilon = self._builder, np.float32(self._epsilon)
        whole = self._tensors.take("encoder.rel_embeddings.weight", rows, self._hidden)
        norm = self._scale_and_shift() if self._normed else None

        @cache
        def table() -> Floats:
            numbers = builder.numbers(whole)
            if norm is None:
                return numbers
            scale, shift = map(builder.numbers, norm)
            off = numbers - numbers.mean(1, keepdims=True)
            normed: Floats = off / np.sqrt(np.square(off).mean(1, keepdims=True) + epsilon) * scale + shift
            return normed

        return table

    def _scale_and_shift(self) -> tuple[StoredTensor, StoredTensor]:
        take = self._tensors.take
        return take("encoder.LayerNorm.weight", self._hidden), take("encoder.LayerNorm.bias", self._hidden)

    def _norm(self, name: str) -> None:
        weights = layer_norm(self._builder, self._tensors, name, self._hidden, self._epsilon)
        self._builder.norm(weights, self._hidden, residual=True)

    def _linear(self, prefix: str, name: str, out: int, into: int) -> Linear:
        biased = self._config["key_bias"] or not name.endswith("key_proj")
        return self._tensors.linear(prefix + name, out, into, biased=biased)


def _distances(config: Mapping[str, Any]) -> Distances:
    """How distances choose rows of the table."""
    buckets, farthest = int(config["position_buckets"]), int(config["max_relative_positions"])
    farthest = int(config["max_position_embeddings"]) if farthest < 1 else farthest
    if buckets < 1:
        return Distances(span=farthest, buckets=False, farthest=farthest)
    logarithmic = farthest > buckets // 2 + 1
    if not logarithmic and not has_near_distances_only(config):
        raise NotSupported(f"position_buckets={buckets} with distances up to {farthest}")
    return Distances(span=buckets, buckets=logarithmic, farthest=farthest)
