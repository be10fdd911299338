"""The kernel of :mod:`.triton`, which Triton compiles from this source on its first use."""

# Triton reads the function's source; its annotations and names are its own.
# mypy: ignore-errors
# ruff: noqa: N803

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["window", "blocks", "heads"])
def attend(
    query,
    key,
    value,
    out,
    ends,
    used,
    bias,
    scale,
    softcap,
    window,
    blocks,
    heads,
    query_stride,
    query_head,
    key_stride,
    key_head,
    value_stride,
    value_head,
    bias_head,
    bias_row,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    LIMITED: tl.constexpr,
    BIAS: tl.constexpr,
):
    """``QUERIES`` queries of one head of one text; scores are powers of two, ``scale`` has the factor."""
    program = tl.program_id(0)
    head = program % heads
    block = (program // heads) % blocks
    text = program // (heads * blocks)
    start = tl.load(ends + text)
    length = tl.load(ends + text + 1) - start
    first = block * QUERIES
    if first < length:
        usable = length
        if LIMITED:
            usable = tl.load(used + text)
        row = first + tl.arange(0, QUERIES)
        column = tl.arange(0, WIDTH)
        wide = column < DIM
        token = start.to(tl.int64)
        some = (row < length)[:, None] & wide[None, :]
        q = tl.load(query + (token + row[:, None]) * query_stride + head * query_head + column, mask=some, other=0.0)
        stop = usable
        begin = 0
        if CAUSAL:
            stop = tl.minimum(usable, first + QUERIES)
        if WINDOW:
            begin = tl.maximum(0, first - window + 1) // KEYS * KEYS
            stop = tl.minimum(stop, first + QUERIES - 1 + window)
        greatest = tl.full([QUERIES], float("-inf"), tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        mixed = tl.zeros([QUERIES, WIDTH], tl.float32)
        key_base = key + token * key_stride + (head // GROUP) * key_head
        value_base = value + token * value_stride + (head // GROUP) * value_head
        for place in range(begin, stop, KEYS):
            other = place + tl.arange(0, KEYS)
            known = (other < usable)[:, None] & wide[None, :]
            k = tl.load(key_base + other[:, None].to(tl.int64) * key_stride + column, mask=known, other=0.0)
            scores = tl.dot(q, tl.trans(k)) * scale
            if SOFTCAP:  # c tanh(s / c), with the factor of powers of two on both
                bend = tl.exp2(scores * (2.0 / softcap))
                scores = softcap * 1.4426950408889634 * (1.0 - 2.0 / (bend + 1.0))
            allowed = (other < usable)[None, :] & (row < length)[:, None]
            if CAUSAL:
                allowed &= other[None, :] <= row[:, None]
            if WINDOW:
                apart = row[:, None] - other[None, :]
                allowed &= (apart < window) & (apart > -window)
            if BIAS:
                at = bias + head * bias_head + row[:, None].to(tl.int64) * bias_row + other[None, :]
                more = tl.load(at, mask=allowed, other=0.0)
                scores += more.to(tl.float32) * 1.4426950408889634
            scores = tl.where(allowed, scores, float("-inf"))
            higher = tl.maximum(greatest, tl.max(scores, 1))
            level = tl.where(higher == float("-inf"), 0.0, higher)
            weights = tl.exp2(scores - level[:, None])
            fade = tl.exp2(greatest - level)
            total = total * fade + tl.sum(weights, 1)
            v = tl.load(value_base + other[:, None].to(tl.int64) * value_stride + column, mask=known, other=0.0)
            mixed = tl.dot(weights.to(v.dtype), v, mixed * fade[:, None])
            greatest = higher
        mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
        place_out = out + ((token + row[:, None]) * heads + head) * DIM + column
        tl.store(place_out, mixed.to(q.dtype), mask=some)
