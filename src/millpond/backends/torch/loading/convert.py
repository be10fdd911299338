"""Pickled weights of a checkpoint written as safetensors, which are read without torch."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from millpond.backends.torch.weights import read_file
from millpond.checkpoints.layouts.sparse import VECTOR_FILE, WEIGHT_FILE
from millpond.checkpoints.resolve import read_json_object
from millpond.checkpoints.weights import weight_files
from millpond.errors import InvalidRequestError, ModelLoadError

_SAFE, _PICKLED = "model.safetensors", "pytorch_model.bin"
# What a checkpoint in another folder needs besides its weights.
_COPIED = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja", "*.safetensors", "README.md", "artifact.metadata")
_OTHER_RUNTIMES = ("onnx", "openvino", "coreml", "gguf")


@dataclass(frozen=True, kw_only=True)
class Written:
    """A file that was written."""

    path: Path
    source: Path  # the pickle
    tensors: int  # how many it holds


def convert(folder: Path, output: Path | None = None) -> list[Written]:
    """Write every pickled weight file of the checkpoint in ``folder`` as safetensors.

    Args:
        folder: The checkpoint.
        output: The folder of the converted checkpoint, with its other files; ``None``: beside the pickles.

    Raises:
        InvalidRequestError: The checkpoint has no pickle that is read, or ``output`` has files.
        ModelLoadError: A pickle is damaged, or holds something else than tensors.
    """
    pickles = [*_layers(folder), *(path for place in _places(folder) for path in _backbone(place))]
    if not pickles:
        raise InvalidRequestError(f"{folder} needs no conversion: it has no pickled weights that would be read")
    if output is None:
        return _write(folder, pickles, folder)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InvalidRequestError(f"output={str(output)!r} exists and is not empty; choose a new folder")
    part = output.with_name(f".{output.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # of a run that was killed
    try:
        _copy(folder, part)
        written = _write(folder, pickles, part)
        if output.exists():
            output.rmdir()
        part.rename(output)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return [
        Written(path=output / each.path.relative_to(part), source=each.source, tensors=each.tensors) for each in written
    ]


def _places(folder: Path) -> list[Path]:
    """The folders of a checkpoint that may hold weights."""
    return [folder, *sorted(path for path in folder.iterdir() if path.is_dir() and path.name not in _OTHER_RUNTIMES)]


def _backbone(place: Path) -> list[Path]:
    """The pickles of a folder without safetensors, an index after its shards."""
    if any((place / f"{_SAFE}{end}").is_file() for end in ("", ".index.json")):
        return []
    if not any((place / f"{_PICKLED}{end}").is_file() for end in ("", ".index.json")):
        return []
    files = list(weight_files(place, None))  # raises if a shard is missing
    return files if files == [place / _PICKLED] else [*files, place / f"{_PICKLED}.index.json"]


def _layers(folder: Path) -> list[Path]:
    """BGE-M3's further layers that are pickled only."""
    paths = (folder / name for name in (WEIGHT_FILE, VECTOR_FILE))
    return [path for path in paths if path.is_file() and not path.with_suffix(".safetensors").is_file()]


def _write(folder: Path, pickles: list[Path], target: Path) -> list[Written]:
    written = []
    for source in pickles:
        path = target / source.relative_to(folder).with_name(_renamed(source.name))
        path.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix == ".json":
            _write_index(source, path)
        else:
            written.append(Written(path=path, source=source, tensors=_write_tensors(source, path)))
    return written


def _renamed(name: str) -> str:
    return name.replace("pytorch_model", "model").replace(".bin", ".safetensors").replace(".pt", ".safetensors")


def _write_tensors(source: Path, path: Path) -> int:
    tensors = read_file(source)
    strange = sorted(name for name, tensor in tensors.items() if not isinstance(tensor, torch.Tensor))
    if strange or not tensors:
        held = f"{strange[0]}, a {type(tensors[strange[0]]).__name__}" if strange else "no tensors"
        raise ModelLoadError(f"{source} holds {held}; a file of weights holds tensors by name")
    tensors = _apart(tensors)
    with _replacing(path) as part:
        save_file(tensors, part, metadata={"format": "pt"})
    return len(tensors)


def _apart(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors that share no memory: of several that do, all but the first are copied."""
    seen: set[int] = set()
    apart = {}
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.detach().clone() if place in seen else tensor.detach().contiguous()
        seen.add(place)
    return apart


def _write_index(source: Path, path: Path) -> None:
    index = read_json_object(source)
    index["weight_map"] = {name: _renamed(str(file)) for name, file in index["weight_map"].items()}
    with _replacing(path) as part:
        part.write_text(json.dumps(index, indent=2), encoding="utf-8")


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A file that takes the name ``path`` when it is complete and on the disk; one that is not leaves nothing."""
    part = path.with_name(f".{path.name}.part")
    try:
        yield part
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _copy(folder: Path, target: Path) -> None:
    """The files that a checkpoint needs besides pickles."""
    for place in _places(folder):
        for path in {path for pattern in _COPIED for path in place.glob(pattern) if path.is_file()}:
            if path.name != f"{_PICKLED}.index.json":
                copy = target / path.relative_to(folder)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)
