"""sentence-transformers' modules on token rows, in float32: a text's rows are turned into others before the pooling."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from millpond.backends.lstm import read_direction, run_layer
from millpond.backends.native.heads.kernels import Floats, Linear
from millpond.backends.native.heads.modules import Modules
from millpond.backends.native.heads.pooling import Ints
from millpond.checkpoints.modules import Convolution, Lstm, TokenHead, WordWeights
from millpond.checkpoints.token_tensors import take_all

# rows [tokens, in], their ids, the texts' bounds [texts + 1] and threads, to [tokens, out]
_Step = Callable[[Floats, Ints, Ints, int], Floats]


class TokenModules:
    """Modules one after another, each over the rows of whole texts."""

    def __init__(
        self, descriptions: Sequence[TokenHead], *, width: int, vocabulary: int, nothing: int | None = None
    ) -> None:
        """Read their weights; ``width`` is that of the rows that they take.

        ``nothing``: the id that stands for no token, whose row is 0 behind them all.

        Raises:
            WeightMismatchError: They do not fit config.json, or to ``width``.
            NotSupported: An activation is not known here.
        """
        self._factors = {i: _factors(each, vocabulary) for i, each in enumerate(descriptions) if _weighs(each)}
        self._steps: list[_Step] = []
        for i, description in enumerate(descriptions):
            self._steps.append(_weighing(self._factors[i]) if i in self._factors else _step(description, width))
            width = getattr(description, "out_features", width)
        self._nothing = nothing
        self.reads_others = any(isinstance(each, Convolution | Lstm | WordWeights) for each in descriptions)
        """Whether more is needed than the row of a token to compute what becomes of it, or of the pooled row."""

    def __len__(self) -> int:
        return len(self._steps)

    def __call__(self, rows: Floats, ids: Ints, bounds: Ints, threads: int) -> Floats:  # [tokens, in] -> [tokens, out]
        """Run the rows of texts through all of them."""
        for step in self._steps:
            rows = step(rows, ids, bounds, threads)
        if self._steps and self._nothing is not None and (missing := ids == self._nothing).any():
            rows = np.where(missing[:, None], np.float32(0), rows)
        return rows

    def totals(self, ids: Ints, bounds: Ints) -> Floats | None:
        """The sum of each text's factors, which a mean divides by; ``None``: it divides by the number of tokens."""
        if not self._factors:
            return None
        factors = self._factors[max(self._factors)]
        return np.add.reduceat(factors[ids], bounds[:-1])


def _weighs(description: TokenHead) -> bool:
    return isinstance(description, WordWeights)


def _factors(description: TokenHead, vocabulary: int) -> Floats:
    """The factor of each id, and 0 for the one that stands for no token."""
    assert isinstance(description, WordWeights)
    known = description.weights[:vocabulary]
    return np.array([*known, *[description.rest] * (vocabulary - len(known)), 0.0], dtype=np.float32)


def _weighing(factors: Floats) -> _Step:
    return lambda rows, ids, bounds, threads: rows * factors[ids][:, None]


def _step(description: TokenHead, width: int) -> _Step:
    if isinstance(description, Convolution):
        return _convolution(description)
    if isinstance(description, Lstm):
        return _lstm(description)
    dense = Modules([description], width=width)  # type: ignore[list-item]
    return lambda rows, ids, bounds, threads: dense(rows, threads)


def _convolution(description: Convolution) -> _Step:
    tensors = take_all(description)
    kernels = []
    for i, size in enumerate(description.kernels):
        weight = tensors[f"convs.{i}.weight"].transpose(0, 2, 1).reshape(description.channels, -1)
        kernels.append((size // 2, Linear(np.ascontiguousarray(weight), tensors[f"convs.{i}.bias"])))

    def run(rows: Floats, ids: Ints, bounds: Ints, threads: int) -> Floats:
        return np.concatenate([kernel(_around(rows, bounds, reach), threads) for reach, kernel in kernels], axis=1)

    return run


def _around(rows: Floats, bounds: Ints, reach: int) -> Floats:
    """``[tokens, (2 reach + 1) width]``: beside each row the ones around it, 0 beyond the ends of its text."""
    texts = np.repeat(np.arange(1, len(bounds)), np.diff(bounds))
    places = np.arange(len(rows)) + reach * texts
    apart = np.zeros((len(rows) + reach * len(bounds), rows.shape[1]), dtype=np.float32)
    apart[places] = rows
    around: Floats = apart[places[:, None] + np.arange(-reach, reach + 1)].reshape(len(rows), -1)
    return around


def _lstm(description: Lstm) -> _Step:
    tensors, hidden = take_all(description), description.hidden

    def take(name: str, *shape: int) -> Floats:
        return tensors[name]

    layers, into = [], description.in_features
    for layer in range(description.layers):
        suffixes = ("", "_reverse")[: description.directions]
        layers.append([read_direction(take, "encoder.", f"l{layer}{end}", into=into, width=hidden) for end in suffixes])
        into = description.out_features

    def run(rows: Floats, ids: Ints, bounds: Ints, threads: int) -> Floats:
        texts = np.split(rows, bounds[1:-1])
        for layer in layers:
            texts = run_layer(layer, texts)
        return np.concatenate(texts)

    return run
