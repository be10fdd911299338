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


Head = Dense | LayerNorm | Normalize | Codes
