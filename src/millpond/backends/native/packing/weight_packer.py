"""WeightPacker: the weights of a plan, packed as the kernels read them, straight from where they are stored."""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.backends.kernel_check import code_hash
from millpond.backends.native import structs
from millpond.backends.native.kernels import Kernels
from millpond.backends.native.memory import Memory, floats_at
from millpond.backends.native.packing import packed_file
from millpond.checkpoints.stored_tensor import StoredTensor
from millpond.native import library
from millpond.support.load_progress import advance, begin

# A product computes that many columns at a time, and a panel of states has as many, in all instruction sets.
UNIT = 32
# Of int8 weights: inner numbers that one range of a row's codes spans, and those of a panel (int8.h).
_CHUNK, _CODE_PANEL = 384, 64
_LINE = 64  # bytes: a weight begins at a multiple of them
_SLICE = 4 << 20  # numbers that are packed at a time: more are neither converted nor kept in memory

Floats = npt.NDArray[np.float32]
Indexes = npt.NDArray[np.intp]
# Of weights by their ids: `[in]` each, by which the inner numbers are multiplied.
Factors = Mapping[int, Floats]


class NotSupported(Exception):  # noqa: N818 - not an error: the model runs in the torch backend
    """The native encoder does not compute this model."""


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


def tensor_of(numbers: npt.ArrayLike) -> StoredTensor:
    """Numbers in memory as a tensor."""
    return StoredTensor(name="", dtype="float32", stored=np.ascontiguousarray(numbers, dtype=np.float32))


