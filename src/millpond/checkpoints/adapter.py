"""PEFT's adapters: a folder with a LoRA only, merged into its base model once, in millpond's cache.

The merged folder has links to the unchanged files of both, and the changed tensors in float32.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from millpond.checkpoints.resolve import Source, read_json_object, resolve
from millpond.checkpoints.stored_tensor import StoredTensor
from millpond.checkpoints.weights import stored_file, stored_tensors, weight_files
from millpond.errors import ModelLoadError
from millpond.support.cache_folder import cache_folder

_VERSION = 1  # of what is written
_CONFIG, _WEIGHTS = "adapter_config.json", ("adapter_model.safetensors", "adapter_model.bin")
_MODELS = ("model.safetensors", "pytorch_model.bin", "model.safetensors.index.json", "pytorch_model.bin.index.json")
_MERGED = "z-merged.safetensors"  # behind the base's files: of two tensors of a name the last counts
_VOCABULARIES = ("tokenizer.json", "vocab.*", "*.model", "*.tiktoken")
_OF_BASE = ("config.json", *_VOCABULARIES, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_OF_TOKENIZER = (*_OF_BASE[1:], "merges.txt", "chat_template.jinja")
# Settings under which an adapter is more than a product of two matrices, and what they are.
_OTHER_SUMS = {
    "use_dora": "DoRA, which scales the rows of the sum",
    "use_qalora": "QA-LoRA, which pools the inputs",
    "lora_bias": "a bias of its own beside the product",
    "target_parameters": "an adapter of parameters that are no layers",
    "layer_replication": "a base model whose layers are repeated",
    "alora_invocation_tokens": "an adapter that a token switches on",
    "trainable_token_indices": "tokens trained apart",
}
_HEADS = ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS")
_PREFIX = "base_model.model."


def merged(source: Source) -> Source:
    """``source``, or the folder of the merged model if it is an adapter of PEFT only.

    Raises:
        ModelLoadError: It is no LoRA, does not fit its base model, or the base model is not at hand.
    """
    folder = source.folder
    if not (folder / _CONFIG).is_file() or any((folder / name).is_file() for name in _MODELS):
        return source
    weights = next((folder / name for name in _WEIGHTS if (folder / name).is_file()), None)
    config = read_json_object(folder / _CONFIG)
    if weights is None:
        raise ModelLoadError(f"{source.name} has {_CONFIG} and no {_WEIGHTS[0]}; fetch it again")
    _check(config, source.name)
    base = _base(config, source)
    place = cache_folder() / "adapters" / _hash(str(folder.resolve()))
    files = sorted(path for path in (*folder.rglob("*"), *base.iterdir()) if path.is_file())
    stats = [(str(path), (stat := path.stat()).st_size, stat.st_mtime_ns, stat.st_ino) for path in files]
    target = place / _hash(json.dumps([_VERSION, stats]))
    if not target.is_dir():
        _write(folder, base, weights, config, target, source.name)
    # Not the hub's revision: the files of the base model decide a vector, too.
    return replace(source, folder=target, revision=None)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _check(config: Mapping[str, Any], name: str) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ModelLoadError(f"{name} is an adapter of type {kind}, and millpond merges LoRA; merge it with peft")
    held = next((key for key in _OTHER_SUMS if config.get(key)), None)
    if held is not None:
        raise ModelLoadError(
            f"{name}: {held} in {_CONFIG} is {_OTHER_SUMS[held]}, and millpond merges plain and rank-stabilized LoRA; "
            "merge it with peft: merge_and_unload(), save_pretrained()"
        )
    if config.get("task_type") in _HEADS:
        raise ModelLoadError(
            f"{name}: an adapter of task_type {config['task_type']} brings a head that its base model lacks; "
            "merge it with peft: merge_and_unload(), save_pretrained()"
        )


def _base(config: Mapping[str, Any], source: Source) -> Path:
    """The folder of the base model's transformer."""
    named = config.get("base_model_name_or_path")
    if not isinstance(named, str) or not named:
        raise ModelLoadError(f"{source.name}: {_CONFIG} names no base_model_name_or_path; write the base model there")
    beside = source.folder / named
    try:
        found = merged(
            resolve(beside if beside.is_dir() else named, None if beside.is_dir() else config.get("revision"))
        )
    except ModelLoadError as error:
        raise ModelLoadError(
            f"{source.name} is an adapter of PEFT, whose base model, {named}, is not at hand ({error}); fetch it, or "
            f"write where it is into base_model_name_or_path of {_CONFIG}"
        ) from error
    places = (found.folder, found.folder / "0_Transformer")
    return next((place for place in places if (place / "config.json").is_file()), found.folder)


