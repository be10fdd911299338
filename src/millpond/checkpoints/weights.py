"""A folder's tensors: safetensors or the older pickled files, whole or in shards, read without running code.

safetensors are mapped, so a tensor is read where its numbers are used; so is an ONNX file, where there is nothing else.
A pickle is read by torch, which only the extra ``torch`` brings.
"""

from __future__ import annotations

import importlib
import json
import logging
import mmap
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from millpond.checkpoints.gguf.tensors import LINK, linked_tensors
from millpond.checkpoints.onnx_file import read_onnx
from millpond.checkpoints.resolve import Source, check_pointer, read_json_object
from millpond.checkpoints.stored_tensor import StoredTensor
from millpond.errors import ModelLoadError

logger = logging.getLogger(__name__)

_SAFE, _PICKLED = "model.safetensors", "pytorch_model.bin"
_SHARD = re.compile(r"model-(\d+)-of-(\d+)\.safetensors")
# Exports whose initializers are read, if there is nothing else; the quantized ones beside them are not.
_EXPORTED = ("model.onnx", "model_optimized.onnx", "model_fp16.onnx")
_RUNTIME = "name the folder or hub id of the checkpoint that it was exported from"
_CONVERT = "convert it to model.safetensors with the library that wrote it, or name a repository that has one"
_BY_TRANSFORMERS = (
    "convert it where transformers 4 and its library are installed, once: "
    "AutoModel.from_pretrained(FOLDER, from_{}=True).save_pretrained(FOLDER)"
)
# What repositories have in place of weights that are read here: patterns, the format, and what to do about it.
_FOREIGN = (
    (("*.gguf",), "GGUF", "name the file itself"),
    (("*.onnx", "*.onnx_data"), "ONNX", _RUNTIME),
    (("openvino_*.xml", "openvino_*.bin"), "OpenVINO", _RUNTIME),
    (("*.mlmodel", "*.mlpackage", "*.engine", "*.tflite"), "an export for another runtime", _RUNTIME),
    (("tf_model*.h5", "*.ckpt.index"), "TensorFlow", _BY_TRANSFORMERS.format("tf")),
    (("flax_model*.msgpack",), "Flax", _BY_TRANSFORMERS.format("flax")),
    (("rust_model.ot",), "rust-bert", _CONVERT),
    (("*.pt", "*.pth", "*.pkl", "*.ckpt", "*.pickle"), "a pickle of unknown content", _CONVERT),
)
# What is in a folder without config.json, by a file that only this kind has, and what to do about it.
_OTHER_KINDS = {
    "open_clip_config.json": "an OpenCLIP model of images and texts; millpond reads texts: name a text embedder",
    "params.json": "Mistral's own format; name the folder or repository with transformers' files of the same model",
    "config.cfg": "a spaCy pipeline; name the transformer that it was trained from",
}
# Types in safetensors: the name here, and numpy's type of the numbers or, where numpy has none, of their bits.
_TYPES = {
    "F64": ("float64", "<f8"),
    "F32": ("float32", "<f4"),
    "F16": ("float16", "<f2"),
    "BF16": ("bfloat16", "<u2"),
    "F8_E4M3": ("float8_e4m3fn", "u1"),
    "F8_E5M2": ("float8_e5m2", "u1"),
    "I64": ("int64", "<i8"),
    "I32": ("int32", "<i4"),
    "I16": ("int16", "<i2"),
    "I8": ("int8", "i1"),
    "U64": ("uint64", "<u8"),
    "U32": ("uint32", "<u4"),
    "U16": ("uint16", "<u2"),
    "U8": ("uint8", "u1"),
    "BOOL": ("bool", "?"),
}
_LONGEST_HEADER = 100_000_000  # bytes, as in the library safetensors
_POINTER_FILES = ("*.safetensors", "*.bin", "*.onnx", "*.onnx_data", "tokenizer.json", "*.model", "vocab.*")


def check_weights(folder: Path, source: Source) -> None:
    """Raise ModelLoadError unless ``folder``, that of the backbone in ``source``, has weights."""
    root = source.folder
    for path in (path for name in _POINTER_FILES for path in sorted((*root.glob(name), *root.glob(f"*/{name}")))):
        check_pointer(path)
    if not _has_weights(folder):
        raise ModelLoadError(f"{source.name} has {_found(source)}")
    weight_files(folder, None)  # raises if a shard is missing


def check_config(folder: Path, source: Source) -> None:
    """Raise ModelLoadError, which says what is there instead, unless ``folder`` has config.json."""
    if (folder / "config.json").is_file():
        return
    for mark, kind in _OTHER_KINDS.items():
        if (source.folder / mark).is_file():
            raise ModelLoadError(f"{source.name} holds {kind.replace(';', f' ({mark});', 1)}")
    check_weights(folder, source)
    raise ModelLoadError(
        f"{folder / 'config.json'} is missing beside the weights, so nothing says what they are; fetch it again, or "
        "from the checkpoint that these weights were trained from"
    )


