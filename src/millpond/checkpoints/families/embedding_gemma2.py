"""EmbeddingGemma 2's text: its config.json inside that of the whole model, whose images and sound are not read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millpond.checkpoints.families.renaming import AnyTensor
from millpond.errors import ModelLoadError, UnsupportedArchitectureError

_LAYERS, _EVERY = 24, 6  # the class's defaults
_OTHER = ("vision_tower.", "embed_vision.", "audio_tower.", "embed_audio.")  # images and sound
_OF_LAYER = ("head_dim", "num_key_value_heads")


def translate(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """config.json of the text; ``hidden_size`` is that of the states, and ``layer_width`` that of the layers."""
    text = config if config.get("model_type") == "embedding_gemma2_text" else config.get("text_config") or {}
    if not isinstance(text, Mapping):
        raise ModelLoadError(f"{name}: text_config is {text!r} in config.json; it must be an object")
    layers, every = int(text.get("num_hidden_layers", _LAYERS)), int(text.get("sliding_window_pattern", _EVERY))
    kinds = list(text.get("layer_types") or ())
    if not kinds:
        kinds = ["full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(layers)]
    kinds[-1] = "full_attention"  # as the class has it, whatever is listed
    return {
        **{key: value for key, value in text.items() if key != "per_layer_config"},
        "model_type": "embedding_gemma2",
        "architectures": config.get("architectures"),
        "hidden_size": text.get("embedding_dim", 768),
        "layer_width": text.get("hidden_size", 512),
        "layer_types": kinds,
        **_sizes(text, kinds, name),
    }


def _sizes(text: Mapping[str, Any], kinds: list[str], name: str) -> dict[str, list[int]]:
    """The columns of a head and the key heads of each layer: those with full attention have others."""
    wide = {
        "head_dim": text.get("global_head_dim", 512),
        "num_key_value_heads": text.get("num_global_key_value_heads", 1),
    }
    plain = {"head_dim": text.get("head_dim", 256), "num_key_value_heads": text.get("num_key_value_heads", 2)}
    given = text.get("per_layer_config")
    if given is None:
        given = {i: wide for i, kind in enumerate(kinds) if kind == "full_attention"}
    own = {str(layer): fields for layer, fields in given.items()}
    unknown = sorted({field for fields in own.values() for field in fields}.difference(_OF_LAYER))
    if unknown or any(not layer.isdecimal() for layer in own):
        raise UnsupportedArchitectureError(
            f"{name}: per_layer_config in config.json has {unknown[0] if unknown else sorted(own)[-1]}; millpond reads "
            f"{' and '.join(_OF_LAYER)} there, by the numbers of layers"
        )
    sizes = [plain | own.get(str(i), {}) for i in range(len(kinds))]
    for layer in sizes:
        for field, size in layer.items():
            if type(size) is not int or size < 1:
                raise ModelLoadError(f"{name}: {field} of a layer is {size!r} in config.json; it must be at least 1")
    return {
        "head_dims": [layer["head_dim"] for layer in sizes],
        "key_heads": [layer["num_key_value_heads"] for layer in sizes],
    }


def rename(tensors: Mapping[str, AnyTensor], config: Mapping[str, Any]) -> dict[str, AnyTensor]:
    """The tensors of the text."""
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(_OTHER)}
