"""The table of attention kernels: the first one that fits a call serves it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextvars import ContextVar
from functools import cache

import torch

from millpond.attention import flex, matmul_attention, native, sdpa, varlen
from millpond.attention.segments import Segments
from millpond.attention.signature import Kernel, KernelError, Masking

logger = logging.getLogger(__name__)

# Fastest first. The last one fits every call.
KERNELS: tuple[Kernel, ...] = (native, matmul_attention, varlen, flex, sdpa)

# Serves every call of a context in place of the table: the self-check, which compares what the kernels compute.
STAND_IN: ContextVar[Callable[..., torch.Tensor] | None] = ContextVar("stand-in", default=None)

_withdrawn: dict[str, str] = {}  # name and reason of each kernel that serves nothing in this process
_withdrawing = threading.Lock()


def select(
    query: torch.Tensor,  # [tokens, heads, dim]
    key: torch.Tensor,  # [tokens, kv_heads, dim]
    value: torch.Tensor,  # [tokens, kv_heads, dim]
    segments: Segments,
    masking: Masking,
) -> Kernel:
    """The kernel for this call. The only place that decides: no kernel calls another one."""
    for kernel in KERNELS:
        if _withdrawn and kernel.NAME in _withdrawn:
            continue
        if kernel.fits(query, key, value, segments, masking):
            return kernel
    raise AssertionError("the last kernel fits every call")


def withdraw(kernel: Kernel, reason: str) -> bool:
    """Take a kernel out of the table for the rest of this process; any thread may do that while others compute.

    Args:
        kernel: A row of the table. The last one stays: no other serves every call.
        reason: Why, for people.

    Returns:
        Whether this call took it out.
    """
    with _withdrawing:
        if kernel is KERNELS[-1] or kernel.NAME in _withdrawn:
            return False
        _withdrawn[kernel.NAME] = reason
        return True


def withdrawn(kernel: Kernel) -> str | None:
    """Why a kernel was taken out of the table; ``None`` if it was not."""
    return _withdrawn.get(kernel.NAME)


def attend(
    query: torch.Tensor,  # [tokens, heads, dim]
    key: torch.Tensor,  # [tokens, kv_heads, dim]
    value: torch.Tensor,  # [tokens, kv_heads, dim]
    segments: Segments,
    masking: Masking,
) -> torch.Tensor:  # [tokens, heads, dim]
    """Attention within each segment of a packed row, by the kernel that :func:`select` names.

    A kernel that finds out only now that it cannot run such calls is followed by the next one, with one warning. With
    debug logging, the first call of each kind logs the kernel that served it.
    """
    stand_in = STAND_IN.get()
    if stand_in is not None:
        return stand_in(query, key, value, segments, masking)
    try:
        return _attend(select(query, key, value, segments, masking), query, key, value, segments, masking)
    except KernelError as error:
        logger.warning("%s", error)
    return attend(query, key, value, segments, masking)  # the kernel no longer fits such calls


def _attend(
    kernel: Kernel,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: Segments,
    masking: Masking,
) -> torch.Tensor:
    if logger.isEnabledFor(logging.DEBUG):
        _log_kind(
            kernel.NAME, query.device.type, query.dtype, query.shape[1:], key.shape[1], options(segments, masking)
        )
    return kernel.attend(query, key, value, segments, masking)


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
