"""Sparse heads: ``(token ids [k], weights [k], number of them for each text)``, ids ascending, positive weights only.

The number of weights is known on the device only, so whoever reads them waits for it. On a GPU ``launch`` does what
needs no waiting, and returns a function for the rest.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import nn

from millpond.backends.torch.attention.segments import Segments
from millpond.backends.torch.pooling.masked_lm import MaskedLanguageHead, build_masked_head
from millpond.backends.torch.weights import read_file, read_tensors
from millpond.checkpoints.layouts.sparse import (
    Saturation,
    Sparse,
    SparseCode,
    Splade,
    StaticWeights,
    Strategy,
    TokenVectors,
)
from millpond.errors import WeightMismatchError

Weights = tuple[torch.Tensor, torch.Tensor, list[int]]

# Logits in memory at once: 64 MiB, which is 550 tokens with BERT's vocabulary or 67 with XLM-R's.
_LOGITS = 1 << 24
# The same on a GPU, for which such a product is small: 256 MiB, or 128 in half precision.
_GPU_LOGITS = 1 << 26


class SpladeHead(nn.Module):
    """SPLADE: vocabulary logits, chunk by chunk of tokens, pooled over each text."""

    def __init__(
        self, vocabulary: MaskedLanguageHead, strategy: Strategy, activation: Saturation, *, logits: int = _LOGITS
    ) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.strategy = strategy
        self.twice = activation == "log1p_relu"
        self.chunk = max(1, logits // vocabulary.vocabulary)  # tokens
        self.gpu_chunk = max(1, (_GPU_LOGITS if logits == _LOGITS else logits) // vocabulary.vocabulary)

    def read(self, hidden: torch.Tensor, segments: Segments, input_ids: torch.Tensor) -> Weights:
        """Weights of every vocabulary entry with a positive weight."""
        ids, weights, counts = [], [], []
        for pooled in self._pooled(hidden.float(), segments):  # [vocabulary]
            entries = pooled.nonzero()[:, 0]
            ids.append(entries)
            weights.append(pooled[entries])
            counts.append(len(entries))
        return torch.cat(ids).int(), torch.cat(weights), counts

    def launch(
        self, hidden: torch.Tensor, segments: Segments, input_ids: torch.Tensor, *, half: bool | None = None
    ) -> Callable[[], Weights]:
        """The pooled rows of all texts, computed without waiting; the returned function waits and reads the weights."""
        if half is None:
            half = hidden.is_cuda and hidden.dtype is not torch.float32
        return partial(self._entries, self._pooled_at_once(hidden, segments, half))

    def _pooled_at_once(self, hidden: torch.Tensor, segments: Segments, half: bool) -> torch.Tensor:
        """``[n, vocabulary]`` maxima before saturation, or sums after it, of all texts; a chunk of tokens at a time."""
        greatest = self.strategy == "max"
        ends = [0, *accumulate(segments.lengths)]
        pooled = torch.full(
            (len(segments.lengths), self.vocabulary.vocabulary),
            float("-inf") if greatest else 0.0,
            dtype=torch.float16 if half and greatest else torch.float32,
            device=hidden.device,
        )
        for first in range(0, ends[-1], self.gpu_chunk):
            last = min(first + self.gpu_chunk, ends[-1])
            begin, end = bisect_right(ends, first) - 1, bisect_left(ends, last)  # texts with tokens in the chunk
            logits = self.vocabulary(hidden[first:last].float(), half=half)
            lengths = segments.cu_seqlens[begin : end + 1].clamp(first, last).diff()
            rows = logits if greatest else self._saturate(logits.float())
            part = torch.segment_reduce(rows, self.strategy, lengths=lengths, axis=0, unsafe=True)
            pooled[begin:end] = torch.maximum(pooled[begin:end], part) if greatest else pooled[begin:end] + part
        return pooled

    def _entries(self, pooled: torch.Tensor) -> Weights:
        """The weights of each text; waits for the device."""
        texts, ids = (~(pooled <= 0)).nonzero(as_tuple=True)  # of the order of the texts and ids; NaN is to be noticed
        weights = pooled[texts, ids].float()
        counts = torch.bincount(texts, minlength=len(pooled))
        return ids.int(), self._saturate(weights) if self.strategy == "max" else weights, counts.tolist()

    def _pooled(self, hidden: torch.Tensor, segments: Segments) -> Iterator[torch.Tensor]:
        """The pooled row of each text, with the logits of one chunk of tokens in memory at a time."""
        row: torch.Tensor | None = None
        logits, first = hidden[:0], 0  # logits of the tokens from ``first`` on
        start = 0
        for length in segments.lengths:
            stop = start + length
            while start < stop:
                if start >= first + len(logits):
                    first = start
                    logits = self.vocabulary(hidden[first : first + self.chunk])
                end = min(stop, first + len(logits))
                row = self._add(row, logits[start - first : end - first])
                start = end
            assert row is not None  # a segment has at least one token
            yield self._saturate(row) if self.strategy == "max" else row
            row = None

    def _add(self, row: torch.Tensor | None, logits: torch.Tensor) -> torch.Tensor:
        """A text's row with more of its tokens. Saturation is monotonic, so the maximum is taken before it."""
        if self.strategy == "max":
            maximum = logits.amax(0)
            return maximum if row is None else torch.maximum(row, maximum)
        total = self._saturate(logits).sum(0)
        return total if row is None else row.add_(total)

    def _saturate(self, logits: torch.Tensor) -> torch.Tensor:
        weights = logits.relu().log1p_()
        return weights.log1p_() if self.twice else weights


