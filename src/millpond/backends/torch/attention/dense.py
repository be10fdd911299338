"""Attention over one run, a dense batch of equally long sequences inside the packed row, by torch's own operators."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from millpond.backends.torch.attention.segments import Run
from millpond.backends.torch.attention.signature import Masking

# Explicit scores are [count, heads, rows, keys]; query rows are taken in blocks that keep them below this many numbers.
_SCORE_BLOCK = 1 << 24


def attend_run(
    out: torch.Tensor,  # [tokens, heads, dim], filled in the run's rows
    query: torch.Tensor,  # [tokens, heads, dim]
    key: torch.Tensor,  # [tokens, kv_heads, dim]
    value: torch.Tensor,  # [tokens, kv_heads, dim]
    run: Run,
    masking: Masking,
) -> None:
    """Fill one run's rows of ``out``.

    A row that may attend to nothing (a window beyond the segment's keys) gives zeros, as in every kernel.
    """
    q, k, v = (  # [count, heads, length, dim], without a copy
        states[run.start : run.stop].reshape(run.count, run.length, *states.shape[1:]).transpose(1, 2)
        for states in (query, key, value)
    )
    if run.keys is not None:
        k, v = k[:, :, : run.keys], v[:, :, : run.keys]
    before = 0
    if run.prefix is not None:
        k, v = (_continued(states, run.prefix, own) for states, own in ((key, k), (value, v)))
        before = run.prefix[1] - run.prefix[0]
    mixed = (_fused if is_plain(masking) else _explicit)(q, k, v, masking, before)
    out[run.start : run.stop].view(run.count, run.length, *out.shape[1:]).copy_(mixed.transpose(1, 2))


def is_plain(masking: Masking) -> bool:
    """Whether torch's fused kernel can apply it: one mask (a bias, or causality and window), and no softcap."""
    return masking.softcap is None and (masking.bias is None or not (masking.causal or masking.window))


def _continued(states: torch.Tensor, prefix: tuple[int, int], own: torch.Tensor) -> torch.Tensor:
    """A run's keys or values after those of their common prefix, ``[count, heads, prefix + length, dim]``."""
    front = states[prefix[0] : prefix[1]].transpose(0, 1)[None].expand(len(own), -1, -1, -1)
    return torch.cat((front, own), 2)


def _fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, masking: Masking, before: int) -> torch.Tensor:
    """torch's scaled dot product, ``[count, heads, length, dim]``.

    There may be fewer keys than queries, or more: ``before`` of them precede the first query.
    """
    length, keys = q.shape[2], k.shape[2]
    # If the numbers of keys and queries differ, torch's backends align the causal flag to different corners of the
    # matrix: then the mask is written out.
    mask = masking.mask(before + length, q.device, keep_causal=before > 0 or keys != length)
    if masking.bias is not None:
        mask = masking.bias[:, :length, :keys]
    elif mask is not None:
        mask = mask[before:, :keys]
    groups = q.shape[1] // k.shape[1]
    if groups > 1 and q.device.type == "cuda":
        # There torch has a fused kernel for grouped heads only in half precision without a mask; otherwise it would
        # write out all scores.
        k, v, groups = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), 1
    mixed = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=masking.causal and mask is None and length > 1,
        scale=masking.scale,
        enable_gqa=groups > 1,
    )
    if q.device.type == "cuda" and mask is not None and masking.window is not None and keys < before + length:
        return mixed.masked_fill(~mask.any(-1, keepdim=True), 0.0)  # torch's fused kernels give NaN there
    return mixed


def _explicit(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, masking: Masking, before: int) -> torch.Tensor:
    """Scores, softcap, mask, softmax and product written out, in blocks of query rows."""
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    count, heads, length, _ = q.shape
    keys = k.shape[2]
    rows = max(1, _SCORE_BLOCK // (count * heads * keys))
    mask = masking.mask(before + length, q.device, keep_causal=True)
    if mask is not None:
        mask = mask[before:]
    blocks = []
    for first in range(0, length, rows):
        scores = torch.matmul(q[:, :, first : first + rows], k.transpose(-1, -2)).mul_(masking.scale)
        if masking.softcap is not None:
            scores = scores.div_(masking.softcap).tanh_().mul_(masking.softcap)
        if masking.bias is not None:
            scores = scores.add_(masking.bias[:, first : min(first + rows, length), :keys])
        if mask is not None:
            scores = scores.masked_fill_(~mask[first : first + rows, :keys], float("-inf"))
        weights = scores.softmax(-1)
        if keys < before + length and masking.window is not None:
            weights = weights.nan_to_num_(nan=0.0)  # the window of a row after the last key may contain no key
        blocks.append(torch.matmul(weights, v))
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, 2)
