"""EntityHead: how well a GLiNER's words, or spans of them, fit labels; numpy on the host, whatever runs the encoder.

Linear layers behind a sum or a product with the labels are multiplied by the labels first: the head then costs about a
tenth of what it does span by span, and the last layer of a span is never computed for a span.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from millpond.backends.entity_queries import EntityQueries
from millpond.backends.lstm import Direction, Linear, Matrix, read_direction, run_layer
from millpond.checkpoints.layouts.gliner import Gliner
from millpond.checkpoints.stored_tensor import StoredTensor
from millpond.checkpoints.weights import stored_tensors
from millpond.errors import WeightMismatchError

# GLiNER2's head for classes of texts.
_UNREAD = ("classifier.",)


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
            self._out: list[Linear] = (
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
            words = run_layer(layer, words)
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


def _two(layers: Sequence[Linear], rows: Matrix) -> Matrix:
    """Two linear layers with relu between them."""
    inner = layers[0](rows)
    return layers[1](np.maximum(inner, 0, out=inner))


class _Tensors:
    """The head's tensors, each taken with the shape that it must have."""

    def __init__(self, stored: Mapping[str, StoredTensor], layout: Gliner) -> None:
        self._stored, self._folder = dict(stored), layout.folder

    def linear(self, name: str, out: int, into: int) -> Linear:
        weight, bias = self.take(f"{name}.weight", out, into), self.take(f"{name}.bias", out)
        return Linear(weight=np.ascontiguousarray(weight.T), bias=bias)

    def two(self, name: str, inner: int, width: int) -> tuple[Linear, Linear]:
        return self.linear(f"{name}.0", inner, width), self.linear(f"{name}.3", width, inner)

    def direction(self, layer: int, suffix: str, width: int) -> Direction:
        """The weights of a direction, whose state is half as wide as its input."""
        return read_direction(self.take, "rnn.lstm.", f"l{layer}{suffix}", into=width, width=width // 2)

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
