"""The kernels of :mod:`.fused` in Triton, which compiles the source of each function on its first use."""

# Triton reads these functions' source; their annotations and names are its own.
# mypy: ignore-errors
# ruff: noqa: N803

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["tokens"])
def add_norm(
    hidden,
    states,
    out,
    weight,
    bias,
    tokens,
    hidden_stride,
    states_stride,
    width,
    eps,
    ADD: tl.constexpr,
    KEEP: tl.constexpr,
    BIAS: tl.constexpr,
    RMS: tl.constexpr,
    CENTRED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``norm(hidden + states)`` of ``ROWS`` rows; the sum is rounded as a tensor's would be."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < tokens) & (column < width)
    sums = tl.load(hidden + row * hidden_stride + column, mask=inside, other=0.0)
    if ADD:
        more = tl.load(states + row * states_stride + column, mask=inside, other=0.0)
        sums = (sums.to(tl.float32) + more.to(tl.float32)).to(sums.dtype)
    if KEEP:
        tl.store(hidden + row * hidden_stride + column, sums, mask=inside)
    numbers = sums.to(tl.float32)
    if RMS:
        variance = tl.sum(numbers * numbers, 1)[:, None] / width
    else:
        numbers -= tl.sum(numbers, 1)[:, None] / width
        numbers = tl.where(column < width, numbers, 0.0)
        variance = tl.sum(numbers * numbers, 1)[:, None] / width
    numbers *= tl.rsqrt(variance + eps)
    factor = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    if CENTRED:
        factor += 1.0
    numbers *= factor
    if BIAS:
        numbers += tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, numbers.to(sums.dtype), mask=inside)


@triton.jit
def gated(joined, out, stride, inner, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """``activation(first half) * second half`` of a row, ``BLOCK`` columns; the activation is rounded."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    gate = tl.load(joined + row * stride + column, mask=inside, other=0.0)
    up = tl.load(joined + row * stride + inner + column, mask=inside, other=0.0).to(tl.float32)
    x = gate.to(tl.float32)
    if ACTIVATION == 0:
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == 1:
        inward = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        x = x / (1.0 + tl.exp(-2.0 * inward))
    elif ACTIVATION == 2:
        x = x / (1.0 + tl.exp(-x))
    else:
        x = tl.maximum(x, 0.0)
    tl.store(out + row * inner + column, (x.to(gate.dtype).to(tl.float32) * up).to(gate.dtype), mask=inside)


@triton.jit
def rotate(
    heads,
    cos,
    sin,
    norm,
    token_stride,
    head_stride,
    cos_stride,
    sin_stride,
    count,
    eps,
    NORM: tl.constexpr,
    CENTRED: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
):
    """The heads of a token, normed if there are weights, then rotated: column i of both halves is one pair."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, HALF)[None, :]
    inside = (head < count) & (column < DIM // 2)
    place = heads + token * token_stride + head * head_stride + column
    stored = tl.load(place, mask=inside, other=0.0)
    first = stored.to(tl.float32)
    second = tl.load(place + DIM // 2, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        mean = (tl.sum(first * first, 1) + tl.sum(second * second, 1))[:, None] / DIM
        scale = tl.rsqrt(mean + eps)
        weight = norm + head * DIM + column
        one = tl.load(weight, mask=inside, other=0.0).to(tl.float32)
        two = tl.load(weight + DIM // 2, mask=inside, other=0.0).to(tl.float32)
        if CENTRED:
            one += 1.0
            two += 1.0
        first = (first * scale * one).to(stored.dtype).to(tl.float32)
        second = (second * scale * two).to(stored.dtype).to(tl.float32)
    near = column < DIM // 2
    cosines = cos + token * cos_stride + column
    sines = sin + token * sin_stride + column
    cos1 = tl.load(cosines, mask=near, other=0.0).to(tl.float32)
    cos2 = tl.load(cosines + DIM // 2, mask=near, other=0.0).to(tl.float32)
    sin1 = tl.load(sines, mask=near, other=0.0).to(tl.float32)
    sin2 = tl.load(sines + DIM // 2, mask=near, other=0.0).to(tl.float32)
    tl.store(place, (first * cos1 - second * sin1).to(stored.dtype), mask=inside)
    tl.store(place + DIM // 2, (second * cos2 + first * sin2).to(stored.dtype), mask=inside)
