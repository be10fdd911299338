"""NativeEncoder: a backbone whose forward pass is one call of the compiled kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from millpond.backends.native import structs
from millpond.backends.native.memory import Memory
from millpond.backends.native.plans.plan import Plan

# Bytes of a block's buffers: a thread's part of the second cache.
_BLOCK_BYTES = 768 << 10
_LEAST_BLOCK, _LARGEST_BLOCK = 64, 512
# With more weights than a third cache holds, each block reads all of them from memory. 256 tokens are enough work to
# hide that, with tiles too, and the states of a block are then read from the third cache.
_LARGE_MODEL, _LEAST_BLOCK_OF_LARGE = 32 << 20, 256
# Tiles are so fast that the weights, read anew for each block, are what a short block waits for. The processors with
# AMX have 2 MiB of second cache, and a third cache that takes what exceeds it.
_TILES_BYTES, _LEAST_TILES_BLOCK = 1792 << 10, 384

Ints = npt.NDArray[np.int32]
Rows = Literal["all", "first", "last", "mean"]
READINGS: dict[Rows, int] = {
    "all": structs.ALL_ROWS,
    "first": structs.FIRST_ROW,
    "last": structs.LAST_ROW,
    "mean": structs.MEAN_ROW,
}


class NativeEncoder:
    """A plan and its workspaces; any number of threads may call it at once."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.block = _block_of(plan)
        self.model = ctypes.pointer(plan.model)
        self._workspaces: list[Memory] = []  # those no call uses

    def encode(
        self,
        ids: Ints,  # [tokens], one text behind another
        bounds: Ints,  # [texts + 1], where each text begins and ends
        *,
        offset: int = 0,  # position of a text's first token
        types: Ints | None = None,  # [tokens]
        keys: Ints | None = None,  # [texts], number of first tokens that are attended to; None: all
        skip: Ints | None = None,  # [texts], number of first tokens that a mean and the first row leave out
        leads: Ints | None = None,  # [texts], see below
        prefix: Memory | None = None,  # of prefix_bytes, see below
        prefix_tokens: int = 0,
        rows: Rows = "all",
        adapters: Ints | None = None,  # [texts], -1: none
        threads: int = 1,  # this one included
        timings: npt.NDArray[np.float64] | None = None,  # [8], seconds of each kind of step are added here
    ) -> npt.NDArray[np.float32]:
        """float32 ``[tokens, hidden]``, or ``[texts, hidden]`` unless all rows are read; C-contiguous.

        ``leads`` gives the index of the text that each text continues, -1 for none: its positions go on from there, and
        it attends to that text, too. A lead continues no other text. With ``leads``, ``prefix`` gets the keys and
        values of the first text, which has ``prefix_tokens``; without, all texts continue that one.
        """
        if self.plan.chunk:
            return self._encode_parts(ids, bounds, types, rows=rows, threads=threads, timings=timings)
        texts = len(bounds) - 1
        given = offset if leads is not None else offset + prefix_tokens
        self._check(ids, bounds, offset=given, types=types, leads=leads, adapters=adapters)
        count = int(bounds[-1]) if rows == "all" else texts
        out = np.empty((count, self.plan.hidden), dtype=np.float32)
        call = structs.EncodeCall(
            self.model,
            ids.ctypes.data,
            bounds.ctypes.data,
            None if types is None else types.ctypes.data,
            None if keys is None else keys.ctypes.data,
            None if skip is None else skip.ctypes.data,
            None if leads is None else leads.ctypes.data,
            out.ctypes.data,
            None,
            texts,
            offset,
            READINGS[rows],
            self.block,
            threads,
            None if adapters is None else adapters.ctypes.data,
            None if timings is None else timings.ctypes.data,
            None,
            prefix=None if prefix is None else prefix.address,
            prefix_tokens=prefix_tokens,
        )
        self._run(call, threads)
        return out

    def prefix_bytes(self, tokens: int) -> int:
        """Of the keys and values of so many tokens."""
        model = self.plan.model
        attentions = [step for step in model.steps[: model.count] if step.kind == structs.ATTENTION]
        columns: int = sum(2 * step.kv_heads * step.dim for step in attentions)
        return tokens * columns * self.plan.kernels.itemsize

    def _encode_parts(
        self,
        ids: Ints,
        bounds: Ints,
        types: Ints | None,
        *,
        rows: Rows,
        threads: int,
        timings: npt.NDArray[np.float64] | None,
    ) -> npt.NDArray[np.float32]:
        """As :meth:`encode`, of a model of two parts; of the encoder's rows the result is 0."""
        texts = len(bounds) - 1
        second = np.zeros(len(ids), dtype=np.bool_) if types is None else types != 0
        of_decoder = np.add.reduceat(second, bounds[:-1], dtype=np.int32)
        of_encoder = bounds[1:] - bounds[:-1] - of_decoder
        if not (of_encoder.all() and of_decoder.all()) or rows not in ("all", "last"):
            raise IndexError("each text needs a part for the encoder and one for the decoder, whose last row is read")
        apart = np.concatenate((ids[~second], ids[second]))
        ends = bounds_of(np.concatenate((of_encoder, of_decoder)))
        kept = bounds_of(-(-of_encoder // self.plan.chunk))
        self._check(apart, ends, offset=0, types=None, leads=None, adapters=None)
        out = np.empty((int(of_decoder.sum()) if rows == "all" else texts, self.plan.hidden), dtype=np.float32)
        call = structs.EncodeCall(model=self.model, texts=2 * texts, reading=READINGS[rows])
        call.ids, call.bounds, call.kept, call.out = (part.ctypes.data for part in (apart, ends, kept, out))
        call.block, call.threads = self.block, threads
        call.timings = None if timings is None else timings.ctypes.data
        self._run(call, threads)
        if rows == "last":
            return out
        whole = np.zeros((len(ids), self.plan.hidden), dtype=np.float32)
        whole[second] = out
        return whole

    def _run(self, call: structs.EncodeCall, threads: int) -> None:
        address = ctypes.addressof(call)
        size = threads * int(self.plan.kernels.workspace(address))
        try:
            workspace = self._workspaces.pop()
        except IndexError:
            workspace = Memory(size)
        if workspace.size < size:
            workspace = Memory(size)
        call.workspace = workspace.address
        self.plan.kernels.encode(address)
        self._workspaces.append(workspace)

    def _check(
        self, ids: Ints, bounds: Ints, *, offset: int, types: Ints | None, leads: Ints | None, adapters: Ints | None
    ) -> None:
        """The kernels check nothing: no address outside of a table may be reached."""
        plan = self.plan
        if ids.max() >= plan.vocabulary or ids.min() < 0:
            raise IndexError(f"token {ids.max()} is outside of the vocabulary of {plan.vocabulary}")
        if types is not None and plan.types and (types.max() >= plan.types or types.min() < 0):
            raise IndexError(f"token type {types.max()} is outside of the model's {plan.types}")
        if adapters is not None and (adapters.max() >= plan.adapters or adapters.min() < -1):
            raise IndexError(f"adapter {adapters.max()} is outside of the model's {plan.adapters}")
        if plan.positions or plan.rotations:
            # With leads a text may be as long as two; all together are not shorter.
            longest = offset + (int((bounds[1:] - bounds[:-1]).max()) if leads is None else int(bounds[-1]))
            if plan.positions and longest > plan.positions:
                raise IndexError(f"position {longest - 1} is outside of the model's {plan.positions}")
            for rotation in plan.rotations:
                rotation.cover(longest)


def _block_of(plan: Plan) -> int:
    model = plan.model
    of_token = (model.hidden + max(model.heads, 384)) * 2 + (1 + model.branch) * model.hidden * 4
    size, least = (_TILES_BYTES, _LEAST_TILES_BLOCK) if plan.kernels.tiles else (_BLOCK_BYTES, _LEAST_BLOCK)
    if plan.weights > _LARGE_MODEL:
        least = max(least, _LEAST_BLOCK_OF_LARGE)
    return max(least, min(_LARGEST_BLOCK, int(size // of_token // 32 * 32)))


def bounds_of(lengths: Sequence[int] | npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.int32]:
    """int32 ``[texts + 1]`` where texts of these lengths begin and end."""
    bounds = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=bounds[1:])
    return bounds