class TokenWeightHead(nn.Module):
    """BGE-M3's token weights: ``relu(linear(hidden))``; a repeated token has the largest."""

    def __init__(self, linear: nn.Linear, unused: tuple[int, ...]) -> None:
        super().__init__()
        self.linear = linear
        self.register_buffer("unused", torch.tensor(unused, dtype=torch.int64), persistent=False)

    def read(self, hidden: torch.Tensor, segments: Segments, input_ids: torch.Tensor) -> Weights:
        """Weights of the tokens in each text."""
        return self.launch(hidden, segments, input_ids)()

    def launch(self, hidden: torch.Tensor, segments: Segments, input_ids: torch.Tensor) -> Callable[[], Weights]:
        """The weight of each token, computed without waiting; the returned function waits and reads the texts'."""
        return partial(self._entries, self.linear(hidden.float())[:, 0].relu(), segments, input_ids)

    def _entries(self, token_weights: torch.Tensor, segments: Segments, input_ids: torch.Tensor) -> Weights:
        """The weights of each text; waits for the device."""
        assert isinstance(self.unused, torch.Tensor)
        texts = torch.repeat_interleave(
            torch.arange(len(segments.lengths), device=token_weights.device),
            segments.cu_seqlens.diff().long(),
            output_size=segments.total,
        )
        used = (token_weights != 0) & ~torch.isin(input_ids, self.unused)
        # Text and token id as one number: equal pairs become one entry, in ascending order.
        span = int(input_ids.max()) + 1
        entries, slots = torch.unique(texts[used] * span + input_ids[used], return_inverse=True)
        weights = token_weights.new_zeros(len(entries)).scatter_reduce_(
            0, slots, token_weights[used], "amax", include_self=False
        )
        counts = torch.bincount(entries // span, minlength=len(segments.lengths))
        return (entries % span).int(), weights, counts.tolist()


class TokenPresenceHead(TokenWeightHead):
    """Each token of a text with its weight, however often it occurs."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(1, 1), ())

    def launch(self, hidden: torch.Tensor, segments: Segments, input_ids: torch.Tensor) -> Callable[[], Weights]:
        """As :meth:`TokenWeightHead.launch`, of the weights themselves."""
        return partial(self._entries, hidden.float()[:, 0], segments, input_ids)


class SparseCodeHead(nn.Module):
    """CSR's ``relu((x - pre_bias) W^T + latent_bias)`` of pooled vectors."""

    def __init__(self, description: SparseCode) -> None:
        super().__init__()
        shapes = description.shapes()
        tensors = read_tensors(description.folder, only=tuple(name for names in shapes for name in names))
        for names, shape in shapes.items():
            name = next((name for name in names if name in tensors), names[0])
            if name not in tensors or tuple(tensors[name].shape) != shape:
                actual = tuple(tensors[name].shape) if name in tensors else "missing"
                raise WeightMismatchError(f"{description.folder}: {name} is {actual}, not {shape}")
            self.register_buffer(names[0].replace("encoder.", ""), tensors[name].float(), persistent=False)
        self.standardized = description.standardized

    def read(self, pooled: torch.Tensor, segments: Segments, input_ids: torch.Tensor) -> Weights:
        """The positive entries of each vector ``[n, in]``."""
        return self.launch(pooled, segments, input_ids)()

    def launch(self, pooled: torch.Tensor, segments: Segments, input_ids: torch.Tensor) -> Callable[[], Weights]:
        """The codes, computed without waiting; the returned function waits and reads the entries."""
        rows = pooled.float()
        if self.standardized:
            rows = rows - rows.mean(-1, keepdim=True)
            rows = rows / (rows.std(-1, keepdim=True) + 1e-5)
        code = nn.functional.linear(rows - self.pre_bias, self.weight, self.latent_bias)  # type: ignore[arg-type,operator]
        return partial(self._entries, code)

    @staticmethod
    def _entries(code: torch.Tensor) -> Weights:
        texts, ids = (~(code <= 0)).nonzero(as_tuple=True)  # NaN is to be noticed
        return ids.int(), code[texts, ids], torch.bincount(texts, minlength=len(code)).tolist()


SparseHead = SpladeHead | TokenWeightHead | SparseCodeHead


def build_sparse(description: Sparse, config: Mapping[str, Any], *, width: int, device: torch.device) -> SparseHead:
    """The head of ``description``, in float32; ``width`` is the backbone's."""
    if isinstance(description, Splade):
        vocabulary = build_masked_head(description.folder, config, device)
        return SpladeHead(vocabulary, description.strategy, description.activation)
    if isinstance(description, StaticWeights):
        return TokenPresenceHead().to(device).eval()
    if isinstance(description, SparseCode):
        return SparseCodeHead(description).to(device).eval()
    linear = _linear(description.path, width)
    if linear.out_features != 1:
        raise WeightMismatchError(f"{description.path} gives {linear.out_features} numbers a token; it must give 1")
    return TokenWeightHead(linear, description.unused).to(device).eval()


def build_token_vectors(description: TokenVectors, *, width: int, device: torch.device) -> nn.Linear:
    """BGE-M3's projection for late interaction, in float32: ``[tokens, width]`` to ``[tokens, out]``."""
    return _linear(description.path, width).to(device).eval()


def _linear(path: Path, width: int) -> nn.Linear:
    tensors = read_file(path)
    weight = tensors.get("weight")
    if weight is None or weight.dim() != 2 or weight.shape[1] != width:
        problem = "missing" if weight is None else f"of shape {tuple(weight.shape)}"
        raise WeightMismatchError(f"{path}: weight is {problem}; the backbone's states are {width} wide")
    linear = nn.Linear(width, weight.shape[0], bias="bias" in tensors)
    try:
        linear.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    except RuntimeError as error:
        raise WeightMismatchError(f"{path} does not hold a linear layer: {error}") from error
    return linear.requires_grad_(False)
