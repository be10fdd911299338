"""Plans of BERT and its relatives: learned positions, or MPNet's relative ones, and layer norms after residuals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.backends.native import structs
from millpond.backends.native.packing.weight_packer import Floats, Linear
from millpond.backends.native.plans.plan import PlanBuilder
from millpond.backends.native.plans.tensors import Tensors
from millpond.checkpoints.architecture import Architecture, EncoderNames
from millpond.errors import ModelLoadError

_EPSILON = 1e-12
_FARTHEST = 128  # distance from which on MPNet's buckets do not grow


def bert_plan(builder: PlanBuilder, tensors: Tensors, config: Mapping[str, Any], row: Architecture) -> None:
    """The steps of a BERT-like encoder, whose parts ``row.encoder`` names."""
    names = row.encoder
    assert names is not None
    fields = names.fields
    hidden, heads, positions = (int(config[name]) for name in (fields.hidden, fields.heads, fields.positions))
    if heads < 1 or hidden % heads:
        raise ModelLoadError(f"{fields.hidden} {hidden} is no multiple of {fields.heads} {heads} in config.json")
    narrow = int(config[fields.embedding]) if fields.embedding else hidden
    epsilon = float(config[fields.epsilon]) if fields.epsilon else _EPSILON
    types = int(config[fields.types]) if fields.types else 0
    embed(builder, tensors, words=int(config[fields.words]), positions=positions, types=types, columns=narrow)
    builder.norm(layer_norm(builder, tensors, "embeddings.LayerNorm", narrow, epsilon), narrow)
    if narrow != hidden:
        builder.up_proj(tensors.linear("embeddings_project", hidden, narrow))
        builder.norm(structs.NormWeights(kind=structs.COPY), hidden)
    distances = None
    if names.relative_bias:
        table = tensors.take(f"{names.relative_bias}.weight", int(config[fields.buckets]), heads)
        distances = relative_bias(builder.numbers(table), positions)
    count, inner, activation = int(config[fields.layers]), int(config[fields.inner]), str(config[fields.activation])
    for i in range(count):
        layer = PostNormLayer(builder, tensors, names, f"{names.layers}.{i}.", hidden)
        layer.attend(heads, epsilon, distances)
        layer.feed(inner, activation, epsilon)


def embed(
    builder: PlanBuilder, tensors: Tensors, *, words: int, positions: int = 0, types: int = 0, columns: int
) -> None:
    """The tables under BERT's names; 0 rows: none."""
    builder.embed(
        tensors.take("embeddings.word_embeddings.weight", words, columns),
        tensors.take("embeddings.position_embeddings.weight", positions, columns) if positions else None,
        tensors.take("embeddings.token_type_embeddings.weight", types, columns) if types else None,
    )


def layer_norm(
    builder: PlanBuilder,
    tensors: Tensors,
    name: str,
    columns: int,
    epsilon: float,
    *,
    biased: bool = True,
    dim: int | None = None,
) -> structs.NormWeights:
    """The weights of a layer norm; ``dim``: of all heads of so many columns as one row."""
    bias = tensors.take(f"{name}.bias", columns) if biased else None
    return builder.layer_norm(tensors.take(f"{name}.weight", columns), bias, epsilon, dim=dim)


class PostNormLayer:
    """Adds the steps of one layer."""

    def __init__(self, builder: PlanBuilder, tensors: Tensors, names: EncoderNames, prefix: str, hidden: int) -> None:
        self._builder, self._tensors, self._names, self._prefix = builder, tensors, names, prefix
        self._hidden = hidden

    def attend(self, heads: int, epsilon: float, distances: Floats | None = None) -> None:
        """Attention, its residual and norm."""
        names, hidden, builder = self._names, self._hidden, self._builder
        dim = hidden // heads
        builder.heads(*(self._linear(name, hidden, hidden) for name in (names.query, names.key, names.value)), dim=dim)
        builder.attention(heads=heads, kv_heads=heads, dim=dim, scale=dim**-0.5, distances=distances)
        builder.o_proj(self._linear(names.attention_out, hidden, hidden), dim=dim)
        self._norm(names.attention_norm, epsilon)

    def feed(self, inner: int, activation: str, epsilon: float) -> None:
        """The feed forward, its residual and norm."""
        up = self._linear(self._names.up, inner, self._hidden)
        self._builder.mlp(up, self._linear(self._names.down, self._hidden, inner), activation)
        self._norm(self._names.norm, epsilon)

    def _norm(self, name: str, epsilon: float) -> None:
        weights = layer_norm(self._builder, self._tensors, self._prefix + name, self._hidden, epsilon)
        self._builder.norm(weights, self._hidden, residual=True)

    def _linear(self, name: str, out: int, into: int) -> Linear:
        return self._tensors.linear(self._prefix + name, out, into)


def relative_bias(table: Floats, reach: int) -> Floats:  # [buckets, heads]
    """MPNet's bias ``[heads, 2 reach - 1]``: of a key that is reach - 1 positions before its query, and so on."""
    distances = np.arange(1 - reach, reach)
    return table[_buckets(distances, len(table) // 2)].T


def _buckets(distances: npt.NDArray[np.intp], per_side: int) -> npt.NDArray[np.intp]:
    """Half of the buckets for each direction; half of those exact, half logarithmic up to the farthest distance."""
    exact, apart = per_side // 2, np.abs(distances)
    growth = np.log(np.maximum(apart, 1).astype(np.float32) / np.float32(exact)) / np.log(np.float32(_FARTHEST / exact))
    far = np.minimum(exact + (growth * np.float32(per_side - exact)).astype(np.intp), per_side - 1)
    buckets: npt.NDArray[np.intp] = np.where(apart < exact, apart, far) + per_side * (distances > 0)
    return buckets
