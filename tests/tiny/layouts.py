"""sentence-transformers' files around a tiny backbone, in the formats of old and new versions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.numpy import save_file
from tests.tiny.noise import Noise

# Pooling modes by their current names, with the booleans that older files (up to 5.x) have instead, in their order.
OLD_MODES = {
    "cls": "pooling_mode_cls_token",
    "mean": "pooling_mode_mean_tokens",
    "max": "pooling_mode_max_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}
_BASE, _OWN = "sentence_transformers.base.modules", "sentence_transformers.sentence_transformer.modules"
_NEW_TYPES = {
    **{name: f"{_BASE}.{name.lower()}.{name}" for name in ("Transformer", "Dense", "Normalize")},
    **{name: f"{_OWN}.{name.lower()}.{name}" for name in ("Pooling", "Dropout")},
    "LayerNorm": f"{_OWN}.layer_norm.LayerNorm",
}


@dataclass(frozen=True, kw_only=True)
class Pooling:
    """Pooling modes by their current names; several are concatenated."""

    modes: tuple[str, ...] = ("mean",)
    include_prompt: bool = True


@dataclass(frozen=True, kw_only=True)
class Dense:
    """A projection; ``activation`` is a class name of ``torch.nn``, or a dotted path."""

    out_features: int
    activation: str = "Tanh"
    bias: bool = True
    residual: bool = False
    stage: Literal["sentence_embedding", "token_embeddings"] = "sentence_embedding"


@dataclass(frozen=True, kw_only=True)
class LayerNorm:
    """A LayerNorm with random weights."""


@dataclass(frozen=True, kw_only=True)
class Normalize:
    """Division by the L2 norm."""


@dataclass(frozen=True, kw_only=True)
class Codes:
    """pplx-embed's own module: whole numbers by tanh."""


@dataclass(frozen=True, kw_only=True)
class Dropout:
    """Has no effect at inference."""


@dataclass(frozen=True, kw_only=True)
class Other:
    """Any other module, by its dotted type, such as one that a loader must refuse."""

    dotted: str
    config: Mapping[str, Any] = field(default_factory=dict)


