"""The compiled kernels of heads. Products run in them and not in numpy, whose library has threads of its own.

Those would compete with the threads of the engine, and run on all cores whatever a call asks for.
"""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from millpond.backends.native import structs
from millpond.backends.native.kernels import Precision
from millpond.backends.native.memory import Memory
from millpond.backends.native.packing.weight_packer import (
    NotSupported,
    StoredRows,
    pack_rows,
    padded,
    padded_rows,
    tensor_of,
)
from millpond.checkpoints.stored_tensor import StoredTensor
from millpond.native import library

Floats = npt.NDArray[np.float32]
_int, _pointer = ctypes.c_int64, ctypes.c_void_p

_LINE, _HUGE_PAGE = 64, 2 << 20  # bytes


class ProductCall(ctypes.Structure):
    """``struct ProductCall`` of ``native/heads/calls.h``."""

    _fields_: ClassVar = [
        ("rows", _pointer),
        ("out", _pointer),
        ("weight", structs.Weight),
        *((name, _int) for name in ("count", "width", "columns", "threads")),
    ]


class GeluCall(ctypes.Structure):
    """``struct GeluCall``."""

    _fields_: ClassVar = [("numbers", _pointer), ("count", _int)]


class VocabularyCall(ctypes.Structure):
    """``struct VocabularyCall``."""

    _fields_: ClassVar = [
        *((name, _pointer) for name in ("rows", "bounds", "out")),
        ("dense", structs.Weight),
        ("decoder", structs.Weight),
        ("norm", structs.NormWeights),
        *((name, _int) for name in ("width", "columns", "texts", "activation", "logarithms", "threads")),
    ]


def kernel(name: str) -> Any:
    """An entry of the kernel table; raises NotSupported if this processor has none."""
    table = library.kernel_table()
    entry = None if table is None else getattr(table, name)
    if not entry:
        raise NotSupported(library.absent() or f"this processor has no kernel {name}")
    return entry


def run(entry: Any, call: ctypes.Structure) -> None:
    """Run a kernel, without the GIL."""
    if entry(ctypes.addressof(call)) != 0:
        raise MemoryError("no memory for the kernel of a head")


class PackedWeight:
    """A weight ``[out, in]`` as the kernels read it, with zeros up to multiples of 32."""

    def __init__(self, weight: StoredTensor, bias: Floats | None = None, dtype: Precision = "float32") -> None:
        self.out_features, self.in_features = weight.shape
        out, into = map(padded, weight.shape)
        itemsize = 4 if dtype == "float32" else 2
        self._memory, address = _memory(out * into * itemsize)
        self.struct = structs.Weight(units=address, out=out, in_=into)
        if bias is not None:
            self._bias = np.pad(bias.astype(np.float32), (0, out - len(bias)))
            self.struct.bias = self._bias.ctypes.data
        rows = StoredRows(parts=(weight,), order=padded_rows(self.out_features), piece=self.in_features)
        target = structs.PackRowsCall(units=address, in_=into)
        pack_rows(kernel(f"pack_rows_{dtype}"), rows, target, itemsize=itemsize)


def _memory(size: int) -> tuple[object, int]:
    """What holds so many bytes, and their address, on a line of the cache; less than a huge page in Python's heap."""
    if size >= _HUGE_PAGE:
        memory = Memory(size)
        return memory, memory.address
    room = np.zeros(size + _LINE, dtype=np.uint8)
    return room, room.ctypes.data + -room.ctypes.data % _LINE


class Linear:
    """``x W^T + b`` in float32."""

    def __init__(self, weight: StoredTensor | Floats, bias: StoredTensor | Floats | None = None) -> None:
        self._weight = PackedWeight(
            weight if isinstance(weight, StoredTensor) else tensor_of(weight),
            bias.float32() if isinstance(bias, StoredTensor) else bias,
        )
        self._multiply = kernel("head_product")
        self.in_features, self.out_features = self._weight.in_features, self._weight.out_features

    def __call__(self, rows: Floats, threads: int) -> Floats:  # [n, in] -> [n, out]
        """Multiply float32 rows on some threads."""
        rows = np.ascontiguousarray(rows, dtype=np.float32)
        assert rows.shape[1] == self.in_features, "the kernel checks nothing"
        out = np.empty((len(rows), self.out_features), dtype=np.float32)
        call = ProductCall(
            rows=rows.ctypes.data,
            out=out.ctypes.data,
            weight=self._weight.struct,
            count=len(rows),
            width=self.in_features,
            columns=self.out_features,
            threads=threads,
        )
        run(self._multiply, call)
        return out


def gelu(numbers: Floats) -> Floats:
    """``x Phi(x)`` to the last digits of float32."""
    out = np.array(numbers, dtype=np.float32, order="C")
    run(kernel("gelu"), GeluCall(numbers=out.ctypes.data, count=out.size))
    return out
