"""Activations by their names: transformers' in a config.json, torch.nn's in that of sentence-transformers' Dense."""

from __future__ import annotations

import numpy as np

from millpond.backends.native.heads.kernels import Floats, gelu
from millpond.backends.native.packing.weight_packer import NotSupported
from millpond.vectors.activations import (
    TORCH,
    Function,
    clip,
    hardswish,
    identity,
    leaky,
    mish,
    relu,
    sigmoid,
    silu,
)


def _gelu_tanh(x: Floats) -> Floats:
    inner = np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x * x * x)
    out: Floats = np.float32(0.5) * x * (1 + np.tanh(inner))
    return out


_TRANSFORMERS: dict[str, Function] = {
    "gelu": gelu,
    "gelu_10": lambda x: np.clip(gelu(x), np.float32(-10), np.float32(10)),
    **dict.fromkeys(
        ("gelu_accurate", "gelu_fast", "gelu_new", "gelu_python_tanh", "gelu_pytorch_tanh"),
        _gelu_tanh,
    ),
    "gelu_python": gelu,
    "hardswish": hardswish,
    "leaky_relu": leaky(0.01),
    "linear": identity,
    "mish": mish,
    "prelu": leaky(0.25),
    "quick_gelu": lambda x: x * sigmoid(np.float32(1.702) * x),
    "relu": relu,
    "relu2": lambda x: np.square(relu(x)),
    "relu6": clip(0, 6),
    "sigmoid": sigmoid,
    "silu": silu,
    "swish": silu,
    "tanh": np.tanh,
}
_TORCH: dict[str, Function] = {**TORCH, "GELU": gelu}


def activation_of(name: str) -> Function:
    """The activation that a config.json names; raises NotSupported if there is none of this name."""
    if name not in _TRANSFORMERS:
        raise NotSupported(f"activation {name!r} of a head")
    return _TRANSFORMERS[name]


def torch_activation_of(dotted: str) -> Function:
    """The activation of a Dense by the path of its class; raises NotSupported if there is none of this name."""
    name = dotted.rsplit(".", 1)[-1]
    if name not in _TORCH:
        raise NotSupported(f"activation_function {dotted!r} of a Dense")
    return _TORCH[name]
