"""A folder's tensors: safetensors or the older pickled files, whole or in shards, read without running code."""

from __future__ import annotations

import logging
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millpond.checkpoints.resolve import Source, read_json_object
from millpond.errors import ModelLoadError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_SAFE, _PICKLED = "model.safetensors", "pytorch_model.bin"
_RUNTIME = "name the folder or hub id of the checkpoint that it was exported from"
_CONVERT = "convert it to model.safetensors with the library that wrote it, or name a repository that has one"
# What repositories have in place of weights that are read here: patterns, the format, and what to do about it.
_FOREIGN = (
    (("*.gguf",), "GGUF", _RUNTIME),
    (("*.onnx", "*.onnx_data"), "ONNX", _RUNTIME),
    (("openvino_*.xml", "openvino_*.bin"), "OpenVINO", _RUNTIME),
    (("*.mlmodel", "*.mlpackage", "*.engine", "*.tflite"), "an export for another runtime", _RUNTIME),
    (("tf_model*.h5", "*.ckpt.index"), "TensorFlow", _CONVERT),
    (("flax_model*.msgpack",), "Flax", _CONVERT),
    (("rust_model.ot",), "rust-bert", _CONVERT),
    (("*.pt", "*.pth", "*.pkl", "*.ckpt", "*.pickle"), "a pickle of unknown content", _CONVERT),
)
_POINTER = b"version https://git-lfs"
_POINTER_FILES = ("*.safetensors", "*.bin", "tokenizer.json", "*.model", "vocab.*")


def check_weights(folder: Path, source: Source) -> None:
    """Raise ModelLoadError unless ``folder``, that of the backbone in ``source``, has weights that are read here."""
    root = source.folder
    for path in (path for name in _POINTER_FILES for path in sorted((*root.glob(name), *root.glob(f"*/{name}")))):
        if path.is_file() and path.stat().st_size < 1024 and path.read_bytes().startswith(_POINTER):
            raise ModelLoadError(
                f"{path} is a pointer of git-lfs, not the file; run `git lfs install` and `git lfs pull` in {root}"
            )
    if any((folder / f"{name}{end}").is_file() for name in (_SAFE, _PICKLED) for end in ("", ".index.json")):
        _files(folder, None)  # raises if a shard is missing
        return
    raise ModelLoadError(f"{source.name} has {_found(source)}")


def _found(source: Source) -> str:
    """What a checkpoint without readable weights has instead, and what to do."""
    adapter = read_json_object(source.folder / "adapter_config.json", optional=True)
    missing = f"neither {_SAFE} nor {_PICKLED}"
    if adapter:
        return (
            f"an adapter of PEFT only (adapter_config.json), and {missing}; merge it into its base model, "
            f"{adapter.get('base_model_name_or_path', 'which it does not name')}: merge_and_unload(), save_pretrained()"
        )
    names = [*_local_files(source.folder), *_hub_files(source)]
    for patterns, form, way_out in _FOREIGN:
        held = [name for name in names if any(fnmatch(Path(name).name, pattern) for pattern in patterns)]
        if held:
            return f"weights as {form} only ({held[0]}), and {missing}, which are read here; {way_out}"
    stray = [name for name in names if name.endswith((".safetensors", ".bin"))]
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