Module = Pooling | Dense | LayerNorm | Normalize | Codes | Dropout | Other


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A modules.json with the files that it lists."""

    modules: tuple[Module, ...] = (Pooling(),)  # after the Transformer, in order
    style: Literal["old", "new"] = "new"  # up to 4.x (sentence_transformers.models.*, booleans), or 6.x
    weights: Literal["safetensors", "bin"] = "safetensors"
    transformer_folder: str = ""  # or 0_Transformer, as in the first versions
    max_seq_length: int | None = None  # in sentence_bert_config.json (old) or tokenizer_config.json (new)
    do_lower_case: bool = False
    prompts: Mapping[str, str] | None = None  # None leaves the key out
    default_prompt_name: str | None = None
    truncate_dim: int | None = None


def write_layout(root: Path, layout: Layout, *, width: int, seed: int) -> None:
    """Write all files but the backbone's into ``root``; ``width`` is the backbone's hidden size."""
    entries = [_entry(0, layout.transformer_folder, "Transformer", layout.style)]
    for index, module in enumerate(layout.modules, start=1):
        name = module.dotted.rsplit(".", 1)[-1] if isinstance(module, Other) else type(module).__name__
        folder = f"{index}_{name}"
        (root / folder).mkdir()
        dotted = module.dotted if isinstance(module, Other) else None
        dotted = "st_quantize.FlexibleQuantizer" if isinstance(module, Codes) else dotted
        entries.append(_entry(index, folder, name, layout.style, dotted))
        width = _write_module(root / folder, module, layout, width=width, seed=seed + index)
    _dump(root / "modules.json", entries)
    _dump(root / layout.transformer_folder / "sentence_bert_config.json", _transformer_settings(layout))
    _dump(root / "config_sentence_transformers.json", _settings(layout))


def _entry(index: int, path: str, name: str, style: str, dotted: str | None = None) -> dict[str, Any]:
    module_type = dotted or (_NEW_TYPES[name] if style == "new" else f"sentence_transformers.models.{name}")
    return {"idx": index, "name": str(index), "path": path, "type": module_type}


def _write_module(folder: Path, module: Module, layout: Layout, *, width: int, seed: int) -> int:
    """Write one module whose input has ``width`` columns; returns the width of its output."""
    if isinstance(module, Pooling):
        _dump(folder / "config.json", _pooling_config(module, width, layout.style))
        return width * len(module.modes)
    if isinstance(module, Dense):
        _dump(folder / "config.json", _dense_config(module, width, layout.style))
        shapes = {"linear.weight": (module.out_features, width)}
        if module.bias:
            shapes["linear.bias"] = (module.out_features,)
        if module.residual and module.out_features != width:
            shapes["residual.weight"] = (module.out_features, width)
        _write_weights(folder, shapes, layout.weights, seed)
        return module.out_features
    if isinstance(module, LayerNorm):
        _dump(folder / "config.json", {"dimension": width})
        _write_weights(folder, {"norm.weight": (width,), "norm.bias": (width,)}, layout.weights, seed)
    elif isinstance(module, Dropout):
        _dump(folder / "config.json", {"dropout": 0.5})
    elif isinstance(module, Other):
        _dump(folder / "config.json", dict(module.config))
    elif layout.style == "new":
        _dump(folder / "config.json", dict.fromkeys(("module_input_name", "module_output_name"), "sentence_embedding"))
    return width


def _pooling_config(module: Pooling, width: int, style: str) -> dict[str, Any]:
    prompt = {"include_prompt": module.include_prompt}
    if style == "new":
        mode = module.modes[0] if len(module.modes) == 1 else list(module.modes)
        return {"embedding_dimension": width, "pooling_mode": mode, **prompt}
    flags = {key: mode in module.modes for mode, key in OLD_MODES.items()}
    return {"word_embedding_dimension": width, **flags, **prompt}


def _dense_config(module: Dense, width: int, style: str) -> dict[str, Any]:
    activation = module.activation
    if "." not in activation:
        module_name = "linear" if activation == "Identity" else "activation"
        activation = f"torch.nn.modules.{module_name}.{activation}"
    config: dict[str, Any] = {
        "in_features": width,
        "out_features": module.out_features,
        "bias": module.bias,
        "activation_function": activation,
    }
    if style == "new":
        config |= {"module_input_name": module.stage, "module_output_name": module.stage}
    return config | ({"use_residual": True} if module.residual else {})


def _transformer_settings(layout: Layout) -> dict[str, Any]:
    lower = {"do_lower_case": True} if layout.do_lower_case else {}
    if layout.style == "old":
        return {"max_seq_length": layout.max_seq_length, "do_lower_case": layout.do_lower_case}
    return {
        "transformer_task": "feature-extraction",
        "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
        "module_output_name": "token_embeddings",
        **lower,
    }


def _settings(layout: Layout) -> dict[str, Any]:
    if layout.style == "old":
        settings: dict[str, Any] = {
            "__version__": {"sentence_transformers": "2.2.2", "transformers": "4.30.2", "pytorch": "2.0.1"}
        }
    else:
        settings = {
            "__version__": {"sentence_transformers": "6.2.0", "transformers": "5.23.0", "pytorch": "2.13.0"},
            "model_type": "SentenceTransformer",
            "similarity_fn_name": "cosine",
        }
    if layout.prompts is not None:
        settings |= {"prompts": dict(layout.prompts), "default_prompt_name": layout.default_prompt_name}
    return settings | ({} if layout.truncate_dim is None else {"truncate_dim": layout.truncate_dim})


def _write_weights(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], kind: Literal["safetensors", "bin"], seed: int
) -> None:
    noise = Noise(seed)
    tensors = {}
    for name, shape in shapes.items():
        numbers = noise.normal(*shape)
        scaled = numbers / np.float32(shape[-1] ** 0.5) if len(shape) > 1 else numbers * np.float32(0.3)
        tensors[name] = scaled + np.float32(name == "norm.weight")
    save_weights(tensors, folder, kind)


def save_weights(tensors: Mapping[str, Any], folder: Path, kind: Literal["safetensors", "bin"] = "safetensors") -> None:
    """Replace the weights in ``folder``: arrays, or torch's tensors; ``bin`` needs torch."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        (folder / name).unlink(missing_ok=True)
    if kind == "bin":
        save_pickle(tensors, folder / "pytorch_model.bin")
        return
    arrays = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})


def save_pickle(tensors: Mapping[str, Any], path: Path) -> None:
    """Write tensors as torch does."""
    import torch

    torch.save({name: torch.as_tensor(tensor) for name, tensor in tensors.items()}, path)


def _dump(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")
