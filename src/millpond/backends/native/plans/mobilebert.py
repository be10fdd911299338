"""Plan of MobileBERT: narrow layers between wide states, trigrams, and norms that only scale and shift.

What a layer's queries, keys and residual read is the states through a narrow linear layer and such a norm: both are
linear, so they are multiplied into the weights behind them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.backends.native import structs
from millpond.backends.native.packing.weight_packer import Linear, padded, tensor_of
from millpond.backends.native.plans.plan import PlanBuilder
from millpond.backends.native.plans.tensors import Tensors

Doubles = npt.NDArray[np.float64]


def mobilebert_plan(builder: PlanBuilder, tensors: Tensors, config: Mapping[str, Any]) -> None:
    """The steps of a MobileBERT; between layers the branch holds the states, in float32."""
    model = _MobileBert(builder, tensors, config)
    model.embed()
    for i in range(config["num_hidden_layers"]):
        model.add_layer(f"encoder.layer.{i}.")


class _MobileBert:
    """Adds the steps of a model."""

    def __init__(self, builder: PlanBuilder, tensors: Tensors, config: Mapping[str, Any]) -> None:
        self._builder, self._tensors, self._config = builder, tensors, config
        self._hidden, self._narrow = int(config["hidden_size"]), int(config["intra_bottleneck_size"])
        self._heads, self._inner = int(config["num_attention_heads"]), int(config["intermediate_size"])

    def embed(self) -> None:
        """Three neighbouring words, widened, then position, type and norm."""
        config, builder, take, hidden = self._config, self._builder, self._tensors.take, self._hidden
        columns = int(config["embedding_size"])
        builder.embed(take("embeddings.word_embeddings.weight", config["vocab_size"], columns), trigrams=True)
        builder.norm(structs.NormWeights(kind=structs.COPY), 3 * padded(columns))
        whole = self._tensors.linear("embeddings.embedding_transformation", hidden, 3 * columns)
        builder.up_proj(whole, piece=columns)
        builder.place(
            take("embeddings.position_embeddings.weight", config["max_position_embeddings"], hidden),
            take("embeddings.token_type_embeddings.weight", config["type_vocab_size"], hidden),
        )
        self._norm("embeddings.LayerNorm", hidden, carry=True)

    def add_layer(self, layer: str) -> None:
        """A layer: attention and several feed forwards of narrow states, whose sum with the wide ones is normed."""
        builder, hidden, narrow = self._builder, self._hidden, self._narrow
        dim, activation = narrow // self._heads, str(self._config["hidden_act"])
        shared = self._bottleneck(f"{layer}bottleneck.attention")
        queries, keys = (self._behind(f"{layer}attention.self.{part}", shared) for part in ("query", "key"))
        values = self._tensors.linear(f"{layer}attention.self.value", narrow, hidden)
        builder.heads(queries, keys, values, dim=dim)
        builder.attention(heads=self._heads, kv_heads=self._heads, dim=dim, scale=dim**-0.5)
        weight, bias = self._bottleneck(f"{layer}bottleneck.input")
        builder.up_proj(Linear(weight=tensor_of(weight), bias=tensor_of(bias)))
        builder.o_proj(self._tensors.linear(f"{layer}attention.output.dense", narrow, narrow), dim=dim, add=True)
        self._norm(f"{layer}attention.output.LayerNorm", narrow, keep=True)
        feeds = int(self._config["num_feedforward_networks"]) - 1
        for feed in (*(f"{layer}ffn.{i}." for i in range(feeds)), layer):
            up = self._tensors.linear(f"{feed}intermediate.dense", self._inner, narrow)
            builder.mlp(up, self._tensors.linear(f"{feed}output.dense", narrow, self._inner), activation, add=True)
            self._norm(f"{feed}output.LayerNorm", narrow, keep=True)
        builder.up_proj(self._tensors.linear(f"{layer}output.bottleneck.dense", hidden, narrow))
        builder.norm(structs.NormWeights(kind=structs.COPY), hidden, branch=True)
        self._norm(f"{layer}output.bottleneck.LayerNorm", hidden, carry=True)

    def _norm(self, name: str, columns: int, **targets: Any) -> None:
        weight, bias = (self._tensors.take(f"{name}.{kind}", columns) for kind in ("weight", "bias"))
        self._builder.norm(self._builder.scale_norm(weight, bias), columns, **targets)

    def _bottleneck(self, name: str) -> tuple[Doubles, Doubles]:
        """Weight and bias of a narrow linear layer and the norm behind it."""
        weight, bias = self._numbers(f"{name}.dense.weight", self._narrow, self._hidden), f"{name}.dense.bias"
        scale, shift = (self._numbers(f"{name}.LayerNorm.{kind}", self._narrow) for kind in ("weight", "bias"))
        return scale[:, None] * weight, scale * self._numbers(bias, self._narrow) + shift

    def _behind(self, name: str, before: tuple[Doubles, Doubles]) -> Linear:
        """A linear layer of what another one gives."""
        weight, bias = self._numbers(f"{name}.weight", self._narrow, self._narrow), f"{name}.bias"
        whole = weight @ before[1] + self._numbers(bias, self._narrow)
        return Linear(weight=tensor_of(weight @ before[0]), bias=tensor_of(whole))

    def _numbers(self, name: str, *shape: int) -> Doubles:
        return self._tensors.take(name, *shape).float32().astype(np.float64)
