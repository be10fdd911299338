"""Attention out of plain matrix products: a CPU in bfloat16, and in float32 for narrow windows.

torch's fused kernel and its bfloat16 softmax are both slower than the two products they stand between. Here the softmax
is an ``exp2`` over a block of scores that stays in the cache, and one division of the narrow result; the largest score
is not subtracted, so scores beyond about 87 overflow. The sums of the weights show it, and torch's kernel then computes
that run, and those laid out with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from millpond.backends.torch.attention import dense
from millpond.backends.torch.attention.segments import Joined, Run, Segments
from millpond.backends.torch.attention.signature import Masking

NAME = "matmul"
SERVES = "a CPU in bfloat16; float32 with a narrow window"

# In these precisions the products are faster for every run but the smallest.
_FAST_DTYPES = (torch.bfloat16,)
# Scores of several texts at once: one megabyte in bfloat16, which fits a core's L2 cache.
_BLOCK = 1 << 19
# Scores of one text at once: products of few rows lose more than a smaller block saves.
_TEXT_BLOCK = 1 << 22
# Products of fewer rows than this are slow.
_MIN_ROWS = 32
# Up to this size torch's fused kernel is faster; its time grows with the heads of all texts.
_FEW_HEADS, _FEW_SCORES = 24, 30_000
# In float32, torch's kernel also computes scores outside the window, but is as fast for texts of fewer windows.
_NARROW = 3
# Sums of weights within these bounds have lost little precision. bfloat16 rounds large scores coarsely (at 60 the
# result is off by a tenth, while torch's kernel keeps scores in float32), and still larger ones overflow.
_MIN_SUM, _MAX_SUM = 2.0**-20, 2.0**24
_LOG2_E = math.log2(math.e)


def unavailable() -> str | None:
    """It runs on any machine: every one has a CPU."""
    return None


def fits(query: Tensor, key: Tensor, value: Tensor, segments: Segments, masking: Masking) -> bool:
    """A CPU in bfloat16, or in float32 with a window that is narrow for the longest text."""
    if query.device.type != "cpu":
        return False
    if query.dtype in _FAST_DTYPES:
        return True
    window = masking.window
    return query.dtype is torch.float32 and window is not None and segments.max_seqlen >= _NARROW * window


def attend(query: Tensor, key: Tensor, value: Tensor, segments: Segments, masking: Masking) -> Tensor:
    """Attention within each segment, for a call that fits."""
    out = query.new_empty(query.shape)
    # Runs of nearly equal length are laid out as one, each text filled up by repeating its last token; but not with a
    # window or a bias, where the weights of a row depend on its position.
    wide = masking.window is None or masking.window > segments.max_seqlen
    joins = wide and masking.bias is None and query.dtype in _FAST_DTYPES
    for part in segments.parts if joins else segments.runs:
        if isinstance(part, Run):
            _attend_run(out, query, key, value, part, masking)
        elif not _attend_joined(out, query, key, value, part, masking):
            for run in part.runs:
                _attend_run(out, query, key, value, run, masking)
    return out


def _attend_run(out: Tensor, query: Tensor, key: Tensor, value: Tensor, run: Run, masking: Masking) -> None:
    """Fill a run's rows of ``out``."""
    q, k, v, mixed = (_split(states, run, key.shape[1]) for states in (query, key, value, out))
    keys = run.keys or run.length
    if _is_for_torch(run, query, masking) or not _attend_batch(mixed, q, k, v, masking, keys=keys):
        dense.attend_run(out, query, key, value, run, masking)


def _attend_joined(out: Tensor, query: Tensor, key: Tensor, value: Tensor, part: Joined, masking: Masking) -> bool:
    """Fill the rows of ``out`` of runs laid out as one; False if a sum of weights is out of bounds."""
    joined = Run(start=0, count=part.count, length=part.length)
    q, k, v = (_split(states.index_select(0, part.rows), joined, key.shape[1]) for states in (query, key, value))
    mixed = out.new_empty(len(part.rows), *out.shape[1:])
    if not _attend_batch(_split(mixed, joined, key.shape[1]), q, k, v, masking, keys=part.length, valid=part.valid):
        return False
    # The rows of a repeated token are equal, so it does not matter which of them is kept.
    out.index_copy_(0, part.rows, mixed)
    return True


def _is_for_torch(run: Run, query: Tensor, masking: Masking) -> bool:
    """Whether torch's kernel is to compute a run."""
    # Sequences after a prefix have keys elsewhere; a window that ends before the keys leaves rows without any.
    if run.prefix is not None or (run.keys is not None and masking.window is not None):
        return True
    if query.dtype not in _FAST_DTYPES:
        return masking.window is None or run.length < _NARROW * masking.window
    heads = run.count * query.shape[1]
    return heads <= _FEW_HEADS and heads * run.length**2 <= _FEW_SCORES and dense.is_plain(masking)


