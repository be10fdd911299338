"""What a checkpoint's stored numbers may not be: quantized, since codes mean nothing without their scales, or NaN."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from millpond.checkpoints.weights import stored_tensors
from millpond.errors import ModelLoadError

# `quant_method` of quantization_config, and who writes it.
_METHODS = {
    "gptq": "GPTQ",
    "awq": "AWQ",
    "auto-round": "AutoRound",
    "bitsandbytes": "bitsandbytes",
    "fp8": "FP8",
    "fbgemm_fp8": "FP8",
    "mxfp4": "MXFP4",
    "hqq": "HQQ",
    "quanto": "Quanto",
}
# Ends of names of tensors that only quantized weights have. A longer end comes before one that it contains.
_ENDS = (
    (".qweight", "GPTQ or AWQ"),
    (".SCB", "bitsandbytes"),
    (".quant_state.bitsandbytes__nf4", "bitsandbytes"),
    (".quant_state.bitsandbytes__fp4", "bitsandbytes"),
    (".weight_scale_inv", "FP8"),
    (".weight_scale_2", "NVIDIA's ModelOpt"),
    (".weight_packed", "compressed-tensors"),
    (".weight_scale", "FP8 or compressed-tensors"),
    (".scales", "MLX"),
)
_WAY_OUT = 'load the checkpoint that it was made from, with quantization="int8" if memory is short'


def check_quantization(config: Mapping[str, Any], name: str) -> None:
    """Raise ModelLoadError if config.json says that the weights are quantized."""
    for key in ("quantization_config", "compression_config", "quantization"):
        value = config.get(key)
        if not isinstance(value, Mapping):
            continue
        method = str(value.get("quant_method") or _unnamed(key, config))
        said = _METHODS.get(method, method)
        raise ModelLoadError(
            f"{name} has weights that are quantized by {said} ({key} in config.json), which millpond does not read; "
            f'{_WAY_OUT}; if its weights are whole, pass hf_overrides={{"{key}": None}}'
        )


def _unnamed(key: str, config: Mapping[str, Any]) -> str:
    """The method of a key of config.json that does not name it."""
    if key == "compression_config":  # the former key of this one
        return "compressed-tensors"
    if "quantization" in config:  # MLX writes the number of bits under both keys
        return "MLX"
    fields = config[key]
    return "bitsandbytes" if {"load_in_8bit", "load_in_4bit"} & fields.keys() else "a method without a name"


def check_whole(places: Iterable[Path], name: str) -> None:
    """Raise ModelLoadError if the weights in one of these folders are quantized, whatever config.json says."""
    for place in places:
        tensors = stored_tensors(place) if place.is_dir() else {}
        for end, method in _ENDS:
            mark = next((tensor for tensor in tensors if tensor.endswith(end)), None)
            if mark is not None:
                raise ModelLoadError(
                    f"{name} has weights that are quantized by {method} (it has {mark}), which millpond does not read; "
                    f"{_WAY_OUT}"
                )
        for tensor, stored in tensors.items():
            # GPT-2 and GPT-NeoX keep their causal masks under the name of a bias, in four dimensions.
            read = tensor.endswith(("weight", "gamma", "beta")) or (tensor.endswith("bias") and len(stored.shape) < 3)
            if read and not stored.dtype.startswith(("float16", "float32", "float64", "bfloat16")):
                raise ModelLoadError(
                    f"{name} stores {tensor} as {stored.dtype} and says nowhere by which scales to read it; {_WAY_OUT}"
                )


def why_not_finite(places: Iterable[Path], dtype: str) -> str:
    """Why a model whose weights are in these folders gave a result that is not finite; reads all of them."""
    for place in places:
        for name, stored in (stored_tensors(place) if place.is_dir() else {}).items():
            if not np.isfinite(stored.float32()).all():
                return f"{name} in {place} holds NaN or infinities; fetch the checkpoint again, or ask its authors"
    if dtype == "float32":
        return "its weights are finite, so the model overflows even in float32; are they those of a trained model?"
    better = '"bfloat16" or "float32"' if dtype == "float16" else '"float32"'
    return f"its weights are finite, so the model overflows in {dtype}; load it with dtype={better}"
