"""Tiny GLiNERs and GLiNER2s: a config, weights, and the tokenizer beside them or in the encoder's folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.numpy import load_file
from tests.tiny.checkpoints import write_checkpoint
from tests.tiny.layouts import save_weights
from tests.tiny.noise import Noise

WIDTH = 32
ADDED = ("[FLERT]", "<<ENT>>", "<<SEP>>")
ADDED2 = ("[SEP_STRUCT]", "[SEP_TEXT]", "[P]", "[C]", "[E]", "[R]", "[L]", "[EXAMPLE]", "[OUTPUT]", "[DESCRIPTION]")
_LEAD = "token_rep_layer.bert_layer.model."


def write_gliner(
    folder: Path,
    family: str = "deberta-v2",
    *,
    span_mode: Literal["markerV0", "marker", "token_level"] = "markerV0",
    hidden_size: int = WIDTH,  # 48: that of the encoder, so that there is no projection
    layers: int = 1,
    own_tokenizer: bool = True,  # as gliner saves today; otherwise as urchade/gliner_*-v2.1
    weights: Literal["safetensors", "bin"] = "safetensors",
    **config: Any,  # fields of gliner_config.json
) -> Path:
    """Write a GLiNER of three added tokens; its encoder's own folder is beside it."""
    base = write_checkpoint(folder.with_name(f"{folder.name}-encoder"), family, tokenizer_limit=None)
    folder.mkdir(parents=True, exist_ok=True)
    stored = json.loads((base / "config.json").read_text(encoding="utf-8"))
    noise, tensors = Noise(3), {}
    for name, tensor in load_file(base / "model.safetensors").items():
        if name.endswith(("word_embeddings.weight", "tok_embeddings.weight")):
            tensor = np.concatenate((tensor, noise.normal(len(ADDED), tensor.shape[1]) * np.float32(0.3)))
        tensors[_LEAD + name] = tensor
    rows = stored["vocab_size"] + len(ADDED)
    content: dict[str, Any] = {
        "model_name": str(base),
        "name": "span level gliner",
        "max_width": 5,
        "hidden_size": hidden_size,
        "dropout": 0.3,
        "fine_tune": True,
        "subtoken_pooling": "first",
        "span_mode": span_mode,
        "max_types": 30,
        "max_len": 24,
        "num_rnn_layers": layers,
        **config,
    }
    if own_tokenizer:
        for path in base.glob("*"):
            if path.name.startswith(("tokenizer", "special_tokens", "vocab", "spm")):
                shutil.copyfile(path, folder / path.name)
        _add_tokens(folder, stored["vocab_size"])
        content |= {"class_token_index": rows - 2, "vocab_size": rows, "encoder_config": {**stored, "vocab_size": rows}}
    (folder / "gliner_config.json").write_text(json.dumps(content, indent=2), encoding="utf-8")
    shapes = _shapes(hidden_size, stored["hidden_size"], layers, span_mode)
    for name, shape in shapes.items():
        scale = 0.2 if len(shape) == 1 else 1.6 / shape[-1] ** 0.5
        if name.startswith("prompt_rep_layer.3"):  # logits of about 3, whose probabilities differ from 0 and 1
            scale *= 0.15
        tensors[name] = noise.normal(*shape) * np.float32(scale)
        if name == "scorer.out_mlp.3.bias":  # some words begin an entity, go on with one and end it
            tensors[name] += np.float32(1)
    save_weights(tensors, folder, weights)
    return folder


def write_gliner2(
    folder: Path,
    family: str = "deberta-v2",
    *,
    counting: Literal["count_lstm", "count_lstm_v2"] = "count_lstm",
    structures: float = 3.0,  # how surely a text has any
    **config: Any,  # fields of config.json
) -> Path:
    """Write a GLiNER2, whose encoder's config.json has a folder of its own."""
    base = write_checkpoint(folder.with_name(f"{folder.name}-encoder"), family, tokenizer_limit=None)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "encoder_config").mkdir()
    stored = json.loads((base / "config.json").read_text(encoding="utf-8"))
    noise, tensors, rows = Noise(3), {}, stored["vocab_size"] + len(ADDED2)
    for name, tensor in load_file(base / "model.safetensors").items():
        if name.endswith(("word_embeddings.weight", "tok_embeddings.weight")):
            tensor = np.concatenate((tensor, noise.normal(len(ADDED2), tensor.shape[1]) * np.float32(0.3)))
        if not name.endswith("position_ids"):
            tensors[f"encoder.{name}"] = tensor
    for path in base.glob("*"):
        if path.name.startswith(("tokenizer", "special_tokens", "vocab", "spm")):
            shutil.copyfile(path, folder / path.name)
    _add_tokens(folder, stored["vocab_size"], ADDED2)
    encoder = {**stored, "vocab_size": rows}
    (folder / "encoder_config" / "config.json").write_text(json.dumps(encoder, indent=2), encoding="utf-8")
    content = {
        "model_type": "extractor",
        "model_name": str(base),
        "counting_layer": counting,
        "max_width": 5,
        "token_pooling": "first",
        **config,
    }
    (folder / "config.json").write_text(json.dumps(content, indent=2), encoding="utf-8")
    for name, shape in _shapes2(stored["hidden_size"], counting).items():
        scale = 0.2 if len(shape) == 1 else 1.6 / shape[-1] ** 0.5
        if name.startswith("span_rep.span_rep_layer.out_project.3"):
            scale *= 0.05
        tensors[name] = noise.normal(*shape) * np.float32(scale)
        if "norm" in name and name.endswith("weight"):
            tensors[name] += np.float32(1)
    tensors["count_pred.2.bias"][1:] += np.float32(structures)
    save_weights(tensors, folder)
    return folder


