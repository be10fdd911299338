"""A folder's tensors: safetensors or the older pickled files, whole or in shards, read without running code."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millpond.checkpoints.resolve import read_json_object
from millpond.errors import ModelLoadError

if TYPE_CHECKING:
    import torch

_SAFE, _PICKLED = "model.safetensors", "pytorch_model.bin"


def read_tensors(folder: Path, *, only: tuple[str, ...] | None = None) -> dict[str, torch.Tensor]:
    """Every tensor of ``folder``'s weight files by name, or those in ``only`` that the files have."""
    tensors: dict[str, torch.Tensor] = {}
    for path, names in _files(folder, only).items():
        with _damage(path):
            tensors.update(_read_safe(path, names) if path.suffix == ".safetensors" else _read_pickled(path, names))
    return tensors


def read_pickle(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of one pickled file, read without running its code."""
    with _damage(path):
        return dict(_read_pickled(path, None))


def _files(folder: Path, only: tuple[str, ...] | None) -> dict[Path, tuple[str, ...] | None]:
    """The files to read, each with the names to read from it (``None``: all)."""
    for name in (_SAFE, _PICKLED):
        if (folder / name).is_file():
            return {folder / name: only}
        index = folder / f"{name}.index.json"
        if index.is_file():
            shards = read_json_object(index).get("weight_map")
            if not isinstance(shards, dict) or not shards:
                raise ModelLoadError(f"{index} has no weight_map; fetch it again")
            missing = sorted(file for file in set(shards.values()) if not (folder / file).is_file())
            if missing:
                raise ModelLoadError(f"{folder} lacks {missing[0]}, which {index.name} names; is it complete?")
            files: dict[Path, tuple[str, ...] | None] = {}
            for file in sorted(set(shards.values())):
                held = tuple(key for key in (only or ()) if shards.get(key) == file)
                if only is None or held:
                    files[folder / file] = None if only is None else held
            return files
    raise ModelLoadError(f"{folder} has neither {_SAFE} nor {_PICKLED}; is the checkpoint complete?")


def _read_safe(path: Path, names: tuple[str, ...] | None) -> Mapping[str, torch.Tensor]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        held = set(file.keys())
        return {name: file.get_tensor(name) for name in (held if names is None else held.intersection(names))}


def _read_pickled(path: Path, names: tuple[str, ...] | None) -> Mapping[str, torch.Tensor]:
    import torch

    mapped = zipfile.is_zipfile(path)  # files from before torch 1.6 are no zip files and cannot be mapped
    tensors: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    return tensors if names is None else {name: tensors[name] for name in names if name in tensors}


@contextmanager
def _damage(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # each reader raises its own class, and any of them means a damaged file
        raise ModelLoadError(f"{path}: the weight file is damaged: {error}; fetch it again") from error


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor in ``folder``'s weight files; only the header of safetensors is read."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in _files(folder, None):
        with _damage(path):
            if path.suffix == ".safetensors":
                from safetensors import safe_open

                with safe_open(path, framework="pt") as file:
                    shapes.update({name: tuple(file.get_slice(name).get_shape()) for name in file.keys()})  # noqa: SIM118
            else:
                shapes.update({name: tuple(tensor.shape) for name, tensor in _read_pickled(path, None).items()})
    return shapes


def read_rows(folder: Path, name: str, rows: Sequence[int]) -> torch.Tensor:
    """Some rows of one matrix. safetensors are read row by row, since the head of a vocabulary may take gigabytes."""
    import torch

    ((path, _),) = _files(folder, (name,)).items()
    with _damage(path):
        if path.suffix != ".safetensors":
            return _read_pickled(path, (name,))[name][list(rows)]
        from safetensors import safe_open

        with safe_open(path, framework="pt") as file:
            table = file.get_slice(name)
            return torch.cat([table[row : row + 1] for row in rows])


def find_tensor(names: Iterable[str], name: str) -> str | None:
    """The tensor called ``name``, with or without the prefix of the checkpoint's class; the shortest of several."""
    matches = [key for key in names if key == name or key.endswith("." + name)]
    return min(matches, key=len) if matches else None
