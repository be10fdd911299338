"""Plans of BERT and its relatives: learned, relative or rotary positions, layer norms after residuals or before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.backends.native import structs
from millpond.backends.native.packing.weight_packer import Floats, Linear, padded, tensor_of
from millpond.backends.native.plans.distances import ComputedTensor, DistanceColumns, Distances, DistanceTerms
from millpond.backends.native.plans.plan import PlanBuilder
from millpond.backends.native.plans.rotation import Rotation
from millpond.backends.native.plans.tensors import Tensors
from millpond.checkpoints.architecture import RELATIVE, Architecture, EncoderFields, EncoderNames
from millpond.checkpoints.stored_tensor import StoredTensor
from millpond.errors import ModelLoadError

_EPSILON = 1e-12
_FARTHEST = 128  # distance from which on MPNet's buckets do not grow


def bert_plan(builder: PlanBuilder, tensors: Tensors, config: Mapping[str, Any], row: Architecture) -> None:
    """The steps of a BERT-like encoder, whose parts ``row.encoder`` names."""
    names = row.encoder
    assert names is not None
    fields = names.fields
    hidden, heads = int(config[fields.hidden]), int(config[fields.heads])
    positions, types, tasks = (
        int(config[name]) if name else 0 for name in (fields.positions, fields.types, fields.tasks)
    )
    if heads < 1 or hidden % heads:
        raise ModelLoadError(f"{fields.hidden} {hidden} is no multiple of {fields.heads} {heads} in config.json")
    narrow = int(config[fields.embedding]) if fields.embedding else hidden
    epsilon = float(config[fields.epsilon]) if fields.epsilon else _EPSILON
    relative = str(config.get("position_embedding_type")) in RELATIVE
    if relative:
        tensors.leave("embeddings.position_embeddings.weight")  # which the file has all the same
    embed(
        builder,
        tensors,
        words=int(config[fields.words]),
        positions=0 if names.rotary or relative else positions,
        types=types,
        tasks=tasks if config.get("use_task_id") else 0,
        columns=narrow,
        scale=hidden**0.5 if config.get("rescale_embeddings") else 1.0,
    )
    if not names.last_norm:
        builder.norm(layer_norm(builder, tensors, "embeddings.LayerNorm", narrow, epsilon), narrow)
    if narrow != hidden:
        builder.up_proj(tensors.linear(names.widen, hidden, narrow))
        builder.norm(structs.NormWeights(kind=structs.COPY), hidden)
    builder.end_layer()
    distances: Floats | DistanceTerms | None = None
    columns = DistanceColumns.of(Distances(span=positions, buckets=False, farthest=positions)) if relative else None
    if names.relative_bias:
        table = tensors.take(f"{names.relative_bias}.weight", int(config[fields.buckets]), heads)
        distances = relative_bias(builder.numbers(table), positions)
    rotation = None
    if names.rotary:
        tensors.leave(f"{names.rotary}.weight")  # computed here
        rotation = sinusoids(hidden // heads)
    count, inner, activation = int(config[fields.layers]), int(config[fields.inner]), str(config[fields.activation])
    windows = windows_of(config, fields, count)
    for i in range(count):
        layer = EncoderLayer(builder, tensors, names, f"{names.layers}.{i}.", hidden)
        if columns is not None:
            name = f"{names.layers}.{i}.{names.query.rpartition('.')[0]}.distance_embedding.weight"
            table = _by_head(tensors.take(name, 2 * positions - 1, hidden // heads), heads)
            both = config["position_embedding_type"] == "relative_key_query"
            distances = DistanceTerms(columns=columns, keys=table, queries=table if both else None)
        layer.attend(
            heads,
            epsilon,
            distances=distances,
            rotation=rotation,
            window=windows[i],
            biased=bool(config.get("use_bias", True)),
        )
        layer.feed(inner, activation, epsilon)
        builder.end_layer()
    if names.last_norm:
        builder.norm(layer_norm(builder, tensors, names.last_norm, hidden, epsilon), hidden)


def embed(
    builder: PlanBuilder,
    tensors: Tensors,
    *,
    words: int,
    positions: int = 0,
    types: int = 0,
    tasks: int = 0,
    columns: int,
    scale: float = 1.0,
) -> None:
    """The tables under BERT's names; 0 rows: none. Every text has the first of ERNIE's tasks; words are scaled."""
    kinds = tensors.take("embeddings.token_type_embeddings.weight", types, columns) if types else None
    if tasks:
        task = builder.numbers(tensors.take("embeddings.task_type_embeddings.weight", tasks, columns))[:1]
        kinds = tensor_of(task if kinds is None else builder.numbers(kinds) + task)
    builder.embed(
        tensors.take("embeddings.word_embeddings.weight", words, columns),
        tensors.take("embeddings.position_embeddings.weight", positions, columns) if positions else None,
        kinds,
        scale=scale,
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


class EncoderLayer:
    """Adds the steps of one layer, with norms of sums (post-norm) or of what attention and feed forward read."""

    def __init__(self, builder: PlanBuilder, tensors: Tensors, names: EncoderNames, prefix: str, hidden: int) -> None:
        self._builder, self._tensors, self._names, self._prefix = builder, tensors, names, prefix
        self._hidden, self._before = hidden, bool(names.last_norm)

    def attend(
        self,
        heads: int,
        epsilon: float,
        *,
        distances: Floats | DistanceTerms | None = None,
        rotation: Rotation | None = None,
        window: int | None = None,
        biased: bool = True,
    ) -> None:
        """Attention, its residual and norm; ``biased``: whether queries, keys and values are."""
        names, hidden, builder = self._names, self._hidden, self._builder
        dim = hidden // heads
        self._norm(names.attention_norm, epsilon, before=True)
        parts = (
            self._tensors.linear(self._prefix + name, hidden, hidden, biased=biased)
            for name in (names.query, names.key, names.value)
        )
        builder.heads(*parts, dim=dim, turned=0 if rotation is None else 2 * heads)
        if rotation is not None:
            builder.rotary(heads=heads, kv_heads=heads, dim=dim, rotation=rotation)
        builder.attention(heads=heads, kv_heads=heads, dim=dim, scale=dim**-0.5, distances=distances, window=window)
        builder.o_proj(self._linear(names.attention_out, hidden, hidden), dim=dim, add=self._before)
        self._norm(names.attention_norm, epsilon)

    def feed(self, inner: int, activation: str, epsilon: float) -> None:
        """The feed forward, its residual and norm."""
        self._norm(self._names.norm, epsilon, before=True)
        up = self._linear(self._names.up, inner, self._hidden)
        self._builder.mlp(up, self._linear(self._names.down, self._hidden, inner), activation, add=self._before)
        self._norm(self._names.norm, epsilon)

    def _norm(self, name: str, epsilon: float, *, before: bool = False) -> None:
        """A norm, if the family has it here."""
        if before != self._before:
            return
        weights = layer_norm(self._builder, self._tensors, self._prefix + name, self._hidden, epsilon)
        self._builder.norm(weights, self._hidden, residual=not before)

    def _linear(self, name: str, out: int, into: int) -> Linear:
        return self._tensors.linear(self._prefix + name, out, into)


def _by_head(table: StoredTensor, heads: int) -> StoredTensor:
    """A table ``[2 positions - 1, dim]`` for each head, ``[2 positions, heads dim]``: distance 0 is in the middle."""
    rows, dim = table.shape
    return ComputedTensor.of(
        table.name, (rows + 1, heads * dim), lambda: np.tile(np.pad(table.float32(), ((1, 0), (0, 0))), (1, heads))
    )


def sinusoids(dim: int) -> Rotation:
    """RoFormer's rotation: that of its table of sines and cosines, whose angles are not rounded."""
    return Rotation(np.pad(10_000.0 ** -(np.arange(0, dim, 2) / dim), (0, (padded(dim) - dim) // 2)))


def windows_of(config: Mapping[str, Any], fields: EncoderFields, count: int) -> list[int | None]:
    """Of each layer: positions that a token attends to in each direction, its own included; ``None``: all."""
    if not fields.window:
        return [None] * count
    return [whole // 2 + 1 for whole in config[fields.window]]


def relative_bias(table: Floats, reach: int, *, farthest: int = _FARTHEST) -> Floats:  # [buckets, heads]
    """The bias ``[heads, 2 reach - 1]`` of MPNet and T5: of a key that is reach - 1 before its query, and so on."""
    distances = np.arange(1 - reach, reach)
    return table[_buckets(distances, len(table) // 2, farthest)].T


def _buckets(distances: npt.NDArray[np.intp], per_side: int, farthest: int) -> npt.NDArray[np.intp]:
    """Half of the buckets for each direction; half of those exact, half logarithmic up to the farthest distance."""
    exact, apart = per_side // 2, np.abs(distances)
    growth = np.log(np.maximum(apart, 1).astype(np.float32) / np.float32(exact)) / np.log(np.float32(farthest / exact))
    far = np.minimum(exact + (growth * np.float32(per_side - exact)).astype(np.intp), per_side - 1)
    buckets: npt.NDArray[np.intp] = np.where(apart < exact, apart, far) + per_side * (distances > 0)
    return buckets
