"""Tiny GGUF files, with the names of llama.cpp's converter as the library gguf has them, and their source's folder."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.numpy import load_file
from tests.tiny.checkpoints import write_checkpoint
from tests.tiny.layouts import Dense, Layout, Normalize, Pooling, save_weights
from tests.tiny.noise import Noise

Kind = Literal["F32", "F16", "BF16", "Q8_0", "Q4_K", "Q6_K"]
_ARCHITECTURES = {"bert": "bert", "nomic": "nomic-bert", "qwen3": "qwen3", "gemma3": "gemma-embedding"}
_POOLING = {"mean": 1, "cls": 2, "lasttoken": 3}
# Fields that the metadata do not have, as all checkpoints have them.
_GEMMA = {
    "use_bidirectional_attention": True,
    "rope_local_base_freq": 10000.0,
    "_sliding_window_pattern": 6,
    "layer_types": None,
    "num_hidden_layers": 6,
    "query_pre_attn_scalar": 64,
    "head_dim": 64,
}
WIDTH = 256  # a block of Q4_K


def write_gguf(
    path: Path,
    family: str = "bert",
    *,
    kind: Kind = "F16",
    pooling: Literal["mean", "cls", "lasttoken"] = "mean",
    lowercase: bool = False,
    **metadata: Any,  # keys that are left out (None) or replaced
) -> Path:
    """Write a GGUF file, and beside it ``source``: a folder with the same, dequantized weights."""
    gemma = family == "gemma3"
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_attention_heads": 4}
    names = {"hidden_size": "n_embd", "intermediate_size": "n_inner", "num_attention_heads": "n_head"}
    if family == "nomic":
        sizes |= {names[key]: value for key, value in sizes.items()} | {"max_trained_positions": 256}
    dense = tuple(Dense(out_features=n * WIDTH, activation="Identity", bias=False) for n in (2, 1)) if gemma else ()
    layout = Layout(modules=(Pooling(modes=(pooling,)), *dense, Normalize()), transformer_folder="")
    path.parent.mkdir(parents=True, exist_ok=True)
    source = write_checkpoint(
        path.with_name("source"),
        family,
        config={**sizes, "head_dim": 64, **(_GEMMA if gemma else {})},
        sentence_transformers=layout,
        tokenizer_limit=None,
        lowercase=lowercase,
    )
    tensors = convert(source, path, family, kind=kind, pooling=pooling, metadata=metadata)
    save_weights(tensors, source)
    return path


def convert(
    source: Path,
    path: Path,
    family: str,
    *,
    kind: Kind = "F16",
    pooling: Literal["mean", "cls", "lasttoken"] = "mean",
    metadata: Mapping[str, Any] | None = None,
) -> dict[str, np.ndarray]:
    """Write the folder ``source`` as a GGUF file; returns its tensors as the file has them, dequantized."""
    import gguf

    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    architecture, gemma = _ARCHITECTURES[family], family == "gemma3"
    writer = gguf.GGUFWriter(path, architecture)
    tensors, noise = load_file(source / "model.safetensors"), Noise(5)
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH_NAMES and _arch(gguf, architecture), 16)
    for name, numbers in tensors.items():
        if name.endswith("position_ids") or name.startswith("pooler."):
            continue
        target = _named(known, name, family)
        if numbers.ndim == 1 or "token_types" in target or "position_embd" in target:
            shift = gemma and "norm" in target
            writer.add_tensor(target, (numbers + np.float32(shift)).astype(np.float32))
            continue
        tensors[name] = _add(gguf, writer, target, numbers, kind, noise)
    for number, module in enumerate(("2_Dense", "3_Dense") if gemma else (), start=2):
        held = load_file(source / module / "model.safetensors")
        held["linear.weight"] = _add(gguf, writer, f"dense_{number}.weight", held["linear.weight"], "F16", noise)
        save_weights(held, source / module)
    keys = _metadata(config, architecture, _POOLING[pooling]) | _vocabulary(source, family)
    for key, value in {**keys, **(metadata or {})}.items():
        _put(gguf, writer, key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def _arch(gguf: Any, name: str) -> Any:
    return next(arch for arch, text in gguf.MODEL_ARCH_NAMES.items() if text == name)


def _named(known: Any, name: str, family: str) -> str:
    name = re.sub(r"^model\.", "", name)
    prefixed = name if family in ("bert", "nomic") else f"model.{name}"
    for candidate in (prefixed, name):
        target = known.get_name(candidate, try_suffixes=(".weight", ".bias"))
        if target is not None:
            return str(target)
    raise KeyError(name)


def _add(gguf: Any, writer: Any, target: str, numbers: np.ndarray, kind: Kind, noise: Noise) -> np.ndarray:
    """Add a tensor, quantized; returns what it is when it is dequantized."""
    type_of = gguf.GGMLQuantizationType[kind]
    if kind in ("Q4_K", "Q6_K"):  # the library reads these only: blocks of our own
        data = _blocks(kind, numbers.shape, noise)
    else:
        data = gguf.quantize(numbers.astype(np.float32), type_of)
    writer.add_tensor(target, data, raw_dtype=type_of)
    return np.ascontiguousarray(gguf.dequantize(data, type_of).reshape(numbers.shape)).astype(np.float32)


def _blocks(kind: Kind, shape: tuple[int, ...], noise: Noise) -> np.ndarray:
    """Blocks of 256 numbers: random codes under scales that give numbers of the usual size."""
    rows, count = shape[0], shape[1] // 256
    size = {"Q4_K": 144, "Q6_K": 210}[kind]
    codes = (np.abs(noise.normal(rows, count, size)) * 1000).astype(np.int64) % 256
    data = codes.astype(np.uint8)
    scale = np.float16(0.0004)
    if kind == "Q4_K":  # d and dmin, 12 bytes of scales, codes
        data[..., :4] = np.array([scale, np.float16(0.003)], dtype="<f2").view(np.uint8)
    else:  # codes, 16 scales, d
        data[..., -2:] = np.array([np.float16(0.00004)], dtype="<f2").view(np.uint8)
    return data.reshape(rows, -1)


def _metadata(config: dict[str, Any], architecture: str, pooling: int) -> dict[str, Any]:
    nomic = architecture == "nomic-bert"
    own = {
        "block_count": config["n_layer" if nomic else "num_hidden_layers"],
        "context_length": config["max_trained_positions" if nomic else "max_position_embeddings"],
        "embedding_length": config["n_embd" if nomic else "hidden_size"],
        "feed_forward_length": config["n_inner" if nomic else "intermediate_size"],
        "attention.head_count": config["n_head" if nomic else "num_attention_heads"],
        "pooling_type": pooling,
    }
    if architecture in ("bert", "nomic-bert"):
        own |= {
            "attention.causal": False,
            "attention.layer_norm_epsilon": float(config["layer_norm_epsilon" if nomic else "layer_norm_eps"]),
        }
    if nomic:
        own["rope.freq_base"] = float(config["rotary_emb_base"])
    if "num_key_value_heads" in config:
        own |= {
            "attention.head_count_kv": config["num_key_value_heads"],
            "attention.key_length": config["head_dim"],
            "attention.value_length": config["head_dim"],
            "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
            "rope.freq_base": float(config["rope_theta"]),
        }
    if config.get("sliding_window"):
        own |= {
            "attention.sliding_window": config["sliding_window"],
            "dense_2_feat_in": WIDTH,
            "dense_2_feat_out": 2 * WIDTH,
            "dense_3_feat_in": 2 * WIDTH,
            "dense_3_feat_out": WIDTH,
        }
    return {f"{architecture}.{key}": value for key, value in own.items()}


def _vocabulary(source: Path, family: str) -> dict[str, Any]:
    """The tokenizer's part of the metadata."""
    content = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    model, special = content["model"], {token["content"] for token in content["added_tokens"]}
    vocabulary = sorted(model["vocab"], key=model["vocab"].get)
    own = {"bert": _wordpiece, "nomic": _wordpiece, "qwen3": _byte_pairs, "gemma3": _sentencepiece}[family]
    types = [_type_of(token, special) for token in vocabulary]
    shared = {"tokens": vocabulary, "token_type": types, "pre": "default"}
    return {f"tokenizer.ggml.{key}": value for key, value in {**shared, **own(vocabulary, special, model)}.items()}