def padded(count: int) -> int:
    """The columns that the kernels compute for so many: those behind them are 0."""
    return -(-count // UNIT) * UNIT


def padded_rows(rows: int) -> Indexes:
    """Rows in order, and -1 for the zeros behind them."""
    return np.concatenate([np.arange(rows), np.full(padded(rows) - rows, -1)])


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredRows:
    """Rows of numbers, taken from tensors one below the other."""

    parts: tuple[StoredTensor, ...]  # `[rows, count]` each
    order: Indexes  # the row of `parts` that each row here has; -1: zeros
    piece: int  # numbers after which zeros fill up to a multiple of UNIT

    @property
    def count(self) -> int:
        """Numbers of a row, zeros included."""
        return int(self.parts[0].shape[1]) // self.piece * padded(self.piece)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Packing:
    """A weight, or a table, that is to be packed."""

    rows: tuple[StoredRows, ...]  # of a weight, some inner numbers each
    target: Any  # the struct that gets its address ...
    field: str  # ... in this field
    kind: str  # "weight", "int8" or "table"


class WeightPacker:
    """Takes weights one after another; :meth:`pack` reads and packs them."""

    def __init__(self, kernels: Kernels, *, adapters: int, rank: int) -> None:
        self.owned: list[Any] = []
        self.low = padded(adapters * rank)
        self._kernels, self._adapters, self._rank = kernels, adapters, rank
        self._packings: list[_Packing] = []
        self._smoothed: set[int] = set()  # weights that have factors, by their ids

    @property
    def numbers(self) -> int:
        """Of all weights."""
        weights = (packing.target for packing in self._packings if packing.kind != "table")
        return sum(weight.out * weight.in_ for weight in weights)

    def weight(
        self,
        *parts: Linear,
        order: Indexes | None = None,
        piece: int | None = None,
        adapter: LowRank | None = None,
        mlp: bool = False,
        exact: bool = False,
    ) -> structs.Weight:
        """Linear layers side by side, with the second factors of an adapter behind them.

        Args:
            parts: The layers.
            order: For each column its row in the layers' weights, one below the other; -1: zeros.
            piece: Inner numbers after which zeros fill up to a multiple of UNIT; ``None``: all.
            adapter: Its second factors follow.
            mlp: Whether it belongs to a feed forward.
            exact: It is never in eight bits.
        """
        weights = tuple(part.weight for part in parts)
        order = padded_rows(sum(weight.shape[0] for weight in weights)) if order is None else order
        rows = [StoredRows(parts=weights, order=order, piece=piece or weights[0].shape[1])]
        if adapter is not None:
            if self._kernels.int8 != "none":
                raise NotSupported("adapters of weights in eight bits")
            up = np.pad(adapter.up, ((0, 0), (0, self.low - adapter.up.shape[1])))
            rows.append(StoredRows(parts=(tensor_of(up),), order=order, piece=self.low))
        bias = None
        if any(part.bias is not None for part in parts):
            bias = np.concatenate([*(self._bias_of(part) for part in parts), [0]])[order]
        struct = structs.Weight(bias=self.floats(bias), out=len(order), in_=sum(part.count for part in rows))
        int8 = not exact and (self._kernels.int8 == "all" or (mlp and self._kernels.int8 == "feeds"))
        packing = _Packing(rows=tuple(rows), target=struct, field="units", kind="int8" if int8 else "weight")
        self._packings.append(packing)
        return struct

    def gated(self, gate: Linear, up: Linear, *, exact: bool = False) -> structs.Weight:
        """The columns of gate and up in turn, a vector of each."""
        one = padded_rows(gate.weight.shape[0])
        both = np.stack([one, np.where(one < 0, -1, one + gate.weight.shape[0])])
        lanes = both.reshape(2, -1, self._kernels.lanes).swapaxes(0, 1)
        return self.weight(gate, up, order=lanes.reshape(-1), mlp=True, exact=exact)

    def low_weight(self, adapter: LowRank, *, piece: int | None = None) -> structs.Weight:
        """The first factors of a weight's adapters as a weight of its own."""
        columns = adapter.down.shape[1]
        if self.low > padded(columns):  # behind the queries stand as many columns of keys
            raise NotSupported(f"{self._adapters} adapters of rank {self._rank} for {columns} columns")
        return self.weight(Linear(weight=tensor_of(adapter.down)), piece=piece)

    def table(self, table: StoredTensor, target: Any, field: str) -> None:
        """A table in the model's precision, whose address goes to a field of a struct.

        It stays in the mapped file if that has it so.
        """
        rows, columns = table.shape
        stored = table.stored if table.rows is None and table.dtype == self._kernels.dtype else None
        if stored is not None and stored.flags.c_contiguous and columns % UNIT == 0:
            setattr(target, field, self._kept(stored))
            return
        whole = StoredRows(parts=(table,), order=np.arange(rows), piece=columns)
        self._packings.append(_Packing(rows=(whole,), target=target, field=field, kind="table"))

    def numbers_of(self, tensor: StoredTensor) -> Floats:
        """A tensor's numbers as the model's precision has them."""
        if self._is_float32:
            return tensor.float32()
        return (tensor.bfloat16().astype(np.uint32) << 16).view(np.float32)

    def floats(self, numbers: Floats | None) -> int | None:
        """The address of numbers in float32."""
        return None if numbers is None else self._kept(np.ascontiguousarray(numbers, dtype=np.float32))

    def integers(self, numbers: npt.NDArray[np.int32]) -> int:
        """The address of numbers in int32."""
        return self._kept(np.ascontiguousarray(numbers, dtype=np.int32))

    def in_int8(self, weight: structs.Weight) -> bool:
        """Whether a weight will be in eight bits."""
        return any(packing.target is weight and packing.kind == "int8" for packing in self._packings)

    def pack(
        self,
        identity: object = None,
        *,
        smoothed: Sequence[structs.Weight] = (),
        factors_of: Callable[[], Factors] = dict,
    ) -> Factors:
        """Pack all weights into one piece of memory, in the order of their use; returns the factors of smoothed ones.

        Args:
            identity: All that decides the weights but the kernels: what has a representation in JSON, which changes
                with them. With it they are kept on disk.
            smoothed: Weights in eight bits that have factors.
            factors_of: Tells these, once all weights are packed without them; called only where no file has them.
        """
        self._smoothed = set(map(id, smoothed))
        write = partial(self._write, factors_of=factors_of)
        size = sum(map(self._bytes, self._packings))
        held = None if identity is None else packed_file.mapped(self._key(identity), size, write)
        if held is None:
            memory = Memory(size)
            self.owned.append(memory)
            write(memory.address)
        else:
            self._place(self._kept(held))
        return {id(packing.target): self._factors(packing).copy() for packing in self._smoothed_packings()}

    @property
    def _is_float32(self) -> bool:
        return self._kernels.dtype == "float32"

    def _key(self, identity: object) -> str:
        """Of all that decides the packed weights."""
        kernels, sizes = self._kernels, [(packing.kind, self._bytes(packing)) for packing in self._packings]
        made_by = (library.source_hash(), kernels.isa, kernels.dtype, kernels.int8, np.__version__, _code())
        return hashlib.sha256(json.dumps([identity, made_by, sizes], default=str).encode()).hexdigest()[:32]

    def _write(self, at: int, factors_of: Callable[[], Factors]) -> None:
        """Pack all weights to an address."""
        self._place(at)
        again = self._smoothed_packings()
        begin("arranging weights", sum(map(self._bytes, [*self._packings, *again])))
        for packing in self._packings:
            self._pack(packing, at)
            at += self._bytes(packing)
            advance(self._bytes(packing))
        factors = factors_of() if again else {}
        for packing in again:
            self._factors(packing)[:] = factors[id(packing.target)]
            self._pack(packing, packing.target.units, self._factors(packing))
            advance(self._bytes(packing))

    def _smoothed_packings(self) -> list[_Packing]:
        return [packing for packing in self._packings if id(packing.target) in self._smoothed]

    def _factors(self, packing: _Packing) -> Floats:
        """The factors of a smoothed weight, which lie behind its scales."""
        count, at = packing.target.in_, packing.target.scales + self._scale_bytes(packing)
        return floats_at(at, count)

    def _place(self, at: int) -> None:
        """Say where each weight is."""
        for packing in self._packings:
            setattr(packing.target, packing.field, at)
            if packing.kind == "int8":
                packing.target.scales = at + self._unit_bytes(packing)
            at += self._bytes(packing)

    def _pack(self, packing: _Packing, at: int, factors: Floats | None = None) -> None:
        whole = sum(rows.count for rows in packing.rows)
        kernels = {"weight": self._kernels.pack, "int8": self._kernels.pack_int8, "table": self._kernels.copy}
        for rows in packing.rows:
            target = structs.PackRowsCall(
                units=at,
                scales=packing.target.scales if packing.kind == "int8" else None,
                in_=whole,
                exact=self._is_float32,
                factors=None if factors is None else factors.ctypes.data,
            )
            pack_rows(kernels[packing.kind], rows, target, itemsize=self._kernels.itemsize)
            at += rows.count * 2 * self._kernels.lanes * self._kernels.itemsize

    def _bytes(self, packing: _Packing) -> int:
        """Of a packing, up to the next one."""
        factors = packing.target.in_ * 4 if id(packing.target) in self._smoothed else 0
        return -(-(self._unit_bytes(packing) + self._scale_bytes(packing) + factors) // _LINE) * _LINE

    def _scale_bytes(self, packing: _Packing) -> int:
        if packing.kind != "int8":
            return 0
        return int(-(-packing.target.in_ // _CHUNK) * 2 * packing.target.out * 4)

    def _unit_bytes(self, packing: _Packing) -> int:
        out, into = len(packing.rows[0].order), sum(rows.count for rows in packing.rows)
        return (
            out * -(-into // _CODE_PANEL) * _CODE_PANEL
            if packing.kind == "int8"
            else out * into * self._kernels.itemsize
        )

    def _bias_of(self, part: Linear) -> Floats:
        """Zeros if a linear layer has none."""
        return np.zeros(part.weight.shape[0], np.float32) if part.bias is None else self.numbers_of(part.bias)

    def _kept(self, array: npt.NDArray[Any]) -> int:
        self.owned.append(array)
        return int(array.ctypes.data)


@cache
def _code() -> str:
    """What the code computes that is packed."""
    return code_hash(Path(__file__).parents[1])


def pack_rows(kernel: Any, rows: StoredRows, call: structs.PackRowsCall, *, itemsize: int) -> None:
    """Pack rows where ``call`` says, slice by slice; its other fields are filled in here."""
    call.count, call.piece, call.padded = rows.count, rows.piece, padded(rows.piece)
    whole = call.scales is not None or any(type(part) is not StoredTensor for part in rows.parts)
    step = len(rows.order) if whole else max(UNIT, _SLICE // call.in_ // UNIT * UNIT)
    for first in range(0, len(rows.order), step):
        order = rows.order[first : first + step]
        call.stored, addresses, kept = _sources(rows.parts, order)
        call.rows, call.out = addresses.ctypes.data, len(order)
        kernel(ctypes.addressof(call))
        call.units += step * call.in_ * itemsize
        del kept
        for part in rows.parts:
            release(part.stored)


def _sources(parts: Sequence[StoredTensor], order: Indexes) -> tuple[int, Indexes, Sequence[Any]]:
    """The precision of the numbers, where each row of ``order`` is, and what has to live until it is read."""
    same = all(part.dtype == "bfloat16" for part in parts)
    addresses, kept, first = np.zeros(len(order), np.intp), [], 0
    for part in parts:
        own = (order >= first) & (order < first + part.shape[0])
        chosen, first = order[own] - first, first + part.shape[0]
        if not len(chosen):
            continue
        if type(part) is not StoredTensor:
            numbers = part.float32()
        elif part.dtype == ("bfloat16" if same else "float32") and part.stored.strides[1] == part.stored.itemsize:
            numbers = part.stored
            chosen = chosen if part.rows is None else part.rows[chosen]
        else:
            numbers = part[chosen].numbers() if same else part[chosen].float32()  # also of a transposed matrix
            chosen = np.arange(len(chosen))
        assert numbers.strides[1] == numbers.itemsize, "rows are contiguous"
        addresses[own] = numbers.ctypes.data + numbers.strides[0] * chosen
        kept.append(numbers)
    return structs.STORED_BFLOAT16 if same else structs.STORED_FLOAT32, addresses, kept


def release(array: npt.NDArray[Any]) -> None:
    """Give the pages of a mapped file back that were read; the system reads them again where they are used again."""
    base: Any = array
    while isinstance(base, np.ndarray) and base.base is not None:
        base = base.base
    if not isinstance(base, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED"):
        return
    first = array.ctypes.data - np.frombuffer(base, np.uint8).ctypes.data
    start = first // mmap.PAGESIZE * mmap.PAGESIZE
    base.madvise(mmap.MADV_DONTNEED, start, min(first + array.nbytes, len(base)) - start)
