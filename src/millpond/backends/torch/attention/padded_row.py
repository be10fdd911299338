"""PaddedRow: the sequences of a packed row in few dense batches, for a GPU that computes dense batches only.

A GPU starts a kernel in 5 to 10 microseconds, and a batch of mixed lengths has hundreds of runs of equal length. So
sequences of similar lengths are gathered into one dense batch, the shorter ones filled up, and results gathered back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from millpond.backends.torch.attention.segments import Run, Segments, on_device

Ints = npt.NDArray[np.int64]

# What filling up may cost in one batch: scores (of pairs of tokens) as a share of those that are needed, and a number
# that a GPU computes in about the time in which it starts a kernel; tokens likewise.
_SCORES_SHARE, _SCORES = 0.5, 1 << 20
_TOKENS_SHARE, _TOKENS = 0.5, 4096


@dataclass(frozen=True, kw_only=True, eq=False)
class PaddedRow:
    """Where the tokens of a packed row are in a padded one."""

    # The dense batches of the padded row, one after the other. None has limited keys (see `hidden`); the prefix of one
    # names tokens of the padded row.
    runs: tuple[Run, ...]
    # int64 `[padded]`, on the device: the token of the packed row that each row of the padded one holds; a shorter
    # sequence repeats its last token
    rows: torch.Tensor
    places: torch.Tensor  # int64 `[tokens]`, on the device: the row of the padded row that holds each token
    # bool `[padded]`, on the device: rows that are no keys, repeated ones and those behind a sequence's keys
    hidden: torch.Tensor

    @classmethod
    def of(cls, segments: Segments, device: torch.device) -> PaddedRow:
        """The padded row of these segments, its tensors on ``device``; made once for all layers of a forward."""
        return segments.derive("padded row", lambda: _padded(segments, device))


def _padded(segments: Segments, device: torch.device) -> PaddedRow:
    lengths: Ints = np.array(segments.lengths, dtype=np.int64)
    usable = lengths if segments.keys is None else np.array(segments.keys, dtype=np.int64)
    prefixes = np.full(len(lengths), -1) if segments.continued is None else np.array(segments.continued, dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    moved = np.empty_like(starts)  # [n] where each sequence starts in the padded row
    groups = list(_groups(lengths, prefixes))
    places = np.empty(int(lengths.sum()), dtype=np.int64)
    rows, hidden, firsts = [], [], []
    start = 0
    for group in groups:
        longest = int(lengths[group].max())
        column = np.arange(longest)
        token = starts[group][:, None] + np.minimum(column, lengths[group][:, None] - 1)  # [count, longest]
        moved[group] = start + longest * np.arange(len(group))
        real = column < lengths[group][:, None]
        places[token[real]] = (moved[group][:, None] + column)[real]
        rows.append(token.ravel())
        hidden.append((column >= usable[group][:, None]).ravel())
        firsts.append(start)
        start += token.size
    runs = []
    for first, group in zip(firsts, groups, strict=True):
        leader = int(prefixes[group[0]])
        span = None if leader < 0 else (int(moved[leader]), int(moved[leader] + lengths[leader]))
        runs.append(Run(start=first, count=len(group), length=int(lengths[group].max()), prefix=span))
    # One copy to the device instead of three.
    packed = np.concatenate((np.concatenate(rows), places, np.concatenate(hidden)))
    indices = on_device(torch.from_numpy(packed), device)
    return PaddedRow(
        runs=tuple(runs),
        rows=indices[:start],
        places=indices[start : start + len(places)],
        hidden=indices[start + len(places) :].bool(),
    )


def _groups(lengths: Ints, prefixes: Ints) -> Iterator[Ints]:
    """Indices of the sequences of each dense batch: one prefix and similar lengths, within the costs above."""
    order = np.lexsort((lengths, prefixes))  # stable
    bounds = np.flatnonzero(np.diff(prefixes[order])) + 1
    for same in np.split(order, bounds):
        left = same[::-1]  # the longest first
        while len(left):
            size = lengths[left]
            longest, count = size[0], np.arange(1, len(left) + 1)
            needed, scores = np.cumsum(size), np.cumsum(size * size)
            cheap = (count * longest - needed <= _TOKENS_SHARE * needed + _TOKENS) & (
                count * longest**2 - scores <= _SCORES_SHARE * scores + _SCORES
            )
            taken = int(np.flatnonzero(cheap)[-1]) + 1
            yield left[:taken][::-1]
            left = left[taken:]
