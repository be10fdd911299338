"""sentence-transformers' modules before and after the pooling, in float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from millpond.backends.native.heads.activations import torch_activation_of
from millpond.backends.native.heads.kernels import Floats, Linear
from millpond.backends.native.heads.latent_attention import LatentAttentionHead
from millpond.backends.native.heads.norms import layer_norm, unit
from millpond.checkpoints.modules import Codes, Dense, Head, LatentAttention, LayerNorm
from millpond.checkpoints.stored_tensor import StoredTensor
from millpond.checkpoints.weights import stored_tensors
from millpond.errors import WeightMismatchError

_Module = Callable[[Floats, int], Floats]  # float32 [n, in] and threads, to [n, out]
_EPSILON = 1e-5  # of torch.nn.LayerNorm, which sentence-transformers' LayerNorm leaves as it is


class Modules:
    """Modules one after another."""

    def __init__(self, descriptions: Sequence[Head], *, width: int) -> None:
        """Read their weights; ``width`` is that of the rows that they take.

        Raises:
            WeightMismatchError: They do not fit config.json, or to ``width``.
            NotSupported: An activation is not known here.
        """
        self._modules: list[_Module] = []
        for description in descriptions:
            self._modules.append(_module(description, width))
            width = description.out_features if isinstance(description, Dense) else width

    def __len__(self) -> int:
        return len(self._modules)

    def __call__(self, rows: Floats, threads: int) -> Floats:  # [n, in] -> [n, out]
        """Run rows through all of them."""
        for module in self._modules:
            rows = module(rows, threads)
        return rows


def _module(description: Head, width: int) -> _Module:
    if isinstance(description, Dense):
        return _dense(description)
    if isinstance(description, LatentAttention):
        shapes = description.tensors
        tensors = stored_tensors(description.folder, only=tuple(shapes))
        _check(description.folder, tensors, shapes)
        return LatentAttentionHead(description, tensors)
    if isinstance(description, Codes):
        return lambda rows, threads: np.rint(np.tanh(rows) * np.float32(127))
    if isinstance(description, LayerNorm):
        shape = (description.dimensions,)
        if shape != (width,):
            raise WeightMismatchError(f"{description.folder} norms {description.dimensions} columns, and gets {width}")
        tensors = _read(description.folder, {"norm.weight": shape, "norm.bias": shape})
        weight, bias = (tensors[name].float32() for name in ("norm.weight", "norm.bias"))
        return lambda rows, threads: layer_norm(rows, weight, bias, _EPSILON)
    return lambda rows, threads: unit(rows)


def _dense(description: Dense) -> _Module:
    activation = torch_activation_of(description.activation)
    shape = (description.out_features, description.in_features)
    if description.weight is not None:  # stored with the backbone's
        name = description.weight
        found = stored_tensors(description.folder, only=(name,))
        _check(description.folder, found, {name: shape})
        projection = Linear(found[name])
        return lambda rows, threads: activation(projection(rows, threads))
    is_projected = description.residual and shape[0] != shape[1]
    tensors = _read(
        description.folder,
        {
            "linear.weight": shape,
            **({"linear.bias": shape[:1]} if description.bias else {}),
            **({"residual.weight": shape} if is_projected else {}),
        },
    )
    linear = Linear(tensors["linear.weight"], tensors.get("linear.bias"))
    if not description.residual:
        return lambda rows, threads: activation(linear(rows, threads))
    if not is_projected:
        return lambda rows, threads: activation(linear(rows, threads)) + rows
    residual = Linear(tensors["residual.weight"])
    return lambda rows, threads: activation(linear(rows, threads)) + residual(rows, threads)


def _read(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, StoredTensor]:
    tensors = stored_tensors(folder)
    _check(folder, tensors, shapes)
    return tensors


def _check(folder: Path, tensors: Mapping[str, StoredTensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise WeightMismatchError unless the tensors have these names and shapes."""
    for name in (*shapes, *tensors):
        found = "no tensor" if name not in tensors else f"shape {list(tensors[name].shape)}"
        wanted = "none" if name not in shapes else f"shape {list(shapes[name])}"
        if name not in tensors or name not in shapes or tensors[name].shape != shapes[name]:
            raise WeightMismatchError(
                f"{folder}: weights and config.json disagree: for {name} the file has {found}, and config.json asks "
                f"for {wanted}; check that the files belong together"
            )
