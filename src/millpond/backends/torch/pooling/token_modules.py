"""sentence-transformers' modules on token rows, in float32: a text's rows are turned into others before the pooling.

Lengths are read on the host for an LSTM only, which a captured CUDA graph therefore does not have.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from millpond.backends.torch.attention.segments import Segments
from millpond.backends.torch.pooling.heads import build_heads
from millpond.checkpoints.layouts.words import Bag
from millpond.checkpoints.modules import Convolution, Lstm, TokenHead, WordWeights
from millpond.checkpoints.token_tensors import take_all


class TokenModules(nn.Module):
    """Modules one after another, each over the rows of whole texts."""

    def __init__(
        self,
        descriptions: Sequence[TokenHead],
        device: torch.device,
        *,
        vocabulary: int = 0,
        nothing: int | None = None,
    ) -> None:
        """Read their weights. ``nothing``: the id that stands for no token, whose row is 0 behind them all."""
        super().__init__()
        self.steps = nn.ModuleList(_step(each, device, vocabulary) for each in descriptions).to(device)
        self._nothing = nothing
        self.reads_others = any(isinstance(each, Convolution | Lstm | WordWeights) for each in descriptions)

    def forward(self, rows: torch.Tensor, ids: torch.Tensor, segments: Segments) -> torch.Tensor:
        """``[tokens, in]`` to ``[tokens, out]``."""
        for step in self.steps:
            rows = step(rows, ids, segments) if isinstance(step, _OfTexts) else step(rows)
        if len(self.steps) and self._nothing is not None:
            rows = rows.masked_fill((ids == self._nothing)[:, None], 0.0)
        return rows

    def totals(self, ids: torch.Tensor, segments: Segments) -> torch.Tensor | None:
        """The sum of each text's factors ``[n]``, which a mean divides by; ``None``: by the number of tokens."""
        factors = [step for step in self.steps if isinstance(step, _Factors)]
        return factors[-1].totals(ids, segments) if factors else None


class BagHead(nn.Module):
    """The weights of a text's words ``[words, 1]`` to its row of the vocabulary."""

    def __init__(self, bag: Bag) -> None:
        super().__init__()
        self._columns, self._counted = len(bag.weights), bag.counted

    def forward(self, rows: torch.Tensor, ids: torch.Tensor, segments: Segments) -> torch.Tensor:
        """``[n, vocabulary]``; the id behind the last word stands for none."""
        out = rows.new_zeros((len(segments.cu_seqlens) - 1, self._columns + 1), dtype=torch.float32)
        out.index_put_((_texts(segments), ids), rows[:, 0].float(), accumulate=self._counted)
        return out[:, :-1]


class _OfTexts(nn.Module):
    """A module that reads more than a token's own row."""


class _Factors(_OfTexts):
    def __init__(self, description: WordWeights, vocabulary: int) -> None:
        super().__init__()
        known = description.weights[:vocabulary]
        factors = [*known, *[description.rest] * (vocabulary - len(known)), 0.0]
        self.register_buffer("factors", torch.tensor(factors, dtype=torch.float32), persistent=False)

    def forward(self, rows: torch.Tensor, ids: torch.Tensor, segments: Segments) -> torch.Tensor:
        return rows * self._of(ids)[:, None]

    def totals(self, ids: torch.Tensor, segments: Segments) -> torch.Tensor:
        return torch.segment_reduce(self._of(ids), "sum", lengths=segments.cu_seqlens.diff(), axis=0, unsafe=True)

    def _of(self, ids: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.factors, torch.Tensor)
        return self.factors[ids]


class _Convolution(_OfTexts):
    def __init__(self, description: Convolution) -> None:
        super().__init__()
        tensors = take_all(description)
        self.convs = nn.ModuleList()
        for i, size in enumerate(description.kernels):
            conv = nn.Conv1d(description.in_features, description.channels, size, padding=size // 2)
            conv.load_state_dict({kind: torch.from_numpy(tensors[f"convs.{i}.{kind}"]) for kind in ("weight", "bias")})
            self.convs.append(conv.requires_grad_(False))
        self._reach = max(description.kernels) // 2

    def forward(self, rows: torch.Tensor, ids: torch.Tensor, segments: Segments) -> torch.Tensor:
        """All texts as one, with so many zeros between them that no kernel reaches from one to the next."""
        places = torch.arange(len(rows), device=rows.device) + self._reach * _texts(segments)
        count = len(rows) + self._reach * (len(segments.cu_seqlens) - 1)
        apart = rows.new_zeros((count, rows.shape[1])).index_copy_(0, places, rows)
        return torch.cat([conv(apart.T[None])[0].T for conv in self.convs], dim=1)[places]


class _Lstm(_OfTexts):
    def __init__(self, description: Lstm) -> None:
        super().__init__()
        self.encoder = nn.LSTM(
            description.in_features,
            description.hidden,
            num_layers=description.layers,
            bidirectional=description.directions == 2,
            batch_first=True,
        )
        self.load_state_dict({name: torch.from_numpy(tensor) for name, tensor in take_all(description).items()})
        self.requires_grad_(False)

    def forward(self, rows: torch.Tensor, ids: torch.Tensor, segments: Segments) -> torch.Tensor:
        packed = nn.utils.rnn.pack_sequence(rows.split(segments.lengths), enforce_sorted=False)
        return torch.cat(nn.utils.rnn.unpack_sequence(self.encoder(packed)[0]))


def _step(description: TokenHead, device: torch.device, vocabulary: int) -> nn.Module:
    if isinstance(description, WordWeights):
        return _Factors(description, vocabulary)
    if isinstance(description, Convolution):
        return _Convolution(description).eval()
    if isinstance(description, Lstm):
        return _Lstm(description).eval()
    return build_heads([description], device)


def _texts(segments: Segments) -> torch.Tensor:
    """int64 ``[tokens]`` the text of each token."""
    ends = segments.cu_seqlens
    texts = torch.arange(len(ends) - 1, device=ends.device)
    return torch.repeat_interleave(texts, ends.diff().long(), output_size=segments.total)
