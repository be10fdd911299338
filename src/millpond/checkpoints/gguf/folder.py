"""A GGUF file as a folder in millpond's cache: config.json, tokenizer and modules, and a link to the file for weights.

The folder is small: tensors are dequantized from the file itself when a model is loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from millpond.checkpoints.gguf.file import GgufFile, read_gguf
from millpond.checkpoints.gguf.tensors import LINK, mapped, write_places
from millpond.checkpoints.gguf.vocabulary import write_vocabulary
from millpond.errors import ModelLoadError, UnsupportedArchitectureError
from millpond.support.cache_folder import cache_folder

_VERSION = 2  # of what is written
# What llama.cpp pools by: its numbers, and sentence-transformers' names.
_POOLING = {1: "mean", 2: "cls", 3: "lasttoken"}
_MODES = {"mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token", "lasttoken": "pooling_mode_lasttoken"}

# What llama.cpp takes where a key is absent.
_DEFAULTS: Mapping[str, Callable[[GgufFile], Any]] = {
    "attention.head_count_kv": lambda file: file.get("attention.head_count"),
    "attention.key_length": lambda file: file.get("embedding_length") // file.get("attention.head_count"),
    "rope.freq_base": lambda file: 10_000.0,
}


def as_folder(path: Path) -> Path:
    """The folder of a GGUF file, written if it is not there yet.

    Raises:
        MissingExtraError: The library gguf is not installed.
        ModelLoadError: The file is damaged, or of a kind that is not read here.
    """
    status, place = path.stat(), path.resolve()
    key = f"{_VERSION} {place} {status.st_size} {status.st_mtime_ns} {status.st_ino}"
    folder = cache_folder() / "gguf" / hashlib.sha256(key.encode()).hexdigest()[:32]
    if folder.is_dir():
        return folder
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=folder.parent, prefix="part-"))
    try:
        _write(read_gguf(place), part)
        (part / LINK).symlink_to(place)
        part.rename(folder)
    except BaseException as error:
        shutil.rmtree(part, ignore_errors=True)
        if isinstance(error, OSError) and folder.is_dir():  # another process was faster
            return folder
        raise
    return folder


def _write(file: GgufFile, folder: Path) -> None:
    places, config = file.backbone(), _config(file)
    write_places(folder, places)
    width, limit = int(file.get("embedding_length")), int(file.get("context_length", 512))
    _dump(folder / "config.json", config)
    write_vocabulary(file, folder, limit=limit)
    modules: list[tuple[str, str]] = [("", "Transformer"), ("1_Pooling", "Pooling")]
    (folder / "1_Pooling").mkdir()
    mode = _MODES[_pooling(file)]
    _dump(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": width, mode: True})
    for number, name in enumerate(file.row.dense, start=2):
        weight = _dense(file, name)
        place = f"{number}_Dense"
        (folder / place).mkdir()
        save_file({"linear.weight": weight}, folder / place / "model.safetensors")
        sizes = {"in_features": weight.shape[1], "out_features": weight.shape[0], "bias": False}
        _dump(folder / place / "config.json", {**sizes, "activation_function": "torch.nn.modules.linear.Identity"})
        modules.append((place, "Dense"))
    modules.append((f"{len(modules)}_Normalize", "Normalize"))
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(modules)
    ]
    (folder / modules[-1][0]).mkdir()
    _dump(folder / "modules.json", listed)
    _dump(folder / "sentence_bert_config.json", {"max_seq_length": limit, "do_lower_case": False})


def _config(file: GgufFile) -> dict[str, Any]:
    """config.json of the source, as far as the arithmetic goes."""
    row, config = file.row, dict(file.row.config)
    types = file.places.get("token_types.weight")
    for name, key in row.fields.items():
        value = file.get(key, row.defaults.get(name))
        if value is None and key in _DEFAULTS:
            value = _DEFAULTS[key](file)
        if value is None:
            raise ModelLoadError(
                f"{file.path} has no {file.name}.{key}, which config.json's {name} is made from; convert it again, or "
                "name the checkpoint that it was converted from"
            )
        config[name] = value
    if "token_embd.weight" not in file.places:
        raise ModelLoadError(f"{file.path} has no tensor token_embd.weight; fetch it again")
    config["vocab_size"] = file.places["token_embd.weight"].shape[0]
    if types is not None:
        config["type_vocab_size"] = types.shape[0]
    causal = file.get("attention.causal")
    if causal is not None and bool(causal) != row.causal:
        if not row.causal:
            raise UnsupportedArchitectureError(
                f"{file.path} is a causal {file.name} ({file.name}.attention.causal), which millpond does not run; "
                "name the checkpoint that it was converted from"
            )
        config["is_causal"] = False
    if file.metadata.get("split.count", 1) > 1:
        raise ModelLoadError(
            f"{file.path} is one of {file.metadata['split.count']} parts of a model; join them once with llama.cpp's "
            "llama-gguf-split --merge"
        )
    if file.get("rope.scaling.type") not in (None, "none"):
        raise UnsupportedArchitectureError(
            f"{file.path} scales its rotary positions ({file.name}.rope.scaling.type), which millpond does not read "
            "from GGUF; name the checkpoint that it was converted from"
        )
    return config


def _pooling(file: GgufFile) -> str:
    number = file.get("pooling_type")
    name = _POOLING.get(number, file.row.pooling if number in (None, 0) else None)
    if name is None:
        raise UnsupportedArchitectureError(
            f"{file.path} has {file.name}.pooling_type {number}; millpond reads embedders, with mean (1), first (2) or "
            "last (3) token pooling: name the checkpoint that it was converted from"
        )
    return name


def _dense(file: GgufFile, name: str) -> Any:
    place = file.places.get(f"{name}.weight")
    if place is None:
        raise UnsupportedArchitectureError(
            f"{file.path} lacks {name}.weight, a layer that the vectors of {file.name} go through; convert it again "
            "with convert_hf_to_gguf.py --sentence-transformers-dense-modules"
        )
    return np.ascontiguousarray(mapped(file.path, {name: place})[name].float32())


def _dump(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1, default=_plain), encoding="utf-8")
    os.chmod(path, 0o600)


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else str(value)