@dataclass(frozen=True, kw_only=True)
class _Block:
    """Query rows ``[first, last)`` of each text of a run, and the keys ``[begin, end)`` that they may attend to."""

    first: int
    last: int
    begin: int
    end: int

    def allowed(self, masking: Masking, like: Tensor) -> Tensor | None:
        """``[rows, keys]``, 1 where a row may attend and 0 elsewhere; ``None``: everywhere."""
        if not masking.causal and masking.window is None:
            return None
        rows = torch.arange(self.first, self.last)[:, None]
        distance = rows - torch.arange(self.begin, self.end)[None, :]
        inside = distance >= 0 if masking.causal else torch.ones_like(distance, dtype=torch.bool)
        if masking.window is not None:
            inside &= distance.abs() < masking.window
        return inside.to(like.dtype)


def _blocks(length: int, keys: int, heads: int, masking: Masking) -> Iterator[_Block]:
    """The rows of a text in blocks whose scores fit the cache."""
    reach = length if masking.window is None else masking.window
    rows = length
    if heads * length * keys > _TEXT_BLOCK or reach * 4 < length:
        rows = max(_MIN_ROWS, min(length, reach, _TEXT_BLOCK // (heads * min(keys, 3 * reach))))
    for first in range(0, length, rows):
        last = min(first + rows, length)
        yield _Block(
            first=first,
            last=last,
            begin=max(0, first - reach + 1),
            end=min(keys, last if masking.causal else last + reach - 1),
        )


def _attend_batch(
    out: Tensor,  # [count, kv_heads, groups, length, dim], filled
    query: Tensor,  # the same shape
    key: Tensor,  # [count, kv_heads, 1, length, dim]
    value: Tensor,  # [count, kv_heads, 1, length, dim]
    masking: Masking,
    *,
    keys: int,
    valid: Tensor | None = None,  # bool [count, length]
) -> bool:
    """Attention of equally long texts to the first ``keys`` of their tokens; False if a sum is out of bounds."""
    count, kv_heads, groups, length, dim = query.shape
    for block in _blocks(length, keys, kv_heads * groups, masking):
        rows, span = block.last - block.first, block.end - block.begin
        texts = max(1, min(count, _BLOCK // (kv_heads * groups * rows * span)))
        allowed = block.allowed(masking, query)
        scores = query.new_empty(texts * kv_heads * groups * rows * span)
        for start in range(0, count, texts):
            stop = min(start + texts, count)
            heads = (stop - start) * kv_heads
            block_q = query[start:stop, :, :, block.first : block.last].reshape(heads, groups * rows, dim)
            # Contiguous: a product with transposed strided keys copies them one by one.
            block_k = key[start:stop, :, 0, block.begin : block.end].reshape(heads, span, dim).contiguous()
            block_v = value[start:stop, :, 0, block.begin : block.end].reshape(heads, span, dim)
            weights = scores[: heads * groups * rows * span].view(heads, groups * rows, span)
            _weigh(block_q, block_k, masking, block, weights)
            if allowed is not None:
                weights.view(heads, groups, rows, span).mul_(allowed)
            if valid is not None:
                real = valid[start:stop, None, block.begin : block.end].to(query.dtype)
                weights.view(stop - start, -1, span).mul_(real)
            sums = weights.sum(-1, keepdim=True)
            smallest, largest = sums.aminmax()
            if not (smallest >= _MIN_SUM and largest <= _MAX_SUM):  # true for NaN as well
                return False
            shape = (stop - start, kv_heads, groups, rows)
            torch.div(
                torch.bmm(weights, block_v).view(*shape, dim),
                sums.view(*shape, 1),
                out=out[start:stop, :, :, block.first : block.last],
            )
    return True


def _weigh(
    query: Tensor,  # [heads, groups * rows, dim]
    key: Tensor,  # [heads, keys, dim]
    masking: Masking,
    block: _Block,
    weights: Tensor,  # [heads, groups * rows, keys], filled
) -> None:
    """``exp(scores)``, unmasked."""
    scale = masking.scale * _LOG2_E if masking.softcap is None else masking.scale / masking.softcap
    torch.baddbmm(weights, query, key.transpose(1, 2), beta=0, alpha=scale, out=weights)
    if masking.softcap is not None:
        weights.tanh_().mul_(masking.softcap * _LOG2_E)
    if masking.bias is not None:
        bias = masking.bias[:, block.first : block.last, block.begin : block.end] * _LOG2_E
        weights.view(-1, *bias.shape).add_(bias)
    torch.exp2(weights, out=weights)


def _split(states: Tensor, run: Run, kv_heads: int) -> Tensor:
    """A run's rows as ``[count, kv_heads, groups, length, dim]``, a view."""
    heads = states.shape[1]
    rows = states[run.start : run.stop].view(run.count, run.length, kv_heads, heads // kv_heads, states.shape[2])
    return rows.permute(0, 2, 3, 1, 4)