def _type_of(token: str, special: set[str]) -> int:
    if token in special:
        return 2 if token == "<unk>" else 3
    return 6 if re.fullmatch(r"<0x[0-9A-F]{2}>", token) else 1


def _wordpiece(vocabulary: list[str], special: set[str], model: dict[str, Any]) -> dict[str, Any]:
    pieces = {token: token[2:] if token.startswith("##") else f"\u2581{token}" for token in vocabulary}
    tokens = [token if token in special else pieces[token] for token in vocabulary]
    roles = {"cls": "[CLS]", "bos": "[CLS]", "eos": "[SEP]", "seperator": "[SEP]"}
    roles |= {"unknown": "[UNK]", "padding": "[PAD]", "mask": "[MASK]"}
    ids = {f"{role}_token_id": vocabulary.index(token) for role, token in roles.items()}
    return {"model": "bert", "tokens": tokens, "token_type_count": 2, **ids}


def _byte_pairs(vocabulary: list[str], special: set[str], model: dict[str, Any]) -> dict[str, Any]:
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]]
    ids = dict.fromkeys(("eos_token_id", "padding_token_id", "bos_token_id"), 0)
    return {"model": "gpt2", "pre": "qwen2", "merges": merges, "add_bos_token": False, "add_eos_token": True, **ids}


def _sentencepiece(vocabulary: list[str], special: set[str], model: dict[str, Any]) -> dict[str, Any]:
    roles = {"bos": "<bos>", "eos": "<eos>", "padding": "<pad>", "unknown": "<unk>"}
    return {
        "model": "llama",
        "scores": [-float(i) for i in range(len(vocabulary))],
        "add_bos_token": True,
        "add_eos_token": False,
        "add_space_prefix": False,
        **{f"{role}_token_id": vocabulary.index(token) for role, token in roles.items()},
    }


def _put(gguf: Any, writer: Any, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
