"""The tensors of modules on token rows, with the shapes that their config gives."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from millpond.checkpoints.modules import Convolution, LayerMean, Lstm
from millpond.checkpoints.weights import stored_tensors
from millpond.errors import ModelLoadError, WeightMismatchError


def take_all(description: Convolution | Lstm | LayerMean) -> dict[str, npt.NDArray[np.float32]]:
    """Every tensor of a module, in float32.

    Raises:
        WeightMismatchError: One is missing, has another shape, or is not known.
    """
    shapes, stored = _shapes(description), stored_tensors(description.folder)
    for name in (*shapes, *stored):
        found = "no tensor" if name not in stored else f"shape {list(stored[name].shape)}"
        if name not in shapes or name not in stored or stored[name].shape != shapes[name]:
            raise WeightMismatchError(
                f"{description.folder}: weights and config disagree: for {name} the file has {found}, and the config "
                f"asks for {list(shapes[name]) if name in shapes else 'none'}; check that the files belong together"
            )
    return {name: np.array(tensor.float32(), order="C") for name, tensor in stored.items()}


def layer_shares(description: LayerMean, layers: int) -> list[float]:
    """The part that the states of each layer have in the mean, layer 0, the embeddings, first; they add up to 1."""
    if description.layers != layers:
        raise WeightMismatchError(
            f"{description.folder} averages the states of {description.layers} layers, and the backbone has {layers}"
        )
    weights = take_all(description)["layer_weights"].astype(np.float64)
    if weights.sum() == 0:
        raise ModelLoadError(f"{description.folder}: the layers' weights add up to 0, so they have no mean")
    shares: list[float] = (weights / weights.sum()).tolist()
    return [0.0] * description.first + shares


def _shapes(description: Convolution | Lstm | LayerMean) -> dict[str, tuple[int, ...]]:
    if isinstance(description, LayerMean):
        return {"layer_weights": (description.layers + 1 - description.first,)}
    shapes: dict[str, tuple[int, ...]] = {}
    if isinstance(description, Convolution):
        for i, size in enumerate(description.kernels):
            shapes[f"convs.{i}.weight"] = (description.channels, description.in_features, size)
            shapes[f"convs.{i}.bias"] = (description.channels,)
        return shapes
    four, into = 4 * description.hidden, description.in_features
    for layer in range(description.layers):
        for end in ("", "_reverse")[: description.directions]:
            shapes |= {
                f"encoder.weight_ih_l{layer}{end}": (four, into),
                f"encoder.weight_hh_l{layer}{end}": (four, description.hidden),
                f"encoder.bias_ih_l{layer}{end}": (four,),
                f"encoder.bias_hh_l{layer}{end}": (four,),
            }
        into = description.out_features
    return shapes
