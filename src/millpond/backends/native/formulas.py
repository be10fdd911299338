"""Formulas: what a native plan computes, in float64 and step by step, for one text after another."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.backends.native import structs
from millpond.backends.native.encoder import Rows, bounds_of
from millpond.backends.native.kernels import Precision
from millpond.backends.native.packing.weight_packer import Linear, LowRank
from millpond.backends.native.plans.distances import DistanceTerms
from millpond.backends.native.plans.plan import Expert
from millpond.backends.native.plans.rotation import Rotation
from millpond.checkpoints.stored_tensor import StoredTensor

Doubles = npt.NDArray[np.float64]
Model = Callable[[Any, Precision], None]  # tells its steps to a ``PlanBuilder``


@dataclass(frozen=True, kw_only=True, eq=False)
class Inputs:
    """Texts and what else ``NativeEncoder.encode`` takes of them."""

    lengths: Sequence[int]
    ids: npt.NDArray[np.int32]  # [tokens]
    types: npt.NDArray[np.int32] | None = None  # [tokens]
    keys: npt.NDArray[np.int32] | None = None  # [texts]
    adapters: npt.NDArray[np.int32] | None = None  # [texts]
    offset: int = 0
    rank: int = 0  # of an adapter


def formulas(model: Model, dtype: Precision, inputs: Inputs) -> Doubles:  # [tokens, hidden]
    """The states of a model that tells its steps to a ``PlanBuilder``."""
    states, bounds = [], bounds_of(inputs.lengths)
    for i, text in enumerate(map(slice, bounds[:-1], bounds[1:])):
        steps = Formulas(
            ids=inputs.ids[text],
            types=np.zeros(inputs.lengths[i], int) if inputs.types is None else inputs.types[text],
            offset=inputs.offset,
            keys=inputs.lengths[i] if inputs.keys is None else int(inputs.keys[i]),
            adapter=-1 if inputs.adapters is None else int(inputs.adapters[i]),
            rank=inputs.rank,
        )
        model(steps, dtype)
        states.append(steps.states)
    return np.concatenate(states)


def read(states: Doubles, lengths: Sequence[int], rows: Rows, skip: Sequence[int] | None = None) -> Doubles:
    """The rows of all states that ``NativeEncoder.encode`` gives."""
    if rows == "all":
        return states
    texts = np.split(states, np.cumsum(lengths)[:-1])
    firsts = [0] * len(lengths) if skip is None else skip
    pairs = zip(texts, firsts, strict=True)
    return np.stack([{"first": x[first], "last": x[-1], "mean": x[first:].mean(0)}[rows] for x, first in pairs])


class Formulas:
    """Computes what is told to a ``PlanBuilder`` in float64, for one text."""

    def __init__(self, *, ids: Any, types: Any, offset: int, keys: int, adapter: int, rank: int) -> None:
        self._ids, self._types, self._keys, self._adapter, self._rank = ids, types, keys, adapter, rank
        self._places = slice(offset, offset + len(ids))
        self.states: Doubles
        self._sums: Doubles
        self._branch: Doubles = np.zeros(0)
        self._parts: Doubles
        self._kept: Doubles
        self._values: Doubles  # of an attention, and what stands behind them
        self._behind: Doubles

    def layer_norm(
        self, weight: StoredTensor | None, bias: StoredTensor | None, epsilon: float, *, dim: int | None = None
    ) -> tuple[Any, ...]:
        """A layer norm's weights."""
        return (structs.LAYER_NORM, _doubles(weight), _doubles(bias), epsilon)

    def rms_norm(
        self, weight: StoredTensor | None, epsilon: float, *, offset: float = 0.0, dim: int | None = None
    ) -> tuple[Any, ...]:
        """An RMS norm's weights."""
        numbers = _doubles(weight)
        return (structs.RMS_NORM, None if numbers is None else numbers + offset, None, epsilon)

    def embed(
        self,
        words: StoredTensor,
        positions: StoredTensor | None = None,
        types: StoredTensor | None = None,
        *,
        scale: float = 1.0,
        start: int | None = None,
        adapter: LowRank | None = None,
        type_adapter: LowRank | None = None,
    ) -> None:
        """``PlanBuilder.embed``."""
        ids = self._ids if start is None else np.array([start, *self._ids[:-1]])
        self._sums = (_rows(words, ids) + self._low(adapter, ids)) * scale
        if positions is not None:
            self._sums = self._sums + _rows(positions, self._places)
        if types is not None:
            self._sums = self._sums + _rows(types, self._types) + self._low(type_adapter, self._types)

    def norm(
        self,
        norm: Any,
        columns: int,
        *,
        residual: bool = False,
        keep: bool = False,
        sums: bool = False,
        branch: bool = False,
        carry: bool = False,
        mixture: tuple[float, float] | None = None,
    ) -> None:
        """``PlanBuilder.norm``."""
        if isinstance(norm, structs.NormWeights):
            norm = (norm.kind, None, None, norm.epsilon)
        if branch:
            self._sums = self._sums + normalized(self._branch, *norm)
            return
        if mixture is not None:
            self.states = normalized(mixture[0] * self._sums + mixture[1] * self._branch, *norm)
            return
        result = normalized(self._sums + self.states if residual else self._sums, *norm)
        self._branch = result if carry else self._branch
        self._sums = result if keep or sums else self._sums
        self.states = self.states if sums else result

    def heads(self, *layers: Linear, adapter: LowRank | None = None) -> None:
        """``PlanBuilder.heads``."""
        whole = np.concatenate([_product(self.states, layer) for layer in layers], axis=1)
        self._parts = whole + self._low(adapter, self.states)

    def keep_states(self) -> None:
        """``PlanBuilder.keep_states``."""
        self._kept = self.states

    def blend(self, share: float, *, begins: bool = False, ends: bool = False) -> None:
        """``PlanBuilder.blend``."""
        self._branch = share * self.states + (0.0 if begins else self._branch)
        self.states = self._branch if ends else self.states

    def cross_heads(self, query: Linear, key: Linear, value: Linear, *, dim: int) -> None:
        """``PlanBuilder.cross_heads``."""
        parts = (_product(self.states, query), _product(self._kept, key), _product(self._kept, value))
        self._parts = np.concatenate(parts, axis=1)

    def gate_by_kept(self, gate: Linear, kept: Linear, norm: Any, activation: str | None) -> None:
        """``PlanBuilder.gate_by_kept``."""
        factor = activated(_product(self.states, gate), activation)
        self._parts = factor * normalized(_product(self._kept, kept), *norm)

    def gate_attention(self, *, heads: int, kv_heads: int, dim: int, activation: str) -> None:
        """``PlanBuilder.gate_attention``."""
        self._parts = self._parts * activated(self._behind.reshape(self._parts.shape), activation)

    def exclude_values(self, *, heads: int, kv_heads: int, dim: int, shares: Any) -> None:
        """``PlanBuilder.exclude_values``."""
        results = self._parts.reshape(len(self._parts), heads, dim)
        values = self._values.repeat(heads // kv_heads, axis=1)
        unit = values / np.maximum(np.linalg.norm(values, axis=-1, keepdims=True), 1e-12)
        along = (results * unit).sum(-1, keepdims=True)
        self._parts = (results - shares[:, None] * along * unit).reshape(self._parts.shape)

    def value_words(self, words: StoredTensor, *, heads: int, kv_heads: int, dim: int) -> None:
        """``PlanBuilder.value_words``."""
        columns = slice((heads + kv_heads) * dim, (heads + 2 * kv_heads) * dim)
        self._parts[:, columns] += _rows(words, self._ids)

    def up_proj(self, layer: Linear) -> None:
        """``PlanBuilder.up_proj``."""
        self._sums = _product(self.states, layer)

    def rotary(
        self,
        *,
        heads: int,
        kv_heads: int,
        dim: int,
        norm: Any = None,
        key_norm: Any = None,
        value_norm: Any = None,
        whole: bool = False,
        rotation: Rotation | None = None,
    ) -> None:
        """``PlanBuilder.rotary``."""
        parts = self._split(heads, kv_heads, dim)
        for i, weights in enumerate((norm, key_norm, value_norm)):
            if weights is not None:
                rows = parts[i].reshape(len(parts[i]), -1) if whole else parts[i]
                parts[i] = normalized(rows, *weights).reshape(parts[i].shape)
            if rotation is not None and i < 2:
                tables = rotation.tables(self._places.stop)
                parts[i] = rotated(parts[i], *(table[self._places] for table in tables))
        self._parts = np.concatenate(parts, axis=1).reshape(len(self._parts), -1)

    def attention(self, *, heads: int, kv_heads: int, dim: int, **masks: Any) -> None:
        """``PlanBuilder.attention``."""
        *parts, self._behind = self._split(heads, kv_heads, dim)
        self._values = parts[2]
        self._parts = attended(*parts, count=self._keys, **masks)[0].reshape(len(self._parts), -1)

    def o_proj(self, layer: Linear, *, add: bool = False, branch: bool = False, adapter: LowRank | None = None) -> None:
        """``PlanBuilder.o_proj``."""
        self._put(_product(self._parts, layer) + self._low(adapter, self._parts), add, branch)

    def mlp(
        self,
        up: Linear,
        down: Linear,
        activation: str | None,
        *,
        gate: Linear | None = None,
        add: bool = False,
        branch: bool = False,
        adapter: LowRank | None = None,
        down_adapter: LowRank | None = None,
    ) -> None:
        """``PlanBuilder.mlp``."""
        inner = _product(self.states, up) + self._low(adapter, self.states)
        factor = activated(inner if gate is None else _product(self.states, gate), activation)
        inner = factor if gate is None else factor * inner
        self._put(_product(inner, down) + self._low(down_adapter, inner), add, branch)

    def experts(
        self,
        router: Linear,
        experts: Sequence[Expert],
        activation: str | None,
        *,
        top: int,
        renormalized: bool = False,
        bias: StoredTensor | None = None,
        add: bool = False,
        branch: bool = False,
    ) -> None:
        """``PlanBuilder.experts``."""
        scores = np.exp(_product(self.states, router))
        shares = scores / scores.sum(-1, keepdims=True)
        left_out = np.argsort(-shares, kind="stable")[:, top:]
        np.put_along_axis(shares, left_out, 0.0, -1)
        shares = shares / shares.sum(-1, keepdims=True) if renormalized else shares
        mixed = np.zeros(1)
        for share, expert in zip(shares.T, experts, strict=True):
            inner = _product(self.states, expert.up)
            if expert.gate is None:
                inner = activated(inner, activation)
            else:
                inner = activated(_product(self.states, expert.gate), activation) * inner
            mixed = mixed + share[:, None] * _product(inner, expert.down)
        self._put(mixed if bias is None else mixed + _doubles(bias), add, branch)

    def convolve(self, taps: StoredTensor, *, ahead: int) -> None:
        """``PlanBuilder.convolve``."""
        before, behind, values = np.split(self._parts, 3, axis=1)
        inner, numbers = before * values, _doubles(taps)[:, 0]  # [tokens, columns], [columns, taps]
        inner[self._keys :] = 0
        count = numbers.shape[1]
        wide = np.pad(inner, ((count - 1 - ahead, ahead), (0, 0)))
        mixed = sum(numbers[:, k] * wide[k : k + len(inner)] for k in range(count))
        mixed[self._keys :] = 0
        self._parts = behind * mixed

    def _split(self, heads: int, kv_heads: int, dim: int) -> list[Doubles]:
        """Queries, keys, values and what stands behind them, ``[tokens, heads, dim]`` each."""
        ends = [heads, heads + kv_heads, heads + 2 * kv_heads]
        return np.split(self._parts.reshape(len(self._parts), -1, dim), ends, axis=1)

    def _put(self, result: Doubles, add: bool, branch: bool) -> None:
        if branch:
            self._branch = result
        else:
            self._sums = self._sums + result if add else result

    def _low(self, adapter: LowRank | None, rows: Any) -> Doubles | float:
        """What the text's adapter adds to rows of a table (by index), or to a product with ``rows``."""
        if adapter is None or self._adapter < 0:
            return 0.0
        own = slice(self._adapter * self._rank, (self._adapter + 1) * self._rank)
        up, down = adapter.up[:, own].astype(float), adapter.down.astype(float)
        low: Doubles = (down[self._adapter][rows] if down.ndim == 3 else rows @ down[own].T) @ up.T
        return low


def _doubles(tensor: StoredTensor | None) -> Any:
    return None if tensor is None else tensor.float32().astype(np.float64)


def _rows(table: StoredTensor, places: Any) -> Doubles:
    rows: Doubles = _doubles(table)[places]
    return rows


def _product(rows: Doubles, layer: Linear) -> Doubles:
    result: Doubles = rows @ _doubles(layer.weight).T
    return result if layer.bias is None else result + _doubles(layer.bias)


def normalized(
    rows: Doubles, kind: int, weight: Doubles | None = None, bias: Doubles | None = None, epsilon: float = 0.0
) -> Doubles:
    """A norm over the last dimension."""
    if kind == structs.COPY:
        return rows
    off = rows - rows.mean(-1, keepdims=True) if kind == structs.LAYER_NORM else rows
    result: Doubles = off / np.sqrt(np.square(off).mean(-1, keepdims=True) + epsilon)
    result = result if weight is None else result * weight
    return result if bias is None else result + bias


_erf = np.vectorize(math.erf, otypes=[np.float64])
_ACTIVATIONS: dict[str | None, Callable[[Doubles], Doubles]] = {
    None: lambda x: x,
    "gelu": lambda x: x * (0.5 + 0.5 * _erf(x / math.sqrt(2))),
    "gelu_new": lambda x: x * (0.5 + 0.5 * np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "relu": lambda x: np.maximum(x, 0.0),
    "relu2": lambda x: np.maximum(x, 0.0) ** 2,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
}


def activated(numbers: Doubles, name: str | None) -> Doubles:
    """An activation by the name of config.json."""
    with np.errstate(over="ignore"):
        return _ACTIVATIONS[name](numbers)


def rotated(heads: Doubles, cosines: Any, sines: Any) -> Doubles:
    """Rotary positions of ``heads [tokens, heads, dim]``."""
    low, high = np.split(heads, 2, axis=-1)
    cosines, sines = cosines[:, None], sines[:, None]
    return np.concatenate([low * cosines - high * sines, high * cosines + low * sines], axis=-1)


def attended(
    queries: Doubles,  # [tokens, heads, dim]
    keys: Doubles,  # [tokens, kv_heads, dim]
    values: Doubles,  # [tokens, kv_heads, dim]
    *,
    scale: float,
    count: int,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    distances: npt.NDArray[np.float32] | DistanceTerms | None = None,
) -> tuple[Doubles, Doubles]:
    """Attention within one text to its first ``count`` keys; the same of the values' magnitudes. 0 without a key."""
    place = np.arange(len(queries))
    apart = place - place[:, None]  # key - query
    keys, values = (part.repeat(queries.shape[1] // keys.shape[1], axis=1) for part in (keys, values))
    scores = np.einsum("qhd,khd->hqk", queries, keys)
    if isinstance(distances, DistanceTerms):
        scores = scores + _terms(queries, keys, distances, apart)
    scores = scores * scale
    if softcap:
        scores = np.tanh(scores / softcap) * softcap
    if isinstance(distances, np.ndarray):
        scores = scores + distances[:, apart + (distances.shape[1] + 1) // 2 - 1]
    reach = len(place) if window is None else window - 1
    seen = (place < count) & (apart >= -reach) & (apart <= (0 if causal else reach))
    scores = np.where(seen, scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(top), top, 0.0))
    weights = weights / np.maximum(weights.sum(-1, keepdims=True), 1e-300)
    mixed, size = (np.einsum("hqk,khd->qhd", weights, part) for part in (values, abs(values)))
    return mixed, size


def _terms(queries: Doubles, keys: Doubles, terms: DistanceTerms, apart: npt.NDArray[np.intp]) -> Doubles:
    """DeBERTa's terms ``[heads, queries, keys]``, each distance by itself."""
    whole = np.zeros((queries.shape[1], len(queries), len(keys)))
    sides = ((terms.keys, queries, "qhd", apart), (terms.queries, keys, "khd", -apart))
    for i, (table, states, axes, distance) in enumerate(sides):
        if table is not None:
            rows = terms.columns.rows[i][terms.columns.columns[i][distance + terms.columns.reach]]
            by_distance = _doubles(table).reshape(-1, *keys.shape[1:])[rows]  # [queries, keys, heads, dim]
            whole += np.einsum(f"{axes},qkhd->hqk", states, by_distance)
    return whole
