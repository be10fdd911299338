"""Tensors of a GGUF file, mapped, and dequantized by the library gguf where their numbers are read."""

from __future__ import annotations

import importlib
import json
import mmap
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.checkpoints.stored_tensor import StoredTensor
from millpond.errors import MissingExtraError

LINK = "weights-of-millpond.gguf"  # in the folder of a GGUF file: a link to the file
_TABLE = "tensors.json"
# Types of numbers that are not quantized: their names here, and numpy's type of the numbers or of their bits.
_PLAIN = {"F32": ("float32", "<f4"), "F16": ("float16", "<f2"), "F64": ("float64", "<f8"), "BF16": ("bfloat16", "<u2")}


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a tensor is in its file."""

    kind: str  # gguf's name of its type
    shape: tuple[int, ...]
    first: int  # byte in the file
    size: int  # bytes
    less_one: bool = False  # whether the converter added 1 to each number


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantizedTensor(StoredTensor):
    """Rows of blocks of quantized numbers, ``stored [rows, bytes]``; the numbers of a row are dequantized together."""

    kind: Any  # gguf's type of the blocks
    width: int  # numbers in a row

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""
        return (len(self.stored) if self.rows is None else len(self.rows), self.width)

    def numbers(self) -> npt.NDArray[Any]:
        """The numbers, dequantized."""
        return self.float32()

    def _to_float32(self, numbers: npt.NDArray[Any], out: npt.NDArray[np.float32]) -> None:
        np.copyto(out, library().dequantize(np.ascontiguousarray(numbers), self.kind).reshape(out.shape))


def write_places(folder: Path, places: Mapping[str, Place]) -> None:
    """Keep the places of tensors beside the link to their file."""
    content = {name: asdict(place) for name, place in places.items()}
    (folder / _TABLE).write_text(json.dumps(content, indent=0), encoding="utf-8")


def linked_tensors(link: Path) -> dict[str, StoredTensor]:
    """The tensors of the file that ``link`` leads to, by the names in the table beside it; none is read yet."""
    content = json.loads((link.parent / _TABLE).read_text(encoding="utf-8"))
    return mapped(
        link, {name: Place(**{**fields, "shape": tuple(fields["shape"])}) for name, fields in content.items()}
    )


def mapped(path: Path, places: Mapping[str, Place]) -> dict[str, StoredTensor]:
    """The tensors at these places of a file."""
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return {name: _tensor(name, place, data) for name, place in places.items()}


def _tensor(name: str, place: Place, data: mmap.mmap) -> StoredTensor:
    if place.kind not in _PLAIN:
        rows = prod(place.shape[:-1])
        blocks: npt.NDArray[Any] = np.ndarray((rows, place.size // rows), np.uint8, data, place.first)
        kind = library().GGMLQuantizationType[place.kind]
        return QuantizedTensor(
            name=name, dtype=f"float32 from {place.kind}", stored=blocks, kind=kind, width=place.shape[-1]
        )
    dtype, numbers = _PLAIN[place.kind]
    tensor = StoredTensor(name=name, dtype=dtype, stored=np.ndarray(place.shape, numbers, data, place.first))
    if place.less_one:  # a norm's weight
        tensor = StoredTensor(name=name, dtype="float32", stored=tensor.float32() - np.float32(1))
    return tensor


def library() -> Any:
    """The library gguf.

    Raises:
        MissingExtraError: It is not installed.
    """
    if find_spec("gguf") is None:
        raise MissingExtraError('GGUF files are read by the library gguf: pip install "millpond[gguf]"')
    return importlib.import_module("gguf")