def _shapes2(width: int, counting: str) -> dict[str, tuple[int, ...]]:
    """The head's tensors, as gliner2's classes have them."""
    shapes: dict[str, tuple[int, ...]] = {}

    def linear(name: str, out: int, into: int) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (out, into), (out,)

    for part, into in (("project_start", width), ("project_end", width), ("out_project", 2 * width)):
        linear(f"span_rep.span_rep_layer.{part}.0", 4 * width, into)
        linear(f"span_rep.span_rep_layer.{part}.3", width, 4 * width)
    for head, out in (("classifier", 1), ("count_pred", 20)):
        linear(f"{head}.0", 2 * width, width)
        linear(f"{head}.2", out, 2 * width)
    shapes["count_embed.pos_embedding.weight"] = (20, width)
    for kind in ("ih", "hh"):
        shapes[f"count_embed.gru.weight_{kind}_l0"] = (3 * width, width)
        shapes[f"count_embed.gru.bias_{kind}_l0"] = (3 * width,)
    if counting == "count_lstm":
        linear("count_embed.projector.0", 4 * width, 2 * width)
        linear("count_embed.projector.2", width, 4 * width)
        return shapes
    lead = "count_embed.transformer"
    linear(f"{lead}.in_projector", 128, width)
    for i in range(2):
        layer = f"{lead}.transformer.layers.{i}"
        shapes[f"{layer}.self_attn.in_proj_weight"], shapes[f"{layer}.self_attn.in_proj_bias"] = (384, 128), (384,)
        linear(f"{layer}.self_attn.out_proj", 128, 128)
        linear(f"{layer}.linear1", 256, 128)
        linear(f"{layer}.linear2", 128, 256)
        for norm in ("norm1", "norm2"):
            shapes[f"{layer}.{norm}.weight"], shapes[f"{layer}.{norm}.bias"] = (128,), (128,)
    for i, (out, into) in enumerate(((width, 128 + width), (width, width), (width, width))):
        linear(f"{lead}.out_projector.{2 * i}", out, into)
    return shapes


def _add_tokens(folder: Path, size: int, tokens: Sequence[str] = ADDED) -> None:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content["added_tokens"] += [
        {"id": size + i, "content": token, **flags, "special": True} for i, token in enumerate(tokens)
    ]
    path.write_text(json.dumps(content), encoding="utf-8")


def _shapes(width: int, encoder: int, layers: int, span_mode: str) -> dict[str, tuple[int, ...]]:
    """The head's tensors, as gliner's classes have them."""
    shapes: dict[str, tuple[int, ...]] = {}

    def linear(name: str, out: int, into: int) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (out, into), (out,)

    if encoder != width:
        linear("token_rep_layer.projection", width, encoder)
    for layer in range(layers):
        for suffix in ("", "_reverse"):
            for kind, into in (("ih", width), ("hh", width // 2)):
                shapes[f"rnn.lstm.weight_{kind}_l{layer}{suffix}"] = (2 * width, into)
                shapes[f"rnn.lstm.bias_{kind}_l{layer}{suffix}"] = (2 * width,)
    if span_mode == "token_level":
        linear("scorer.proj_token", 2 * width, width)
        linear("scorer.proj_label", 2 * width, width)
        linear("scorer.out_mlp.0", 4 * width, 3 * width)
        linear("scorer.out_mlp.3", 3, 4 * width)
        return shapes
    inner = (2 if span_mode == "marker" else 4) * width
    for part in ("project_start", "project_end"):
        linear(f"span_rep_layer.span_rep_layer.{part}.0", inner, width)
        linear(f"span_rep_layer.span_rep_layer.{part}.3", width, inner)
    if span_mode == "marker":
        linear("span_rep_layer.span_rep_layer.out_project", width, 2 * width)
    else:
        linear("span_rep_layer.span_rep_layer.out_project.0", 4 * width, 2 * width)
        linear("span_rep_layer.span_rep_layer.out_project.3", width, 4 * width)
    linear("prompt_rep_layer.0", 4 * width, width)
    linear("prompt_rep_layer.3", width, 4 * width)
    return shapes
