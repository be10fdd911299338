"""The sentence-transformers modules that millpond runs, as descriptions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from millpond.values.spec import PoolingMode

LATENTS = "latent_attention_model."  # before the names of NV-Embed's latent attention


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
class LatentAttention:
    """Attention of each token's row to an array of latents, then a feed forward, both added to the row (NV-Embed)."""

    folder: Path
    width: int  # of the rows, and of the latents
    latents: int
    heads: int
    dim: int  # columns of a head

    @property
    def out_features(self) -> int:
        """Columns of the result."""
        return self.width

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The shapes of its tensors, which are stored with the backbone's."""
        width, inner = self.width, self.heads * self.dim
        attention, feed = (f"{LATENTS}cross_attend_blocks.{i}." for i in range(2))
        norms = (f"{attention}norm", f"{attention}norm_context", f"{feed}norm")
        return {
            f"{LATENTS}latents": (self.latents, width),
            **{f"{norm}.{part}": (width,) for norm in norms for part in ("weight", "bias")},
            f"{attention}fn.to_q.weight": (inner, width),
            f"{attention}fn.to_kv.weight": (2 * inner, width),
            f"{attention}fn.to_out.weight": (width, inner),
            f"{feed}fn.net.0.weight": (8 * width, width),
            f"{feed}fn.net.0.bias": (8 * width,),
            f"{feed}fn.net.2.weight": (width, 4 * width),
            f"{feed}fn.net.2.bias": (width,),
        }


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


# What turns token rows into others, before the pooling
TokenHead = Dense | LatentAttention | WordWeights | Convolution | Lstm
Head = Dense | LatentAttention | LayerNorm | Normalize | Codes
