"""The content of a GGUF file by the library gguf: metadata, and tensors that are dequantized where they are read."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.checkpoints.gguf.rows import ROWS, GgufRow
from millpond.checkpoints.stored_tensor import StoredTensor
from millpond.errors import MissingExtraError, ModelLoadError, UnsupportedArchitectureError

_IN_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
# Tensors that the model computes nothing with: a language model's head, and frequencies that config.json gives.
_UNREAD = ("output.weight", "rope_freqs.weight")
_PLAIN = {"F32": np.float32, "F16": np.float16, "F64": np.float64}


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
        np.copyto(out, _library().dequantize(np.ascontiguousarray(numbers), self.kind).reshape(out.shape))


@dataclass(frozen=True, kw_only=True)
class GgufFile:
    """A file."""

    path: Path
    name: str  # of its architecture
    row: GgufRow
    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]  # by their names in the file

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key of the architecture's own."""
        return self.metadata.get(f"{self.name}.{key}", default)

    def backbone(self) -> dict[str, StoredTensor]:
        """The tensors of the backbone under the names that they had before the conversion."""
        renamed = {}
        for name, tensor in self.tensors.items():
            stem, _, kind = name.rpartition(".")
            if name in _UNREAD or stem in self.row.dense:
                continue
            layer = _IN_LAYER.fullmatch(stem)
            part = self.row.names.get(stem) if layer is None else self.row.parts.get(layer[2])
            if part is None:
                raise UnsupportedArchitectureError(f"{self.path} has a tensor {name}, which no known {self.name} has")
            if self.row.centred and stem.endswith("_norm"):
                tensor = StoredTensor(name=name, dtype="float32", stored=tensor.float32() - np.float32(1))
            renamed[f"{part if layer is None else f'{self.row.layers}.{layer[1]}.{part}'}.{kind}"] = tensor
        return renamed


def read_gguf(path: Path) -> GgufFile:
    """The file at ``path``; no tensor is read.

    Raises:
        MissingExtraError: The library gguf is not installed.
        UnsupportedArchitectureError: It is of an architecture that is not read here.
        ModelLoadError: It is damaged.
    """
    try:
        reader = _library().GGUFReader(path)
        metadata = {key: value.contents() for key, value in reader.fields.items()}
        tensors = {tensor.name: _tensor(tensor) for tensor in reader.tensors}
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise ModelLoadError(f"{path} is no GGUF file that can be read: {error}; fetch it again") from error
    name = str(metadata.get("general.architecture"))
    if name not in ROWS:
        raise UnsupportedArchitectureError(
            f"{path} is a GGUF of {name}, which millpond does not read; it reads {', '.join(ROWS)}: name the folder or "
            "hub id of the checkpoint that it was converted from"
        )
    return GgufFile(path=path, name=name, row=ROWS[name], metadata=metadata, tensors=tensors)


def _tensor(tensor: Any) -> StoredTensor:
    shape = tuple(int(size) for size in reversed(tensor.shape))
    kind = tensor.tensor_type.name
    if kind in _PLAIN:
        stored = np.asarray(tensor.data).view(_PLAIN[kind]).reshape(shape)
        return StoredTensor(name=tensor.name, dtype=np.dtype(_PLAIN[kind]).name, stored=stored)
    if kind == "BF16":
        return StoredTensor(name=tensor.name, dtype="bfloat16", stored=np.asarray(tensor.data).view("<u2").reshape(shape))
    rows = np.asarray(tensor.data).reshape(prod(shape[:-1]), -1)
    return QuantizedTensor(name=tensor.name, dtype=kind.lower(), stored=rows, kind=tensor.tensor_type, width=shape[-1])


def _library() -> Any:
    if find_spec("gguf") is None:
        raise MissingExtraError('GGUF files are read by the library gguf: pip install "millpond[gguf]"')
    return importlib.import_module("gguf")
