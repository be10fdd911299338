"""Activations by their names: transformers' in a config.json, torch.nn's in that of sentence-transformers' Dense."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from millpond.backends.native.heads.kernels import Floats, gelu
from millpond.backends.native.packing.weight_packer import NotSupported

Activation = Callable[[Floats], Floats]  # float32 [n, d] -> [n, d]

_SELU_SCALE, _SELU_ALPHA = np.float32(1.0507009873554805), np.float32(1.6732632423543772)
_RRELU_SLOPE = (1 / 8 + 1 / 3) / 2  # of torch.nn.RReLU outside of training


def _identity(x: Floats) -> Floats:
    return x


def _gelu_tanh(x: Floats) -> Floats:
    inner = np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x * x * x)
    out: Floats = np.float32(0.5) * x * (1 + np.tanh(inner))
    return out


def _relu(x: Floats) -> Floats:
    return np.maximum(x, np.float32(0))


def _sigmoid(x: Floats) -> Floats:
    small = np.exp(-np.abs(x))  # two forms: the exponential of a positive number could overflow
    return np.where(x >= 0, 1 / (1 + small), small / (1 + small))


def _silu(x: Floats) -> Floats:
    return x * _sigmoid(x)


def _softplus(x: Floats) -> Floats:
    return np.maximum(x, np.float32(0)) + np.log1p(np.exp(-np.abs(x)))


def _elu(x: Floats) -> Floats:
    return np.where(x > 0, x, np.expm1(np.minimum(x, np.float32(0))))


def _leaky(slope: float) -> Activation:
    return lambda x: np.where(x > 0, x, x * np.float32(slope))


def _hard_sigmoid(x: Floats) -> Floats:
    out: Floats = np.clip(x / np.float32(6) + np.float32(0.5), np.float32(0), np.float32(1))
    return out


def _clip(low: float, high: float) -> Activation:
    return lambda x: np.clip(x, np.float32(low), np.float32(high))


def _mish(x: Floats) -> Floats:
    out: Floats = x * np.tanh(_softplus(x))
    return out


def _log_softmax(x: Floats) -> Floats:
    below = x - x.max(-1, keepdims=True)
    out: Floats = below - np.log(np.exp(below).sum(-1, keepdims=True))
    return out


def _softmax(x: Floats) -> Floats:
    raised = np.exp(x - x.max(-1, keepdims=True))
    out: Floats = raised / raised.sum(-1, keepdims=True)
    return out


_TRANSFORMERS: dict[str, Activation] = {
    "gelu": gelu,
    "gelu_10": lambda x: np.clip(gelu(x), np.float32(-10), np.float32(10)),
    **dict.fromkeys(
        ("gelu_accurate", "gelu_fast", "gelu_new", "gelu_python_tanh", "gelu_pytorch_tanh"),
        _gelu_tanh,
    ),
    "gelu_python": gelu,
    "hardswish": lambda x: x * _hard_sigmoid(x),
    "leaky_relu": _leaky(0.01),
    "linear": _identity,
    "mish": _mish,
    "prelu": _leaky(0.25),
    "quick_gelu": lambda x: x * _sigmoid(np.float32(1.702) * x),
    "relu": _relu,
    "relu2": lambda x: np.square(_relu(x)),
    "relu6": _clip(0, 6),
    "sigmoid": _sigmoid,
    "silu": _silu,
    "swish": _silu,
    "tanh": np.tanh,
}
# The classes that need no arguments and give as many columns as they take.
_TORCH: dict[str, Activation] = {
    "CELU": _elu,
    "ELU": _elu,
    "GELU": gelu,
    "Hardshrink": lambda x: np.where(np.abs(x) > np.float32(0.5), x, np.float32(0)),
    "Hardsigmoid": _hard_sigmoid,
    "Hardswish": _TRANSFORMERS["hardswish"],
    "Hardtanh": _clip(-1, 1),
    "LeakyReLU": _leaky(0.01),
    "LogSigmoid": lambda x: -_softplus(-x),
    "LogSoftmax": _log_softmax,
    "Mish": _mish,
    "RReLU": _leaky(_RRELU_SLOPE),
    "ReLU": _relu,
    "ReLU6": _clip(0, 6),
    "SELU": lambda x: _SELU_SCALE * np.where(x > 0, x, _SELU_ALPHA * np.expm1(np.minimum(x, np.float32(0)))),
    "SiLU": _silu,
    "Sigmoid": _sigmoid,
    "Softmax": _softmax,
    "Softmin": lambda x: _softmax(-x),
    "Softplus": _softplus,
    "Softshrink": lambda x: x - np.clip(x, np.float32(-0.5), np.float32(0.5)),
    "Softsign": lambda x: x / (1 + np.abs(x)),
    "Tanh": np.tanh,
    "Tanhshrink": lambda x: x - np.tanh(x),
    # What is left of these outside of training.
    **dict.fromkeys(("Identity", "Dropout", "AlphaDropout", "FeatureAlphaDropout"), _identity),
}


def activation_of(name: str) -> Activation:
    """The activation that a config.json names; raises NotSupported if there is none of this name."""
    if name not in _TRANSFORMERS:
        raise NotSupported(f"activation {name!r} of a head")
    return _TRANSFORMERS[name]


def torch_activation_of(dotted: str) -> Activation:
    """The activation of a Dense by the path of its class; raises NotSupported if there is none of this name."""
    name = dotted.rsplit(".", 1)[-1]
    if name not in _TORCH:
        raise NotSupported(f"activation_function {dotted!r} of a Dense")
    return _TORCH[name]
