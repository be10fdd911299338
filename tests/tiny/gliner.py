"""Tiny GLiNERs: gliner_config.json and one weight file, with the tokenizer beside it or in the encoder's folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.numpy import load_file
from tests.tiny.checkpoints import write_checkpoint
from tests.tiny.layouts import save_weights
from tests.tiny.noise import Noise

WIDTH = 32
ADDED = ("[FLERT]", "<<ENT>>", "<<SEP>>")
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


def _add_tokens(folder: Path, size: int) -> None:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content["added_tokens"] += [
        {"id": size + i, "content": token, **flags, "special": True} for i, token in enumerate(ADDED)
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
