"""sentence-transformers' modules that turn a text's token rows into others: WordWeights, CNN, LSTM, layers' means."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from millpond.checkpoints.modules import Convolution, LayerMean, Lstm, TokenHead, WordWeights
from millpond.checkpoints.resolve import read_json_object
from millpond.errors import ModelLoadError


def word_weights(path: Path, config: Mapping[str, Any]) -> tuple[tuple[float, ...], float]:
    """The weight of each word of ``vocab``, its own or that of its lower case, and that of words without one."""
    words, weights, rest = config.get("vocab"), config.get("word_weights", {}), config.get("unknown_word_weight", 1)
    listed = isinstance(words, list) and all(isinstance(word, str) for word in words)
    numbers = [rest, *weights.values()] if isinstance(weights, dict) else [None]
    if not listed or not all(isinstance(number, int | float) for number in numbers):
        raise ModelLoadError(
            f"{path} must give vocab as a list of words, word_weights as numbers by word, and unknown_word_weight"
        )
    assert isinstance(words, list) and isinstance(weights, dict)
    return tuple(float(weights.get(word, weights.get(word.lower(), rest))) for word in words), float(rest)


def _read_weights(folder: Path) -> WordWeights:
    """The file of weights is not read: sentence-transformers computes them from config.json, too."""
    path = folder / "config.json"
    weights, rest = word_weights(path, read_json_object(path))
    return WordWeights(weights=weights, rest=rest)


def _read_convolution(folder: Path) -> Convolution:
    path = folder / "cnn_config.json"
    config: dict[str, Any] = read_json_object(path)
    width: Any = config.get("in_embedding_dimension", config.get("in_word_embedding_dimension"))
    kernels, channels = config.get("kernel_sizes", [1, 3, 5]), config.get("out_channels", 256)
    if not isinstance(kernels, list) or not kernels or not _positive(width, channels, *kernels):
        raise ModelLoadError(f"{path} must give in_embedding_dimension, out_channels and kernel_sizes as positive ints")
    strides = config.get("stride_sizes") or [1]
    if any(size % 2 == 0 for size in kernels) or any(step != 1 for step in strides):
        raise ModelLoadError(
            f"{path}: kernel_sizes {kernels} and stride_sizes {strides} give fewer rows than tokens, and then "
            "sentence-transformers pools the padding of a batch, so a text has no vector of its own; millpond runs odd "
            "kernels with strides of 1"
        )
    return Convolution(folder=folder, in_features=width, channels=channels, kernels=tuple(kernels))


def _read_lstm(folder: Path) -> Lstm:
    path = folder / "lstm_config.json"
    config = read_json_object(path)
    width: Any = config.get("embedding_dimension", config.get("word_embedding_dimension"))
    hidden: Any = config.get("hidden_dim")
    layers: Any = config.get("num_layers", 1)
    if not _positive(width, hidden, layers):
        raise ModelLoadError(f"{path} must give embedding_dimension, hidden_dim and num_layers as positive ints")
    directions = 2 if config.get("bidirectional", True) else 1
    return Lstm(folder=folder, in_features=width, hidden=hidden, layers=layers, directions=directions)


def read_layer_mean(folder: Path) -> LayerMean:
    """A WeightedLayerPooling's config."""
    path = folder / "config.json"
    config = read_json_object(path)
    layers, first = config.get("num_hidden_layers", 12), config.get("layer_start", 4)
    if not _positive(layers) or type(first) is not int or not 0 <= first <= layers:
        raise ModelLoadError(f"{path}: layer_start {first!r} must be a layer from 0 to num_hidden_layers, {layers!r}")
    return LayerMean(folder=folder, first=first, layers=layers)


def _positive(*numbers: Any) -> bool:
    return all(type(number) is int and number > 0 for number in numbers)


READERS: Mapping[str, Callable[[Path], TokenHead]] = {
    "WordWeights": _read_weights,
    "CNN": _read_convolution,
    "LSTM": _read_lstm,
}
