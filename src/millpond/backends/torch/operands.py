"""Operands: checks of tensors for the compiled kernels, which do not check them themselves."""

from __future__ import annotations

import ctypes

import torch

from millpond.native.library import library

# bfloat16 numbers that a kernel takes at a time: rows must have a multiple of them.
LANES = 16


def kernels_for(*operands: torch.Tensor) -> ctypes.CDLL | None:
    """The kernels, if they can read all ``operands``: bfloat16 on a CPU, contiguous columns, no gradient required.

    ``None`` inside torch.compile too: it fuses the same operations itself, and cannot trace a foreign function. The
    caller checks the shapes.
    """
    if torch.compiler.is_compiling():
        return None
    gradients = torch.is_grad_enabled()
    for operand in operands:
        readable = operand.dtype is torch.bfloat16 and operand.device.type == "cpu" and operand.stride(-1) == 1
        if not readable or (gradients and operand.requires_grad):
            return None
    return library()
