"""EntityHead: how well a GLiNER's words, or spans of them, fit labels; numpy on the host, whatever runs the encoder.

Linear layers behind a sum or a product with the labels are multiplied by the labels first: the head then costs about a
tenth of what it does span by span, and the last layer of a span is never computed for a span.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from millpond.backends.entity_queries import EntityQueries
from millpond.checkpoints.layouts.gliner import Gliner
from millpond.checkpoints.stored_tensor import StoredTensor
from millpond.checkpoints.weights import stored_tensors
from millpond.errors import WeightMismatchError

Matrix = npt.NDArray[np.float32]


# GLiNER2's head for classes of texts.
_UNREAD = ("classifier.",)


@dataclass(frozen=True, kw_only=True)
class _Linear:
    """``x W + b``."""

    weight: Matrix  # [into, out]
    bias: Matrix  # [out]

    def __call__(self, rows: Matrix) -> Matrix:
        out: Matrix = rows @ self.weight
        out += self.bias
        return out


@dataclass(frozen=True, kw_only=True)
class _Direction:
    """One direction of a layer of an LSTM; its gates are input, forget, cell and output, as torch has them."""

    into: _Linear  # [into, 4 d], the biases of both products added
    back: Matrix  # [d, 4 d]


class EntityHead:
    """The head's weights, in float32; any number of threads may call it."""

    def __init__(self, layout: Gliner) -> None:
        """Read the weights.

        Raises:
            WeightMismatchError: A tensor is missing, has another shape, or is not known.
        """
        stored = stored_tensors(layout.folder)
        tensors = _Tensors(
            {name: each for name, each in stored.items() if not name.startswith((f"{layout.backbone}.", *_UNREAD))},
            layout,
        )
        width, self.layout = layout.hidden_size, layout
        encoder = int(layout.config["hidden_size"])
        self._projection = tensors.linear("token_rep_layer.projection", width, encoder) if encoder != width else None
        self._lstm = [
            [tensors.direction(layer, suffix, width) for suffix in ("", "_reverse")] for layer in range(layout.layers)
        ]
        if layout.span_mode == "token_level":
            self._of_word = tensors.linear("scorer.proj_token", 2 * width, width)
            self._of_label = tensors.linear("scorer.proj_label", 2 * width, width)
            self._inner = tensors.linear("scorer.out_mlp.0", 4 * width, 3 * width)
            self._last = tensors.linear("scorer.out_mlp.3", 3, 4 * width)
        else:
            inner = (2 if layout.span_mode == "marker" else 4) * width
            spans = "span_rep.span_rep_layer" if layout.counting else "span_rep_layer.span_rep_layer"
            if layout.counting:
                self._queries = EntityQueries(layout.counting, width, tensors.take, tensors.linear)
            else:
                self._label = [*tensors.two("prompt_rep_layer", 4 * width, width)]
            self._start = [*tensors.two(f"{spans}.project_start", inner, width)]
            self._end = [*tensors.two(f"{spans}.project_end", inner, width)]
            self._out: list[_Linear] = (
                [tensors.linear(f"{spans}.out_project", width, 2 * width)]
                if layout.span_mode == "marker"
                else [
                    tensors.linear(f"{spans}.out_project.0", 4 * width, 2 * width),
                    tensors.linear(f"{spans}.out_project.3", width, 4 * width),
                ]
            )
        tensors.check()

    def logits(self, words: Sequence[Matrix], labels: Sequence[Matrix]) -> list[Matrix]:
        """For each text logits from the states of its words ``[w, d]`` and of its labels ``[c, d]``.

        GLiNER2's labels have the state of another marker before them, ``[1 + c, d]``.

        Returns:
            Of spans ``[w, max_width, c]``, by first word and further words, minus infinity behind the last word; of a
            model that scores words ``[w, c, 3]``: whether an entity begins, ends, or goes on there.
        """
        if self._projection is not None:
            words, labels = [self._projection(each) for each in words], [self._projection(each) for each in labels]
        for layer in self._lstm:
            words = _both_ways(layer, words)
        one = self._words if self.layout.span_mode == "token_level" else self._spans
        return [one(each, of_labels) for each, of_labels in zip(words, labels, strict=True)]

    def _spans(self, words: Matrix, labels: Matrix) -> Matrix:
        width = self.layout.hidden_size
        logits = np.full(
            (len(words), self.layout.max_width, len(labels) - bool(self.layout.counting)), -np.inf, np.float32
        )
        label = self._queries(labels) if self.layout.counting else _two(self._label, labels)  # [c, d]
        if label is None:
            return logits
        begin, end = (np.maximum(_two(layers, words), 0) for layers in (self._start, self._end))  # [w, d]
        last = self._out[-1]
        by_label, offset = last.weight @ label.T, last.bias @ label.T  # [.., c], [c]
        if len(self._out) == 1:
            begin, end = begin @ by_label[:width], end @ by_label[width:]
        else:
            first = self._out[0]
            begin, end = begin @ first.weight[:width] + first.bias, end @ first.weight[width:]  # [w, 4 d]
        for more in range(min(self.layout.max_width, len(words))):
            both = begin[: len(words) - more] + end[more:]
            scored = both if len(self._out) == 1 else np.maximum(both, 0, out=both) @ by_label
            logits[: len(words) - more, more] = scored + offset
        return logits

    def _words(self, words: Matrix, labels: Matrix) -> Matrix:
        width = self.layout.hidden_size
        word, label = self._of_word(words), self._of_label(labels)  # [w, 2 d], [c, 2 d]
        inner = self._inner.weight
        of_word = word[:, :width] @ inner[:width] + self._inner.bias  # [w, 4 d]
        of_label = label[:, :width] @ inner[width : 2 * width]  # [c, 4 d]
        logits = np.empty((len(words), len(label), 3), dtype=np.float32)
        for column in range(len(label)):
            product = (word[:, width:] * label[column, width:]) @ inner[2 * width :]
            product += of_word + of_label[column]
            logits[:, column] = self._last(np.maximum(product, 0, out=product))
        return logits


