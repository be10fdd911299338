"""WeightPacker: the weights of a plan, packed as the kernels read them, straight from where they are stored."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.backends.native import structs
from millpond.backends.native.kernels import Kernels
from millpond.backends.native.memory import Memory
from millpond.checkpoints.weights import StoredTensor
from millpond.support.load_progress import advance, begin

# A product computes that many columns at a time, and a panel of states has as many, in all instruction sets.
UNIT = 32
# Of int8 weights: inner numbers that one range of a row's codes spans, and those of a panel (int8.h).
_CHUNK, _CODE_PANEL = 384, 64
_LINE = 64  # bytes: where a weight begins

Floats = npt.NDArray[np.float32]


class NotSupported(Exception):  # noqa: N818 - not an error: the model runs in the torch backend
    """The native encoder does not compute this model."""


def tensor_of(numbers: npt.ArrayLike, name: str = "") -> StoredTensor:
    """Numbers in memory as a tensor."""
    return StoredTensor(name=name, dtype="float32", stored=np.ascontiguousarray(numbers, dtype=np.float32))


@dataclass(frozen=True, kw_only=True, eq=False)
class Linear:
    """A linear layer."""

    weight: StoredTensor  # `[out, in]`
    bias: StoredTensor | None = None  # `[out]`


@dataclass(frozen=True, kw_only=True, eq=False)
class LowRank:
    """The factors of all adapters of a weight."""

    # `[adapters rank, in]`, one adapter below the other; of an embedding table `[adapters, rows, rank]`
    down: Floats
    up: Floats  # `[out, adapters rank]`


@dataclass(frozen=True, kw_only=True, eq=False)
class _Piece:
    """Some inner numbers of a weight, of all its columns."""

    parts: tuple[StoredTensor, ...]  # `[rows, count]`, one below the other
    order: npt.NDArray[np.intp] | None  # the row of `parts` that each column has; None: as they are
    count: int


@dataclass(frozen=True, kw_only=True, eq=False)
class _Packing:
    """A weight that is to be packed."""

    struct: structs.Weight
    pieces: tuple[_Piece, ...]
    int8: bool


class WeightPacker:
    """Takes weights one after another; :meth:`pack` reads and packs them."""

    def __init__(self, kernels: Kernels, *, adapters: int, rank: int) -> None:
        self.owned: list[Any] = []
        self.low = -(-adapters * rank // UNIT) * UNIT
        self._kernels, self._adapters, self._rank = kernels, adapters, rank
        self._weights: list[_Packing] = []

    @property
    def numbers(self) -> int:
        """Of all weights that are not packed yet."""
        return sum(packing.struct.out * packing.struct.in_ for packing in self._weights)

    def weight(
        self,
        *parts: Linear,
        order: npt.NDArray[np.intp] | None = None,
        adapter: LowRank | None = None,
        mlp: bool = False,
    ) -> structs.Weight:
        """Linear layers side by side, with the second factors of an adapter behind them.

        ``order`` gives for each column its row in the layers' weights, one below the other.
        """
        weights = tuple(part.weight for part in parts)
        pieces = [_Piece(parts=weights, order=order, count=weights[0].shape[1])]
        if adapter is not None:
            if self._kernels.int8 != "none":
                raise NotSupported("adapters of weights in eight bits")
            up = np.pad(adapter.up, ((0, 0), (0, self.low - adapter.up.shape[1])))
            pieces.append(_Piece(parts=(tensor_of(up),), order=None, count=self.low))
        bias = None
        if any(part.bias is not None for part in parts):
            bias = np.concatenate([self._bias_of(part) for part in parts])
            bias = bias if order is None else bias[order]
        return self._packed(pieces, bias, mlp=mlp)

    def gated(self, gate: Linear, up: Linear) -> structs.Weight:
        """The columns of gate and up in turn, a vector of each."""
        rows = gate.weight.shape[0]
        self.columns(rows)
        lanes = np.arange(2 * rows).reshape(2, -1, self._kernels.lanes)
        return self.weight(gate, up, order=lanes.swapaxes(0, 1).reshape(-1), mlp=True)

    def low_weight(self, adapter: LowRank) -> structs.Weight:
        """The first factors of a weight's adapters as a weight of its own."""
        down = adapter.down
        if self.low > down.shape[1]:  # behind the queries stand as many columns of keys
            raise NotSupported(f"{self._adapters} adapters of rank {self._rank} for {down.shape[1]} columns")
        whole = np.pad(down, ((0, self.low - len(down)), (0, 0)))
        return self.weight(Linear(weight=tensor_of(whole)))

    def table(self, table: StoredTensor | None) -> int | None:
        """The address of a table in the model's precision: in the mapped file, if that has it so."""
        if table is None:
            return None
        numbers = np.ascontiguousarray(table.float32() if self._is_float32 else table.bfloat16())
        if not np.shares_memory(numbers, table.stored):
            _release(table.stored)
        return self._kept(numbers)

    def numbers_of(self, tensor: StoredTensor) -> Floats:
        """A tensor's numbers as the model's precision has them."""
        if self._is_float32:
            return tensor.float32()
        return (tensor.bfloat16().astype(np.uint32) << 16).view(np.float32)

    def floats(self, numbers: Floats | None) -> int | None:
        """The address of numbers in float32."""
        return None if numbers is None else self._kept(np.ascontiguousarray(numbers, dtype=np.float32))

    def columns(self, columns: int) -> int:
        """A number of columns that the kernels compute."""
        if columns % UNIT:
            raise NotSupported(f"{columns} columns are no multiple of {UNIT}")
        return columns

    def pack(self) -> Memory:
        """Pack all weights into one piece of memory, in the order of their use."""
        memory = Memory(sum(self._bytes(packing) for packing in self._weights) + 4096)
        at = memory.address
        begin("arranging weights", sum(self._bytes(packing) for packing in self._weights))
        while self._weights:
            packing = self._weights.pop(0)
            packing.struct.units = at
            self._pack(packing)
            at += self._bytes(packing)
            advance(self._bytes(packing))
        return memory

    @property
    def _is_float32(self) -> bool:
        return self._kernels.dtype == "float32"

    def _packed(self, pieces: Sequence[_Piece], bias: Floats | None, *, mlp: bool) -> structs.Weight:
        rows = pieces[0].order
        out = sum(part.shape[0] for part in pieces[0].parts) if rows is None else len(rows)
        into = sum(piece.count for piece in pieces)
        struct = structs.Weight(bias=self.floats(bias), out=self.columns(out), in_=self.columns(into))
        int8 = self._kernels.int8 == "all" or (mlp and self._kernels.int8 == "feeds")
        if int8:
            struct.scales = self.floats(np.empty((1 + -(-into // _CHUNK), out), np.float32))
        self._weights.append(_Packing(struct=struct, pieces=tuple(pieces), int8=int8))
        return struct

    def _pack(self, packing: _Packing) -> None:
        struct, at = packing.struct, int(packing.struct.units)
        for piece in packing.pieces:
            kind, arrays = self._sources(piece.parts)
            rows = np.concatenate([_addresses(array) for array in arrays])
            rows = rows if piece.order is None else rows[piece.order]
            call = structs.PackRowsCall(
                rows=rows.ctypes.data,
                units=at,
                scales=struct.scales,
                stored=kind,
                out=struct.out,
                in_=struct.in_,
                count=piece.count,
                piece=piece.count,
                padded=piece.count,
                exact=self._is_float32,
            )
            (self._kernels.pack_int8 if packing.int8 else self._kernels.pack)(ctypes.addressof(call))
            at += piece.count * 2 * self._kernels.lanes * self._kernels.itemsize
            for part in piece.parts:
                _release(part.stored)

    def _sources(self, parts: Sequence[StoredTensor]) -> tuple[int, list[npt.NDArray[Any]]]:
        """What a weight is packed from: the mapped numbers, if all parts have them in the same known precision."""
        if all(part.dtype == "bfloat16" for part in parts):
            return structs.STORED_BFLOAT16, [part.bfloat16() for part in parts]
        return structs.STORED_FLOAT32, [part.float32() for part in parts]

    def _bytes(self, packing: _Packing) -> int:
        """Of a weight, packed."""
        struct = packing.struct
        if packing.int8:
            return int(struct.out * -(-struct.in_ // _CODE_PANEL) * _CODE_PANEL)
        return int(struct.out * struct.in_ * self._kernels.itemsize)

    def _bias_of(self, part: Linear) -> Floats:
        """Zeros if a linear layer has none."""
        return np.zeros(part.weight.shape[0], np.float32) if part.bias is None else self.numbers_of(part.bias)

    def _kept(self, array: npt.NDArray[Any]) -> int:
        self.owned.append(array)
        return int(array.ctypes.data)


def _addresses(array: npt.NDArray[Any]) -> npt.NDArray[np.intp]:
    """Where each row of a matrix is."""
    assert array.strides[1] == array.itemsize, "rows are contiguous"
    return array.ctypes.data + array.strides[0] * np.arange(len(array), dtype=np.intp)


def _release(array: npt.NDArray[Any]) -> None:
    """Give the pages of a mapped file back that were read; the system reads them again where they are used again."""
    base = array
    while isinstance(base, np.ndarray) and base.base is not None:
        base = base.base
    if not isinstance(base, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED"):
        return
    first = array.ctypes.data - np.frombuffer(base, np.uint8).ctypes.data
    start = first // mmap.PAGESIZE * mmap.PAGESIZE
    base.madvise(mmap.MADV_DONTNEED, start, min(first + array.nbytes, len(base)) - start)
