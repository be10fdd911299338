"""A folder's tensors as torch's, and pickled files, read without running their code."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from millpond.checkpoints.gguf.tensors import LINK
from millpond.checkpoints.stored_tensor import StoredTensor
from millpond.checkpoints.weights import damage, stored_file, weight_files

# Types that numpy lacks, and the ones of their bits.
_BITS = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8}


def read_tensors(folder: Path, *, only: tuple[str, ...] | None = None) -> dict[str, torch.Tensor]:
    """Every tensor of ``folder``'s weight files by name, or those in ``only`` that the files have."""
    tensors: dict[str, torch.Tensor] = {}
    for path, names in weight_files(folder, only).items():
        with damage(path):
            tensors.update(_read(path, names))
    return tensors


def read_rows(folder: Path, name: str, rows: Sequence[int]) -> torch.Tensor:
    """Some rows of one matrix. safetensors are read row by row, since the head of a vocabulary may take gigabytes."""
    ((path, _),) = weight_files(folder, (name,)).items()
    with damage(path):
        if path.suffix != ".safetensors":
            return _read(path, (name,))[name][list(rows)]
        with safe_open(path, framework="pt") as file:
            table = file.get_slice(name)
            return torch.cat([table[row : row + 1] for row in rows])


def read_file(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of one file by name."""
    with damage(path):
        return dict(_read(path, None))


def stored_pickle(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a pickled file, mapped where the file can be, for readers without torch."""
    return {
        name: StoredTensor(name=name, dtype=str(tensor.dtype).removeprefix("torch."), stored=_numbers(tensor))
        for name, tensor in read_file(path).items()
    }


def _numbers(tensor: torch.Tensor) -> Any:
    """The numbers of ``tensor``, or their bits, as a read-only view."""
    bits = _BITS.get(tensor.dtype)
    view = (tensor.detach() if bits is None else tensor.detach().view(bits)).numpy()
    view.flags.writeable = False
    return view


def _read(path: Path, names: tuple[str, ...] | None) -> Mapping[str, torch.Tensor]:
    if path.name == LINK:
        held = stored_file(path)
        return {name: torch.tensor(held[name].float32()) for name in names or held if name in held}
    if path.suffix == ".onnx":
        return _read_exported(path, names)
    return _read_safe(path, names) if path.suffix == ".safetensors" else _read_pickled(path, names)


def _read_exported(path: Path, names: tuple[str, ...] | None) -> Mapping[str, torch.Tensor]:
    stored = stored_file(path)
    held = stored if names is None else {name: stored[name] for name in names if name in stored}
    return {
        name: torch.from_numpy(np.array(tensor.stored, order="C")).view(getattr(torch, tensor.dtype))
        for name, tensor in held.items()
    }


def _read_safe(path: Path, names: tuple[str, ...] | None) -> Mapping[str, torch.Tensor]:
    with safe_open(path, framework="pt") as file:
        held = set(file.keys())
        return {name: file.get_tensor(name) for name in (held if names is None else held.intersection(names))}


def _read_pickled(path: Path, names: tuple[str, ...] | None) -> Mapping[str, torch.Tensor]:
    mapped = zipfile.is_zipfile(path)  # files from before torch 1.6 are no zip files and cannot be mapped
    tensors: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    return tensors if names is None else {name: tensors[name] for name in names if name in tensors}
