"""ClassifierHead: hidden states to logits, from a head's description and the checkpoint's tensors, in float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from millpond.backends.native.heads.activations import activation_of
from millpond.backends.native.heads.kernels import Floats, Linear
from millpond.backends.native.heads.norms import layer_norm
from millpond.backends.native.heads.pooling import Ints, pool
from millpond.backends.native.heads.vocabulary_rows import VocabularyRows, head_rows
from millpond.checkpoints import classifier_steps
from millpond.checkpoints.classifier_steps import HeadRows, Norm, Step
from millpond.checkpoints.classifiers import Classifier
from millpond.checkpoints.stored_tensor import StoredTensor
from millpond.checkpoints.weights import find_tensor, stored_tensors
from millpond.errors import WeightMismatchError

_Step = Callable[[Floats, int], Floats]  # float32 [n, in] and threads, to [n, out]


class ClassifierHead:
    """Hidden states to logits, of a text or of each token."""

    def __init__(self, description: Classifier, *, width: int) -> None:
        """Read the head's weights; ``width`` is the backbone's.

        Raises:
            WeightMismatchError: Tensors are missing, or do not fit to each other, to ``width`` or to the labels.
            NotSupported: An activation is not known here.
        """
        self.description = description
        tensors = stored_tensors(description.folder)
        self._steps: list[_Step] = []
        for step in description.steps:
            function, width = _build(step, description, tensors, width)
            self._steps.append(function)
        count = len(description.labels)
        if count and count != width:
            raise WeightMismatchError(
                f"{description.folder}: config.json names {count} labels ({', '.join(description.labels[:4])}...) "
                f"and the head has {width}; check that the files belong together"
            )

    def tokens(self, hidden: Floats, threads: int) -> Floats:  # [tokens, hidden] -> [tokens, labels]
        """Logits of every token."""
        for step in self._steps:
            hidden = step(hidden, threads)
        return hidden / np.float32(self.description.divisor)

    def pool(self, hidden: Floats, bounds: Ints, threads: int) -> Floats:  # [tokens, hidden] -> [texts, labels]
        """Logits of every text; ``bounds [texts + 1]`` says where each begins and ends."""
        pooling = self.description.pooling
        assert pooling is not None
        if self.description.pool_logits:
            return pool((pooling,), self.tokens(hidden, threads), bounds, None)
        return self.tokens(pool((pooling,), hidden, bounds, None), threads)


def _build(step: Step, description: Classifier, tensors: Mapping[str, StoredTensor], width: int) -> tuple[_Step, int]:
    """A step for rows of ``width`` columns, and the columns of its result."""
    if isinstance(step, str):
        activation = activation_of(step)
        return lambda rows, threads: activation(rows), width
    if isinstance(step, HeadRows):
        rows = head_rows(description.folder, step.tokens)
        _check_width(description, "the language-model head", rows.weight.shape[1], width)
        return _difference(rows) if step.difference else (rows, len(rows.weight))
    biased = isinstance(step, classifier_steps.Linear) and step.biased
    weight, bias = _weights(step.name, description, tensors, biased=biased)
    if len(weight.shape) != (1 if isinstance(step, Norm) else 2):
        raise WeightMismatchError(f"{description.folder}: {weight.name} has shape {list(weight.shape)}")
    _check_width(description, step.name, weight.shape[-1], width)
    if isinstance(step, Norm):
        scale, shift, epsilon = weight.float32(), None if bias is None else bias.float32(), step.eps
        return lambda rows, threads: layer_norm(rows, scale, shift, epsilon), width
    if step.softcap is not None:
        return VocabularyRows(weight.float32(), softcap=step.softcap), weight.shape[0]
    return Linear(weight, bias), weight.shape[0]


def _difference(rows: VocabularyRows) -> tuple[_Step, int]:
    """The logit of the second entry minus that of the first."""
    if rows.softcap is None:  # one row instead of two
        return VocabularyRows(rows.weight[1:2] - rows.weight[0:1], softcap=None), 1

    def difference(hidden: Floats, threads: int) -> Floats:
        logits = rows(hidden, threads)
        return logits[:, 1:2] - logits[:, 0:1]

    return difference, 1


def _check_width(description: Classifier, name: str, columns: int, width: int) -> None:
    if columns != width:
        raise WeightMismatchError(
            f"{description.folder}: {name} takes {columns} features, and gets {width}; "
            "check that config.json and weights belong together"
        )


def _weights(
    name: str, description: Classifier, tensors: Mapping[str, StoredTensor], *, biased: bool
) -> tuple[StoredTensor, StoredTensor | None]:
    keys = find_tensor(tensors, f"{name}.weight"), find_tensor(tensors, f"{name}.bias")
    if keys[0] is None or (biased and keys[1] is None):
        raise WeightMismatchError(
            f"{description.folder} has no tensor {name}.{'bias' if keys[0] else 'weight'}, which its head needs; "
            'is it a classifier? (a bare backbone embeds: convert="embed"; a language model needs '
            'hf_overrides={"classifier_from_token": [...]})'
        )
    return tensors[keys[0]], None if keys[1] is None else tensors[keys[1]]
