"""The sentence-transformers modules that millpond runs, as descriptions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from millpond.values.spec import PoolingMode


@dataclass(frozen=True, kw_only=True)
class Pooling:
    """Token rows to one row: modes concatenated in order; ``include_prompt=False`` skips the prompt's tokens."""

    modes: tuple[PoolingMode, ...]
    include_prompt: bool = True


@dataclass(frozen=True, kw_only=True)
class Dense:
    """``activation(x W^T + b)``, plus ``x`` (projected where the widths differ) if ``residual``.

    ``weight`` names W if it is a tensor among the backbone's, as in Stanford's ColBERT; ``None`` if ``folder`` holds
    only this layer.
    """

    folder: Path
    in_features: int
    out_features: int
    bias: bool
    activation: str
    residual: bool
    weight: str | None = None


@dataclass(frozen=True, kw_only=True)
class LayerNorm:
    """Layer normalization of a pooled row."""

    folder: Path
    dimensions: int


@dataclass(frozen=True, kw_only=True)
class Normalize:
    """Division by the L2 norm."""


@dataclass(frozen=True, kw_only=True)
class Codes:
    """``round(127 tanh(x))``: whole numbers from -127 to 127, compared by cosine (pplx-embed)."""


@dataclass(frozen=True, kw_only=True)
class WordWeights:
    """A factor for each token's row, by its id; a mean divides by the sum of the factors, not by the count."""

    weights: tuple[float, ...]
    rest: float  # that of ids behind the last one


@dataclass(frozen=True, kw_only=True)
class Convolution:
    """sentence-transformers' CNN: convolutions over a text's token rows, side by side; beyond its ends there are zeros.

    Every kernel is odd, so that a token keeps its row.
    """

    folder: Path
    in_features: int
    channels: int  # of each kernel
    kernels: tuple[int, ...]

    @property
    def out_features(self) -> int:
        """Columns of the result."""
        return self.channels * len(self.kernels)


@dataclass(frozen=True, kw_only=True)
class Lstm:
    """An LSTM over a text's token rows, in one direction or in both."""

    folder: Path
    in_features: int
    hidden: int  # of a direction
    layers: int
    directions: int

    @property
    def out_features(self) -> int:
        """Columns of the result."""
        return self.hidden * self.directions


@dataclass(frozen=True, kw_only=True)
class LayerMean:
    """sentence-transformers' WeightedLayerPooling: the weighted mean of the states behind layers ``first`` to the last.

    Layer 0 is the embeddings.
    """

    folder: Path
    first: int
    layers: int  # of the backbone


Head = Dense | LayerNorm | Normalize | Codes
TokenHead = Dense | WordWeights | Convolution | Lstm  # what turns token rows into others, before the pooling