def _write(folder: Path, base: Path, weights: Path, config: Mapping[str, Any], target: Path, name: str) -> None:
    """Write the merged folder; those of earlier states of the adapter are removed."""
    tensors = stored_tensors(base)
    shapes = read_json_object(base / "config.json", optional=True)
    changed = dict(_changed(stored_file(weights), tensors, config, shapes, name))
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=target.parent, prefix="part-"))
    try:
        _link_texts(folder, base, part)
        files = list(weight_files(base, None))
        if all(path.suffix == ".safetensors" for path in files):
            held = {key: f"base-{path.name}" for path in files for key in stored_file(path)}
            for path in files:
                (part / f"base-{path.name}").symlink_to(path.resolve())
        else:
            held = {}
            changed = {key: tensor.float32() for key, tensor in tensors.items()} | changed
        save_file(changed, part / _MERGED, {"format": "pt"})
        index = {"metadata": {}, "weight_map": {**held, **dict.fromkeys(changed, _MERGED)}}
        (part / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
        for old in target.parent.iterdir():
            if old not in (part, target) and not old.name.startswith("part-"):
                shutil.rmtree(old, ignore_errors=True)
        part.rename(target)
    except BaseException as error:
        shutil.rmtree(part, ignore_errors=True)
        if isinstance(error, OSError) and target.is_dir():  # another process was faster
            return
        raise


def _link_texts(folder: Path, base: Path, part: Path) -> None:
    """Link everything of the adapter but its weights, and of the base model what the adapter lacks."""
    for path in folder.iterdir():
        if path.name not in (_CONFIG, *_WEIGHTS) and not path.name.startswith("."):
            (part / path.name).symlink_to(path.resolve())
    own = any(True for pattern in _VOCABULARIES for _ in folder.glob(pattern))
    for pattern in ("config.json",) if own else ("config.json", *_OF_TOKENIZER):
        for path in base.glob(pattern):
            if not (part / path.name).exists():
                (part / path.name).symlink_to(path.resolve())


def _changed(
    stored: Mapping[str, StoredTensor],
    base: Mapping[str, StoredTensor],
    config: Mapping[str, Any],
    shapes: Mapping[str, Any],
    name: str,
) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """The base model's tensors that an adapter changes, by their names there."""
    for key, tensor in stored.items():
        path = key.removeprefix(_PREFIX)
        kind = next(
            (kind for kind in ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B") if kind in path), None
        )
        if kind is None and ("lora_" in path or "trainable_tokens" in path):
            raise ModelLoadError(f"{name} has the tensor {key}, which is none of a plain LoRA; merge it with peft")
        if kind is None:  # a tensor trained whole
            yield _find(path, base, name), np.ascontiguousarray(tensor.float32())
        if kind not in ("lora_A", "lora_embedding_A"):
            continue
        layer = path[: path.index(f".{kind}")]
        other = stored.get(key.replace(kind, kind[:-1] + "B"))
        if other is None:
            raise ModelLoadError(f"{name} has the tensor {key} without its lora_B; fetch it again")
        target = _find(f"{layer}.weight", base, name)
        weight = base[target].float32()
        product = other.float32() @ tensor.float32()
        turned = kind == "lora_embedding_A" or config.get("fan_in_fan_out") or shapes.get("model_type") == "gpt2"
        product = product.T if turned else product
        if product.shape != weight.shape:
            raise ModelLoadError(
                f"{name}: its product for {layer} has shape {list(product.shape)}, and the base model's tensor "
                f"{list(weight.shape)}; is base_model_name_or_path the model that it was trained on?"
            )
        yield target, np.ascontiguousarray(weight + np.float32(_scale(layer, config, len(tensor.float32()))) * product)


def _scale(layer: str, config: Mapping[str, Any], rank: int) -> float:
    """What a layer's product is multiplied by: alpha over its rank, or over the root of that."""
    patterns = config.get("alpha_pattern") or {}
    alpha = next(
        (value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", layer)), config.get("lora_alpha", 8)
    )
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _find(path: str, base: Mapping[str, StoredTensor], name: str) -> str:
    """The base model's tensor that an adapter calls ``path``: their classes' prefixes may differ."""
    found = [key for key in base if key == path or key.endswith(f".{path}") or path.endswith(f".{key}")]
    if path in found:
        return path
    if len(found) != 1:
        raise ModelLoadError(
            f"{name} changes {path}, and its base model has {'no such tensor' if not found else ' and '.join(found)}; "
            "merge it with peft: merge_and_unload(), save_pretrained()"
        )
    return found[0]