def check_pickles(places: Iterable[Path]) -> None:
    """Raise ModelLoadError if the weights in one of these files or folders are pickled, and torch is missing."""
    if find_spec("torch") is not None:
        return
    for place in places:
        files = [place] if place.is_file() else weight_files(place, None) if _has_weights(place) else ()
        for path in files:
            if path.suffix not in (".safetensors", ".onnx") and path.name != LINK:
                raise ModelLoadError(_pickle_refused(path))


def _has_weights(folder: Path) -> bool:
    names = (f"{name}{end}" for name in (_SAFE, _PICKLED, LINK) for end in ("", ".index.json"))
    others = exported_file(folder) is not None or bool(_unlisted_shards(folder))
    return any((folder / name).is_file() for name in names) or others


def exported_file(folder: Path) -> Path | None:
    """The ONNX file that the weights of ``folder`` are read from if there are no others."""
    paths = (place / name for name in _EXPORTED for place in (folder, folder / "onnx"))
    return next((path for path in paths if path.is_file()), None)


def _found(source: Source) -> str:
    """What a checkpoint without readable weights has instead, and what to do."""
    missing = f"neither {_SAFE} nor {_PICKLED}"
    on_hub = _hub_files(source)
    names = [*_local_files(source.folder), *on_hub]
    pickles = [name for name in on_hub if Path(name).name in (_PICKLED, f"{_PICKLED}.index.json")]
    if pickles and find_spec("torch") is None:  # they were not downloaded
        return f"{pickles[0]}, a pickle, {_ways_out('FOLDER')}"
    for patterns, form, way_out in _FOREIGN:
        held = [name for name in names if any(fnmatch(Path(name).name, pattern) for pattern in patterns)]
        if held:
            return f"weights as {form} only ({held[0]}), and {missing}, which are read here; {way_out}"
    stray = [name for name in names if name.endswith((".safetensors", ".bin"))]
    shard = next((match for name in stray if (match := _SHARD.fullmatch(name))), None)
    if shard is not None:
        return f"{shard[0]}, and not all of the {int(shard[2])} files that it is one of; fetch the others"
    if stray:
        return f"{missing}, but {stray[0]}, whose name says nothing; rename it, if it holds the whole model"
    if not names:
        return "no files; a checkpoint has config.json, the tokenizer's files and model.safetensors: check the path"
    return f"{missing}, only {', '.join(names[:4])}{' ...' if len(names) > 4 else ''}; is the checkpoint complete?"


def _local_files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in (*folder.glob("*"), *folder.glob("*/*")) if path.is_file())


def _hub_files(source: Source) -> list[str]:
    """Names of a hub repository's files, of which only some are downloaded; empty if it cannot be asked."""
    if source.revision is None:
        return []
    from huggingface_hub import list_repo_files

    try:
        return sorted(list_repo_files(source.name, revision=source.revision))
    except Exception as error:  # offline, or no longer there; this only makes an error say more
        logger.debug("%s cannot be listed: %s", source.name, error)
        return []


def stored_tensors(folder: Path, *, only: tuple[str, ...] | None = None) -> dict[str, StoredTensor]:
    """Every tensor of ``folder``'s weight files by name, or those in ``only`` that the files have; none is read yet.

    Raises:
        ModelLoadError: A file is missing or damaged, or pickled and torch, which reads it, is not installed.
    """
    tensors: dict[str, StoredTensor] = {}
    for path, names in weight_files(folder, only).items():
        held = stored_file(path)
        tensors.update(held if names is None else {name: held[name] for name in names if name in held})
    return tensors


