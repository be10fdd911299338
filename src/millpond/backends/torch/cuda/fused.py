"""Steps between the products of a layer, each in one pass over its rows: Triton kernels for half precision on CUDA.

torch's own operators take one pass for each sum, norm, rotation and product of two halves, which together take as long
as the matrix products do. Each kernel here computes in float32 and rounds where torch's operators round.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from typing import Any

import torch

from millpond.backends.kernel_check import disabled

NAME = "fused"

# Elements of a row that one program holds; wider rows are left to torch.
_WIDEST = 8192
# Elements that one program handles at least, so that narrow rows share one.
_PROGRAM = 2048
ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu")


_left_out: ContextVar[bool] = ContextVar("left_out", default=False)


@functools.cache
def is_available() -> bool:
    """Whether Triton can be imported; torch for CUDA brings it."""
    return find_spec("triton") is not None


@contextmanager
def left_out() -> Iterator[None]:
    """Run this thread's forwards by torch's operators in the block."""
    token = _left_out.set(True)
    try:
        yield
    finally:
        _left_out.reset(token)


def fits(*rows: torch.Tensor) -> bool:
    """Whether tensors are CUDA's, in half precision, with contiguous rows that a program can hold."""
    return (
        all(
            part.device.type == "cuda"
            and part.dtype in (torch.float16, torch.bfloat16)
            and part.stride(-1) == 1
            and part.shape[-1] <= _WIDEST
            for part in rows
        )
        and is_available()
        and not _left_out.get()
        and disabled(NAME) is None
        and not torch.compiler.is_compiling()
    )


def add_layer_norm(
    hidden: torch.Tensor,  # [tokens, width]
    states: torch.Tensor | None,  # [tokens, width]
    weight: torch.Tensor,  # [width]
    bias: torch.Tensor | None,  # [width]
    eps: float,
    *,
    keep: bool,
) -> torch.Tensor:  # [tokens, width]
    """``layer_norm(hidden + states)``; with ``keep`` the sum is written to ``hidden``."""
    return _add_norm(hidden, states, weight, bias, eps, keep=keep, rms=False, centred=False)


def add_rms_norm(
    hidden: torch.Tensor,  # [tokens, width]
    states: torch.Tensor | None,  # [tokens, width]
    weight: torch.Tensor,  # [width]
    eps: float,
    *,
    keep: bool,
    centred: bool,
) -> torch.Tensor:  # [tokens, width]
    """``rms_norm(hidden + states)``, as :func:`add_layer_norm`; ``centred`` weights are 1 + weight."""
    return _add_norm(hidden, states, weight, None, eps, keep=keep, rms=True, centred=centred)


def _add_norm(
    hidden: torch.Tensor,
    states: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    *,
    keep: bool,
    rms: bool,
    centred: bool,
) -> torch.Tensor:
    tokens, width = hidden.shape
    out = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    if tokens == 0:
        return out
    block = _power_of_two(width)
    rows = max(1, _PROGRAM // block)
    _kernels().add_norm[(-(-tokens // rows),)](
        hidden,
        hidden if states is None else states,
        out,
        weight,
        weight if bias is None else bias,
        tokens,
        hidden.stride(0),
        hidden.stride(0) if states is None else states.stride(0),
        width,
        eps,
        ADD=states is not None,
        KEEP=keep and states is not None,
        BIAS=bias is not None,
        RMS=rms,
        CENTRED=centred,
        ROWS=rows,
        BLOCK=block,
        num_warps=8 if block >= 4096 else 4,
    )
    return out


def gated(joined: torch.Tensor, activation: str) -> torch.Tensor:  # [tokens, 2 inner] -> [tokens, inner]
    """``activation(first half) * second half`` of each row; ``activation`` is one of :data:`ACTIVATIONS`."""
    tokens, inner = joined.shape[0], joined.shape[1] // 2
    out = joined.new_empty(tokens, inner)
    if tokens == 0:
        return out
    block = min(1024, _power_of_two(inner))
    _kernels().gated[(tokens, -(-inner // block))](
        joined, out, joined.stride(0), inner, ACTIVATION=_kind(activation), BLOCK=block, num_warps=4
    )
    return out


def rotate(
    heads: torch.Tensor,  # [tokens, heads, dim]
    cos: torch.Tensor,  # [tokens, 1, dim]
    sin: torch.Tensor,  # [tokens, 1, dim]
    *,
    norm: torch.Tensor | None = None,  # [heads, dim]
    eps: float = 0.0,
    centred: bool = False,
) -> torch.Tensor:
    """Rotate each head by its position in place, after an RMS norm with the weights ``norm`` if there are any."""
    tokens, count, dim = heads.shape
    if tokens == 0:
        return heads
    _kernels().rotate[(tokens,)](
        heads,
        cos,
        sin,
        heads if norm is None else norm,
        heads.stride(0),
        heads.stride(1),
        cos.stride(0),
        sin.stride(0),
        count,
        eps,
        NORM=norm is not None,
        CENTRED=centred,
        HEADS=_power_of_two(count),
        DIM=dim,
        HALF=_power_of_two(dim // 2),
        num_warps=4,
    )
    return heads


def rotates(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """Whether :func:`rotate` takes these tensors."""
    return (
        fits(heads, cos, sin)
        and heads.dim() == 3
        and heads.shape[2] % 2 == 0
        and heads.shape[1] * heads.shape[2] <= _WIDEST
        and cos.shape == sin.shape == (heads.shape[0], 1, heads.shape[2])
    )


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def _kind(activation: str) -> int:
    return {"gelu": 0, "gelu_new": 1, "gelu_pytorch_tanh": 1, "silu": 2, "relu": 3}[activation]


@functools.cache
def _kernels() -> Any:
    """The kernels; Triton takes half a second to import, and is not there on every machine."""
    from millpond.backends.torch.cuda import fused_kernels

    return fused_kernels
