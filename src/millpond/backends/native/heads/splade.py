"""SPLADE: a masked language model's logits pooled over each text, in a kernel that keeps no logits of a token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from millpond.backends.native import structs
from millpond.backends.native.heads.kernels import Floats, Linear, PackedWeight, VocabularyCall, kernel, run
from millpond.backends.native.heads.pooling import Ints
from millpond.backends.native.kernels import Precision
from millpond.backends.native.packing.weight_packer import NotSupported
from millpond.checkpoints import architectures
from millpond.checkpoints.architecture import MaskedHeadNames
from millpond.checkpoints.families.renaming import wrapped_head
from millpond.checkpoints.layouts.sparse import Splade
from millpond.checkpoints.stored_tensor import StoredTensor
from millpond.checkpoints.weights import stored_tensors, tensor_shapes
from millpond.errors import UnsupportedArchitectureError, WeightMismatchError

_PIECE = 64  # tokens whose logits of all entries are there at once, where no kernel pools them: 39 MB of Qwen 3's
_MOST_POOLED = 64 << 20  # bytes of the rows `[texts, vocabulary]` of one call: 550 texts with BERT's vocabulary


class SpladeHead:
    """``log(1 + relu(logits))``, the largest or the sum of a text's tokens."""

    def __init__(self, description: Splade, config: Mapping[str, Any], *, width: int, dtype: Precision) -> None:
        """Read the head of the language model whose config.json is ``config``; ``width`` is the backbone's.

        Raises:
            UnsupportedArchitectureError: The head of the family is not known.
            WeightMismatchError: Tensors are missing or do not fit to each other.
            NotSupported: The kernels do not have its activation.
        """
        folder, names = description.folder, _names(config, description.folder)
        parts = _read(folder, names, width)
        self.vocabulary, self._columns = parts["decoder"].shape
        self._is_max, self._twice = description.strategy == "max", description.activation == "log1p_relu"
        self._plain = None if names.dense else Linear(parts["decoder"])
        if self._plain is not None:
            return
        floats = {name: part.float32() for name, part in parts.items() if name not in ("dense", "decoder")}
        self._dense = PackedWeight(parts["dense"], floats.get("dense_bias"), dtype)
        self._decoder = PackedWeight(parts["decoder"], floats.get("decoder_bias"), dtype)
        padding = (0, self._dense.struct.out - self._columns)
        self._norm = {name: np.pad(floats[name], padding) for name in ("norm", "norm_bias") if name in floats}
        self._activation = vocabulary_activation(config, names)
        self._epsilon = float(config.get(names.epsilon, names.default_epsilon))
        self._pool = kernel(f"vocabulary_{dtype}")

    @property
    def weights(self) -> int:
        """Numbers that every token is multiplied with."""
        if self._plain is not None:
            return self._plain.in_features * self._plain.out_features
        dense, decoder = self._dense, self._decoder
        return dense.in_features * dense.out_features + decoder.in_features * decoder.out_features

    def read(self, hidden: Floats, bounds: Ints, ids: Ints, threads: int) -> Sequence[Floats]:
        """Of each text ``[k, 2]``: vocabulary entries with a positive weight, ascending, and the weights."""
        texts = max(1, _MOST_POOLED // (4 * self.vocabulary))
        rows: list[Floats] = []
        for first in range(0, len(bounds) - 1, texts):
            rows += self._entries(self._pooled(hidden, bounds[first : first + texts + 1], threads))
        return rows

    def _pooled(self, hidden: Floats, bounds: Ints, threads: int) -> Floats:
        """``[texts, vocabulary]``: of each entry the largest logit, or the sum of its tokens' weights."""
        if self._plain is not None:
            return self._pooled_in_pieces(self._plain, hidden, bounds, threads)
        pooled = np.empty((len(bounds) - 1, self._decoder.struct.out), dtype=np.float32)
        hidden = np.ascontiguousarray(hidden, dtype=np.float32)
        assert hidden.shape[1] == self._dense.in_features, "the kernel checks nothing"
        bounds = np.ascontiguousarray(bounds, dtype=np.int32)
        address = {name: numbers.ctypes.data for name, numbers in self._norm.items()}
        norm = structs.NormWeights(
            kind=structs.LAYER_NORM, weight=address["norm"], bias=address.get("norm_bias"), epsilon=self._epsilon
        )
        call = VocabularyCall(
            rows=hidden.ctypes.data,
            bounds=bounds.ctypes.data,
            out=pooled.ctypes.data,
            dense=self._dense.struct,
            decoder=self._decoder.struct,
            norm=norm,
            width=self._dense.in_features,
            columns=self._columns,
            texts=len(pooled),
            activation=self._activation,
            logarithms=0 if self._is_max else 1 + self._twice,
            threads=threads,
        )
        run(self._pool, call)
        return pooled[:, : self.vocabulary]

    def _pooled_in_pieces(self, head: Linear, hidden: Floats, bounds: Ints, threads: int) -> Floats:
        """The same of a head that is a product with the vocabulary alone, whose logits are there for a few tokens."""
        pooled = np.full((len(bounds) - 1, self.vocabulary), -np.inf if self._is_max else 0, dtype=np.float32)
        for first in range(int(bounds[0]), int(bounds[-1]), _PIECE):
            last = min(first + _PIECE, int(bounds[-1]))
            logits = head(hidden[first:last], threads)
            if not self._is_max:
                logits = self._saturated(np.maximum(logits, np.float32(0)))
            begin, end = np.searchsorted(bounds, first, "right") - 1, np.searchsorted(bounds, last)
            for text in range(int(begin), int(end)):
                own = logits[max(int(bounds[text]), first) - first : int(bounds[text + 1]) - first]
                pooled[text] = np.maximum(pooled[text], own.max(0)) if self._is_max else pooled[text] + own.sum(0)
        return pooled

    def _saturated(self, weights: Floats) -> Floats:
        weights = np.log1p(weights)
        return np.log1p(weights) if self._twice else weights

    def _entries(self, pooled: Floats) -> list[Floats]:
        texts, entries = np.nonzero(~(pooled <= 0))  # NaN is to be noticed
        weights = pooled[texts, entries]
        if self._is_max:  # the logarithm is monotonic
            weights = self._saturated(weights)
        pairs = np.stack((entries.astype(np.float32), weights), axis=1)  # ids are far below float32's 2^24
        return np.split(pairs, np.searchsorted(texts, np.arange(1, len(pooled))))


def vocabulary_activation(config: Mapping[str, Any], names: MaskedHeadNames) -> int:
    """The activation of the head, by its number in the kernels; raises NotSupported if they have none of this name."""
    activation = str(config.get(names.activation, "gelu"))
    if activation not in structs.ACTIVATIONS:
        raise NotSupported(f"activation {activation!r} of a masked language model's head")
    return structs.ACTIVATIONS[activation]


def _names(config: Mapping[str, Any], folder: Path) -> MaskedHeadNames:
    row = architectures.row_of(str(config.get("model_type")))
    if row is None or row.mlm is None:
        known = ", ".join(row.model_type for row in architectures.ARCHITECTURES if row.mlm is not None)
        raise UnsupportedArchitectureError(
            f"{folder}: millpond knows no masked-language-model head of model_type {config.get('model_type')!r}; "
            f"SPLADE runs over {known}"
        )
    return row.mlm


def _read(folder: Path, names: MaskedHeadNames, width: int) -> dict[str, StoredTensor]:
    """The tensors of the head by their part, checked against each other."""
    names = wrapped_head(names, tensor_shapes(folder))
    tensors = stored_tensors(folder, only=names.tensors())
    candidates = {
        "dense": (f"{names.dense}.weight",),
        "dense_bias": (f"{names.dense}.bias",),
        "norm": (f"{names.norm}.weight", f"{names.norm}.gamma"),
        "norm_bias": (f"{names.norm}.bias", f"{names.norm}.beta"),
        "decoder": (names.decoder, f"{names.backbone}.{names.table}", names.table),
        "decoder_bias": names.biases,
    }
    found = {part: next((name for name in listed if name in tensors), None) for part, listed in candidates.items()}
    for part in ("dense", "norm", "decoder") if names.dense else ("decoder",):
        if found[part] is None:
            raise WeightMismatchError(
                f"{folder} has no {candidates[part][0]}: it is no masked language model, and SPLADE reads its weights "
                "off that head"
            )
    parts = {part: tensors[name] for part, name in found.items() if name is not None}
    _check_shapes(parts, folder, width)
    return parts


def _check_shapes(parts: Mapping[str, StoredTensor], folder: Path, width: int) -> None:
    if len(parts["decoder"].shape) != 2:
        raise WeightMismatchError(f"{folder}: the decoder {parts['decoder'].name} is {parts['decoder'].shape}")
    vocabulary, inner = parts["decoder"].shape
    shapes = {
        "dense": (inner, width),
        "dense_bias": (inner,),
        "norm": (inner,),
        "norm_bias": (inner,),
        "decoder_bias": (vocabulary,),
    }
    for name, shape in shapes.items():
        if name in parts and parts[name].shape != shape:
            raise WeightMismatchError(
                f"{folder}: the masked-language-model head's {name} is {parts[name].shape}, not {shape}; "
                "check that the files belong together"
            )
