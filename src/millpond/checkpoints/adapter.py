"""Adapters that are merged into their base model once, in millpond's cache: folders of PEFT, and jina-embeddings-v5's.

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

from millpond.checkpoints.resolve import Source, read_json, read_json_object, resolve
from millpond.checkpoints.stored_tensor import StoredTensor
from millpond.checkpoints.weights import stored_file, stored_tensors, weight_files
from millpond.errors import ModelLoadError
from millpond.support.cache_folder import cache_folder

_VERSION = 2  # of what is written
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


# jina-embeddings-v5: the class that its config.json names, its task by default, transformers' class by family, and
# what the module of its own code does, in sentence-transformers' modules.
_BY_TASK, _TASK = "JinaEmbeddingsV5Model", "retrieval"
_CLASSES = {"qwen3": "Qwen3Model", "eurobert": "EuroBertModel"}
_OWN_MODULE, _TRANSFORMER = "custom_st.Transformer", "sentence_transformers.models.Transformer"
_MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": _TRANSFORMER},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]


def merged(source: Source, overrides: Mapping[str, Any] | None = None, cache: Path | None = None) -> Source:
    """``source``, or the folder of the merged model if it is an adapter of PEFT only, or has one for each task.

    ``overrides``: those of config.json, of which ``jina_task`` names the task. ``cache``: where merged folders are;
    ``None``: in millpond's cache.

    Raises:
        ModelLoadError: It is no LoRA, does not fit its base model, or the base model is not at hand.
    """
    folder, cache = source.folder, cache or cache_folder()
    if (folder / "adapters").is_dir() and (folder / "config.json").is_file():
        return _of_task(source, str((overrides or {}).get("jina_task") or _TASK), cache)
    if not (folder / _CONFIG).is_file() or any((folder / name).is_file() for name in _MODELS):
        return source
    weights = next((folder / name for name in _WEIGHTS if (folder / name).is_file()), None)
    config = read_json_object(folder / _CONFIG)
    if weights is None:
        raise ModelLoadError(f"{source.name} has {_CONFIG} and no {_WEIGHTS[0]}; fetch it again")
    _check(config, source.name)
    base = _base(config, source)
    target = _place(folder, base, cache)
    if not target.is_dir():
        _write(folder, base, weights, config, target, source.name, {})
    # Not the hub's revision: the files of the base model decide a vector, too.
    return replace(source, folder=target, revision=None)


def _of_task(source: Source, task: str, cache: Path) -> Source:
    """A model of jina-embeddings-v5 with the adapter of a task; another model is ``source``."""
    folder = source.folder
    config = read_json_object(folder / "config.json")
    family = _family(config)
    if config.get("architectures") != [_BY_TASK] or family is None:
        return source
    tasks = sorted(path.parent.name for path in (folder / "adapters").glob(f"*/{_CONFIG}"))
    if task not in tasks:
        raise ModelLoadError(
            f"{source.name} has no adapter for {task!r}; choose {', '.join(tasks)} by hf_overrides={{'jina_task': ...}}"
        )
    chosen = folder / "adapters" / task
    adapter = read_json_object(chosen / _CONFIG)
    _check(adapter, source.name)
    target = _place(chosen, folder, cache)
    if not target.is_dir():
        own = {key: value for key, value in config.items() if key != "auto_map"}
        named = {"model_type": family, "architectures": [_CLASSES[family]]}
        written = {"config.json": own | named, **_modules(folder / "modules.json")}
        _write(folder, folder, chosen / _WEIGHTS[0], adapter, target, source.name, written)
    return replace(source, folder=target, revision=None)


def _family(config: Mapping[str, Any]) -> str | None:
    """The family behind jina-embeddings-v5's config.json, whose ``model_type`` the small and the nano model share."""
    kind = config.get("model_type")
    if kind == "jina_embeddings_v5":
        return "eurobert" if config.get("is_decoder") is False else "qwen3"
    return kind if kind in _CLASSES else None


def _modules(listed: Path) -> dict[str, Any]:
    """modules.json, and a module's config, in place of the one that lists jina-embeddings-v5's own.

    Alone that module also pools the last token and normalizes.
    """
    entries = read_json(listed) if listed.is_file() else [{"type": _OWN_MODULE}]
    if isinstance(entries, list) and len(entries) == 1 and entries[0].get("type") == _OWN_MODULE:
        return {"modules.json": _MODULES, "1_Pooling/config.json": {"pooling_mode_lasttoken": True}}
    return {"modules.json": json.loads(json.dumps(entries).replace(f'"{_OWN_MODULE}"', f'"{_TRANSFORMER}"'))}


def _place(folder: Path, base: Path, cache: Path) -> Path:
    """Where the merged folder of an adapter is, for the state that its files and the base model's are in."""
    files = sorted(path for path in (*folder.rglob("*"), *base.iterdir()) if path.is_file())
    stats = [(str(path), (stat := path.stat()).st_size, stat.st_mtime_ns, stat.st_ino) for path in files]
    return cache / "adapters" / _hash(str(folder.resolve())) / _hash(json.dumps([_VERSION, stats]))


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


def _write(
    folder: Path,
    base: Path,
    weights: Path,
    config: Mapping[str, Any],
    target: Path,
    name: str,
    written: Mapping[str, Any],  # files that are not linked, with their content
) -> None:
    """Write the merged folder; those of earlier states of the adapter are removed."""
    tensors = stored_tensors(base)
    shapes = read_json_object(base / "config.json", optional=True)
    changed = dict(_changed(stored_file(weights), tensors, config, shapes, name))
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=target.parent, prefix="part-"))
    try:
        for file, content in written.items():
            (part / file).parent.mkdir(exist_ok=True)
            (part / file).write_text(json.dumps(content), encoding="utf-8")
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
        weights = path.name in (_CONFIG, "adapters", *_MODELS) or path.suffix in (".safetensors", ".bin")
        if not weights and not path.name.startswith(".") and not (part / path.name).exists():
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
        path = key.removeprefix(_PREFIX).replace(".base_layer.", ".")
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
