"""NativeEncoder: a backbone whose forward pass is one call of the compiled kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from millpond.models.native import structs
from millpond.models.native.plan import Memory, Plan

# Bytes of a block's buffers: a thread's part of the second cache.
_BLOCK_BYTES = 768 << 10
_LEAST_BLOCK, _LARGEST_BLOCK = 64, 512

Rows = Literal["all", "first", "last", "mean"]
_READINGS: dict[Rows, int] = {
    "all": structs.ALL_ROWS,
    "first": structs.FIRST_ROW,
    "last": structs.LAST_ROW,
    "mean": structs.MEAN_ROW,
}


class NativeEncoder(nn.Module):
    """A plan and its workspaces; any number of threads may call it at once.

    Attributes:
        plan: What it runs.
        block: Tokens of a block, which stay in the cache through all layers.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.block = _block_of(plan)
        self._model = ctypes.pointer(plan.model)
        self._workspaces: list[Memory] = []  # those no call uses

    def encode(
        self,
        ids: npt.NDArray[np.int32],  # [tokens]
        bounds: npt.NDArray[np.int32],  # [texts + 1]
        *,
        offset: int = 0,
        types: npt.NDArray[np.int32] | None = None,  # [tokens]
        keys: npt.NDArray[np.int32] | None = None,  # [texts]
        skip: npt.NDArray[np.int32] | None = None,  # [texts]
        leads: npt.NDArray[np.int32] | None = None,  # [texts]
        rows: Rows = "all",
        threads: int = 1,
        timings: npt.NDArray[np.float64] | None = None,  # [8]
    ) -> torch.Tensor:
        """float32 ``[tokens, hidden]``, or ``[texts, hidden]`` unless all rows are read; C-contiguous.

        Args:
            ids: Token ids of all texts, one text behind another.
            bounds: Where each text begins and ends.
            offset: Position of a text's first token.
            types: Token types; ``None``: all 0.
            keys: Number of first tokens of each text that are attended to; ``None``: all.
            skip: Number of first tokens of each text that a mean leaves out; ``None``: none.
            leads: Index of the text that each text continues, -1 for none: its positions go on from there, and it
                attends to that text, too. A lead continues no other text. ``None``: no text continues another.
            rows: Which rows are read.
            threads: Threads to run on, this one included.
            timings: Seconds of each kind of step are added here.
        """
        texts = len(bounds) - 1
        for table in self.plan.tables:
            table.cover(offset + int(bounds[-1]))  # no text is longer than all together
        count = int(bounds[-1]) if rows == "all" else texts
        out = torch.empty((count, self.plan.hidden), dtype=torch.float32)
        call = structs.EncodeCall(
            self._model,
            ids.ctypes.data,
            bounds.ctypes.data,
            None if types is None else types.ctypes.data,
            None if keys is None else keys.ctypes.data,
            None if skip is None else skip.ctypes.data,
            None if leads is None else leads.ctypes.data,
            out.data_ptr(),
            None,
            texts,
            offset,
            _READINGS[rows],
            self.block,
            threads,
            None if timings is None else timings.ctypes.data,
        )
        address = ctypes.addressof(call)
        workspace = self._workspace(threads * self.plan.kernels.workspace(address))
        call.workspace = workspace.address
        self.plan.kernels.encode(address)
        self._workspaces.append(workspace)
        return out

    def _workspace(self, size: int) -> Memory:
        """One that no other call uses, at least so large."""
        try:
            kept = self._workspaces.pop()
        except IndexError:
            return Memory(size)
        return kept if kept.size >= size else Memory(size)


def _block_of(plan: Plan) -> int:
    model = plan.model
    of_token = (model.hidden + max(model.heads, 384)) * 2 + (1 + model.branch) * model.hidden * 4
    return max(_LEAST_BLOCK, min(_LARGEST_BLOCK, _BLOCK_BYTES // of_token // 32 * 32))


def bounds_of(lengths: Sequence[int] | npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """int32 ``[texts + 1]`` where texts of these lengths begin and end."""
    bounds = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=bounds[1:])
    return bounds
