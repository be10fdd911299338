"""The table of attention kernels: the first one that fits a call serves it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from millpond.backends.kernel_check import disabled
from millpond.backends.torch.attention import matmul_attention, native, sdpa, triton, varlen
from millpond.backends.torch.attention.segments import Segments
from millpond.backends.torch.attention.signature import Kernel, KernelError, Masking

logger = logging.getLogger(__name__)

# Fastest first. The last one fits every call.
KERNELS: tuple[Kernel, ...] = (native, matmul_attention, triton, varlen, sdpa)


@dataclass(frozen=True, kw_only=True)
class CallKind:
    """What of a call decides which code of a kernel serves it, lengths left out."""

    heads: int
    kv_heads: int
    dim: int
    causal: bool
    window: bool
    softcap: bool
    bias: bool


_observed: ContextVar[set[CallKind] | None] = ContextVar("observed", default=None)


@contextmanager
def observed() -> Iterator[set[CallKind]]:
    """The kinds of the calls that this thread makes in the block; the last kernel of the table serves them."""
    kinds: set[CallKind] = set()
    token = _observed.set(kinds)
    try:
        yield kinds
    finally:
        _observed.reset(token)


def select(query: Tensor, key: Tensor, value: Tensor, segments: Segments, masking: Masking) -> Kernel:
    """The kernel for this call. The only place that decides: no kernel calls another one."""
    for kernel in KERNELS:
        if disabled(kernel.NAME) is not None and kernel is not KERNELS[-1]:
            continue
        if kernel.fits(query, key, value, segments, masking):
            return kernel
    raise AssertionError("the last kernel fits every call")


def attend(query: Tensor, key: Tensor, value: Tensor, segments: Segments, masking: Masking) -> Tensor:
    """Attention within each segment of a packed row, by the kernel that :func:`select` names.

    A kernel that finds out only now that it cannot run such calls is followed by the next one, with one warning. With
    debug logging, the first call of each kind logs the kernel that served it.
    """
    kinds = _observed.get()
    if kinds is not None:
        kinds.add(_kind_of(query, key, masking))
        return KERNELS[-1].attend(query, key, value, segments, masking)
    kernel = select(query, key, value, segments, masking)
    if logger.isEnabledFor(logging.DEBUG):
        heads, kv_heads, called = query.shape[1:], key.shape[1], options(segments, masking)
        _log_kind(kernel.NAME, query.device.type, query.dtype, heads, kv_heads, called)
    try:
        return kernel.attend(query, key, value, segments, masking)
    except KernelError as error:
        logger.warning("%s", error)
    return attend(query, key, value, segments, masking)  # the kernel no longer fits such calls


def _kind_of(query: Tensor, key: Tensor, masking: Masking) -> CallKind:
    return CallKind(
        heads=query.shape[1],
        kv_heads=key.shape[1],
        dim=query.shape[2],
        causal=masking.causal,
        window=masking.window is not None,
        softcap=masking.softcap is not None,
        bias=masking.bias is not None,
    )


def options(segments: Segments, masking: Masking) -> tuple[str, ...]:
    """The options of a call, lengths left out."""
    options = {
        "causal": masking.causal,
        f"window {masking.window}": masking.window is not None,
        f"softcap {masking.softcap}": masking.softcap is not None,
        "bias": masking.bias is not None,
        "limited keys": segments.keys is not None,
        "shared prefix": segments.shared,
    }
    return tuple(name for name, is_set in options.items() if is_set)


@cache  # one line per kind of call and process
def _log_kind(
    kernel: str, device: str, dtype: torch.dtype, heads: tuple[int, int], kv_heads: int, options: tuple[str, ...]
) -> None:
    logger.debug(
        "attention kernel %s: %s on %s, %d heads of %d (%d for keys)%s",
        kernel,
        str(dtype).removeprefix("torch."),
        device,
        *heads,
        kv_heads,
        "".join(f", {option}" for option in options),
    )
