"""Operands: what the compiled kernels read, and do not check themselves."""

from __future__ import annotations

import ctypes

import torch

from millpond.native.library import library

# Columns of a vector: rows have a multiple of them.
LANES = 16


def kernels_for(*operands: torch.Tensor) -> ctypes.CDLL | None:
    """The kernels, where they read all of ``operands``: bfloat16 on a CPU, columns dense, no gradient wanted.

    ``None`` inside torch.compile as well: it makes one pass of what they do, and cannot look into them. Shapes are the
    caller's to check.
    """
    if torch.compiler.is_compiling():
        return None
    differentiated = torch.is_grad_enabled()
    for operand in operands:
        dense = operand.dtype is torch.bfloat16 and operand.device.type == "cpu" and operand.stride(-1) == 1
        if not dense or (differentiated and operand.requires_grad):
            return None
    return library()