def _two(layers: Sequence[_Linear], rows: Matrix) -> Matrix:
    """Two linear layers with relu between them."""
    inner = layers[0](rows)
    return layers[1](np.maximum(inner, 0, out=inner))


def _both_ways(directions: Sequence[_Direction], texts: Sequence[Matrix]) -> list[Matrix]:
    """A layer of an LSTM in both directions over each text ``[w, d]``; the states of both are ``[w, d]`` again."""
    sizes = np.array([len(text) for text in texts])
    longest, width = int(sizes.max(initial=0)), len(directions[0].back)
    gates = np.zeros((longest, 2, len(texts), 4 * width), dtype=np.float32)
    for way, direction in enumerate(directions):
        for i, text in enumerate(texts):
            gates[: len(text), way, i] = direction.into(text[::-1] if way else text)
    back = np.stack([direction.back for direction in directions])  # [2, d, 4 d]
    state = cell = np.zeros((2, len(texts), width), dtype=np.float32)
    states = np.empty((longest, 2, len(texts), width), dtype=np.float32)
    for step in range(longest):
        four = gates[step]
        four += np.matmul(state, back)
        passed, new = _sigmoid(four), np.tanh(four[..., 2 * width : 3 * width])
        cell = passed[..., width : 2 * width] * cell + passed[..., :width] * new
        state = passed[..., 3 * width :] * np.tanh(cell)
        states[step] = state
    return [np.concatenate((states[:size, 0, i], states[:size, 1, i][::-1]), axis=1) for i, size in enumerate(sizes)]


def _sigmoid(numbers: Matrix) -> Matrix:
    out: Matrix = 0.5 * np.tanh(0.5 * numbers) + np.float32(0.5)
    return out


class _Tensors:
    """The head's tensors, each taken with the shape that it must have."""

    def __init__(self, stored: Mapping[str, StoredTensor], layout: Gliner) -> None:
        self._stored, self._folder = dict(stored), layout.folder

    def linear(self, name: str, out: int, into: int) -> _Linear:
        weight, bias = self.take(f"{name}.weight", out, into), self.take(f"{name}.bias", out)
        return _Linear(weight=np.ascontiguousarray(weight.T), bias=bias)

    def two(self, name: str, inner: int, width: int) -> tuple[_Linear, _Linear]:
        return self.linear(f"{name}.0", inner, width), self.linear(f"{name}.3", width, inner)

    def direction(self, layer: int, suffix: str, width: int) -> _Direction:
        """The weights of a direction, whose state is half as wide as its input."""
        half, name = width // 2, f"l{layer}{suffix}"
        taken = [
            self.take(f"rnn.lstm.weight_{kind}_{name}", 4 * half, size) for kind, size in (("ih", width), ("hh", half))
        ]
        bias = self.take(f"rnn.lstm.bias_ih_{name}", 4 * half) + self.take(f"rnn.lstm.bias_hh_{name}", 4 * half)
        into, back = (np.ascontiguousarray(each.T) for each in taken)
        return _Direction(into=_Linear(weight=into, bias=bias), back=back)

    def take(self, name: str, *shape: int) -> Matrix:
        tensor = self._stored.pop(name, None)
        if tensor is None or tensor.shape != shape:
            found = "is missing" if tensor is None else f"has the shape {tensor.shape}"
            raise WeightMismatchError(f"{self._folder}: {name} {found}; gliner_config.json says {shape}")
        return np.ascontiguousarray(tensor.float32())

    def check(self) -> None:
        if self._stored:
            raise WeightMismatchError(
                f"{self._folder}: the weights have {min(self._stored)}, which gliner_config.json knows nothing of"
            )
