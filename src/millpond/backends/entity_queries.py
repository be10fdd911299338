"""EntityQueries: what a GLiNER2 compares spans with, from the states of its markers: those of the first of each kind.

Its head first tells how many structures a text has. For entities the number says only whether there are any, and of the
queries, which are made for each structure, the first one's are read. They do not depend on the others.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from millpond.checkpoints.layouts.gliner import Counting

Matrix = npt.NDArray[np.float32]
Layer = Callable[[Matrix], Matrix]
# A tensor of a name and a shape, and the linear layer of a name, an output and an input width.
Take = Callable[..., Matrix]
Linear = Callable[[str, int, int], Layer]

_COUNTS = 20
_NARROW, _HEADS, _LAYERS = 128, 4, 2  # of the transformer over labels
_EPSILON = 1e-5


class EntityQueries:
    """The weights of these layers; any number of threads may call it."""

    def __init__(self, kind: Counting, width: int, take: Take, linear: Linear) -> None:
        self._count = linear("count_pred.0", 2 * width, width), linear("count_pred.2", _COUNTS, 2 * width)
        gru = "count_embed.gru"
        self._hidden = take(f"{gru}.weight_hh_l0", 3 * width, width).T, take(f"{gru}.bias_hh_l0", 3 * width)
        first = take("count_embed.pos_embedding.weight", _COUNTS, width)[0]
        # The input of the first step, which is the same for all labels: [3 d]
        self._input = take(f"{gru}.weight_ih_l0", 3 * width, width) @ first + take(f"{gru}.bias_ih_l0", 3 * width)
        self._projector: list[Layer] = []
        self._transformer: _Transformer | None = None
        if kind == "count_lstm":
            sizes: tuple[int, ...] = (2 * width, 4 * width, width)
            lead = "count_embed.projector"
        else:
            self._transformer = _Transformer(width, take, linear)
            sizes = (_NARROW + width, width, width, width)
            lead = "count_embed.transformer.out_projector"
        for i, (into, out) in enumerate(pairwise(sizes)):
            self._projector.append(linear(f"{lead}.{2 * i}", out, into))

    def __call__(self, markers: Matrix) -> Matrix | None:
        """The labels' queries ``[c, d]`` from the states of the first marker and theirs ``[1 + c, d]``; or none."""
        if int(_mlp(self._count, markers[:1])[0].argmax()) == 0:
            return None
        labels = markers[1:]
        weight, bias = self._hidden
        reset, update, new = np.split(labels @ weight + bias, 3, axis=1)
        own = np.split(self._input, 3)
        gate = _sigmoid(own[1] + update)
        states: Matrix = (1 - gate) * np.tanh(own[2] + _sigmoid(own[0] + reset) * new) + gate * labels
        if self._transformer is None:
            return _mlp(self._projector, np.concatenate((states, labels), axis=1))
        states = states + labels
        return _mlp(self._projector, np.concatenate((self._transformer(states), states), axis=1))


class _Transformer:
    """Two layers of attention over labels, each followed by a norm, as torch's TransformerEncoder has them."""

    def __init__(self, width: int, take: Take, linear: Linear) -> None:
        lead = "count_embed.transformer"
        self._into = linear(f"{lead}.in_projector", _NARROW, width)
        self._layers = []
        for i in range(_LAYERS):
            name = f"{lead}.transformer.layers.{i}"
            self._layers.append((
                (take(f"{name}.self_attn.in_proj_weight", 3 * _NARROW, _NARROW).T,
                 take(f"{name}.self_attn.in_proj_bias", 3 * _NARROW)),
                linear(f"{name}.self_attn.out_proj", _NARROW, _NARROW),
                (linear(f"{name}.linear1", 2 * _NARROW, _NARROW), linear(f"{name}.linear2", _NARROW, 2 * _NARROW)),
                [(take(f"{name}.norm{n}.weight", _NARROW), take(f"{name}.norm{n}.bias", _NARROW)) for n in (1, 2)],
            ))  # fmt: skip

    def __call__(self, rows: Matrix) -> Matrix:
        rows = self._into(rows)
        for (weight, bias), out, feed, (first, second) in self._layers:
            parts = np.split(rows @ weight + bias, 3, axis=1)
            query, key, value = (part.reshape(len(rows), _HEADS, -1).transpose(1, 0, 2) for part in parts)
            scores = query @ key.transpose(0, 2, 1) / np.float32((_NARROW / _HEADS) ** 0.5)
            raised = np.exp(scores - scores.max(-1, keepdims=True))
            heads = (raised / raised.sum(-1, keepdims=True)) @ value
            rows = _norm(rows + out(heads.transpose(1, 0, 2).reshape(len(rows), -1)), *first)
            rows = _norm(rows + _mlp(feed, rows), *second)
        return rows


def _mlp(layers: tuple[Layer, ...] | list[Layer], rows: Matrix) -> Matrix:
    """Linear layers with relu between them."""
    for layer in layers[:-1]:
        rows = np.maximum(layer(rows), 0)
    return layers[-1](rows)


def _norm(rows: Matrix, weight: Matrix, bias: Matrix) -> Matrix:
    centred = rows - rows.mean(axis=1, keepdims=True)
    out: Matrix = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + np.float32(_EPSILON)) * weight + bias
    return out


def _sigmoid(numbers: Matrix) -> Matrix:
    out: Matrix = 0.5 * np.tanh(0.5 * numbers) + np.float32(0.5)
    return out