def stored_file(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file by name, not read yet; raises what :func:`stored_tensors` does."""
    if path.name == LINK:
        return linked_tensors(path)
    if path.suffix == ".onnx":
        with damage(path):
            held = read_onnx(path)
        return {name: StoredTensor(name=name, dtype=dtype, stored=numbers) for name, (dtype, numbers) in held.items()}
    if path.suffix != ".safetensors":
        return _pickled(path)
    with damage(path), path.open("rb") as file:
        begin, tensors = _header(file)
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return {
            name: StoredTensor(
                name=name,
                dtype=_TYPES[kind][0],
                stored=np.ndarray(shape, _TYPES[kind][1], data, begin + first),
            )
            for name, (kind, shape, first) in tensors.items()
        }


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor in ``folder``'s weight files; raises what :func:`stored_tensors` does."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in weight_files(folder, None):
        if path.suffix == ".safetensors":
            with damage(path), path.open("rb") as file:
                shapes.update({name: shape for name, (_, shape, _) in _header(file)[1].items()})
        else:
            shapes.update({name: tensor.shape for name, tensor in stored_file(path).items()})
    return shapes


def weight_files(folder: Path, only: tuple[str, ...] | None) -> dict[Path, tuple[str, ...] | None]:
    """The files of ``folder``'s tensors, each with the names to read from it (``None``: all)."""
    for name in (_SAFE, _PICKLED, LINK):
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
            return _of_shards(folder, shards, only)
    unlisted = _unlisted_shards(folder)
    if unlisted:
        shards = {}
        for path in unlisted:
            with damage(path), path.open("rb") as file:
                shards.update(dict.fromkeys(_header(file)[1], path.name))
        return _of_shards(folder, shards, only)
    exported = exported_file(folder)
    if exported is None:
        raise ModelLoadError(f"{folder} has neither {_SAFE} nor {_PICKLED}; is the checkpoint complete?")
    return {exported: only}


def _of_shards(
    folder: Path, shards: Mapping[str, str], only: tuple[str, ...] | None
) -> dict[Path, tuple[str, ...] | None]:
    """The files of the tensors in ``only`` (``None``: all), whose shards are known by name."""
    files: dict[Path, tuple[str, ...] | None] = {}
    for file in sorted(set(shards.values())):
        held = tuple(key for key in (only or ()) if shards.get(key) == file)
        if only is None or held:
            files[folder / file] = None if only is None else held
    return files


def _unlisted_shards(folder: Path) -> list[Path]:
    """All shards of a folder that lacks the file which lists them; empty if there are none, or one is missing."""
    found = {match[1]: path for path in folder.glob("*.safetensors") if (match := _SHARD.fullmatch(path.name))}
    count = {_SHARD.fullmatch(path.name)[2] for path in found.values()}  # type: ignore[index]
    complete = len(count) == 1 and len(found) == int(next(iter(count)))
    return sorted(found.values()) if complete else []


def _pickle_refused(path: Path) -> str:
    listed = (folder for folder in path.parents[:2] if (folder / "modules.json").is_file())
    return f"{path} is a pickle, {_ways_out(next(listed, path.parent))}"


def _ways_out(folder: Path | str) -> str:
    return (
        'which torch reads: pip install "millpond[torch]"; or write it as safetensors once, where that is installed: '
        f"millpond convert {folder}"
    )


def _pickled(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a pickled file, by torch's reader, which is imported by its name for no other file."""
    if find_spec("torch") is None:
        raise ModelLoadError(_pickle_refused(path))
    read: dict[str, StoredTensor] = importlib.import_module("millpond.backends.torch.weights").stored_pickle(path)
    return read


def _header(file: BinaryIO) -> tuple[int, dict[str, tuple[str, tuple[int, ...], int]]]:
    """Where the data of a safetensors file begin, and each tensor's type, shape and first byte in the data.

    Raises ValueError unless the tensors lie in the data one after the other, without gaps and up to the file's end.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    begin = 8 + length
    if size < 8 or length > _LONGEST_HEADER or begin > size:
        raise ValueError(f"it has {size} bytes, and its header would end at {begin}")
    header = json.loads(file.read(length))
    if not isinstance(header, dict):
        raise ValueError("its header is no object")
    header.pop("__metadata__", None)
    tensors = {name: _entry(name, entry) for name, entry in header.items()}
    end = 0
    for name, (_, _, first, last) in sorted(tensors.items(), key=lambda item: item[1][2:]):
        if first != end:
            raise ValueError(f"{name} begins at {first}, and the tensor before it ends at {end}")
        end = last
    if begin + end != size:
        raise ValueError(f"its tensors end at {begin + end}, and the file at {size}")
    return begin, {name: (kind, shape, first) for name, (kind, shape, first, _) in tensors.items()}


def _entry(name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """A tensor's type, shape, first byte and end, checked against each other."""
    kind, shape, (first, last) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if not isinstance(kind, str):
        raise ValueError(f"{name} is of type {kind!r}")
    if kind not in _TYPES:
        raise ModelLoadError(
            f"{name} is stored as {kind}, a type of quantized weights that millpond does not read; load the checkpoint "
            "that it was made from"
        )
    if any(type(number) is not int or number < 0 for number in (*shape, first, last)):
        raise ValueError(f"{name} has shape {list(shape)} from {first} to {last}")
    if last - first != prod(shape) * np.dtype(_TYPES[kind][1]).itemsize:
        raise ValueError(f"{name} has {last - first} bytes, which are no {kind} of shape {list(shape)}")
    return kind, shape, first, last


@contextmanager
def damage(path: Path) -> Iterator[None]:
    """What a reader of ``path`` raises as ModelLoadError."""
    try:
        yield
    except ModelLoadError as error:  # it is whole, and cannot be read here
        raise ModelLoadError(f"{path}: {error}") from error
    except Exception as error:  # each reader raises its own class, and any of them means a damaged file
        check_pointer(path)
        raise ModelLoadError(f"{path}: the weight file is damaged: {error}; fetch it again") from error


def find_tensor(names: Iterable[str], name: str) -> str | None:
    """The tensor called ``name``, with or without the prefix of the checkpoint's class; the shortest of several."""
    matches = [key for key in names if key == name or key.endswith("." + name)]
    return min(matches, key=len) if matches else None
