"""Activations: what becomes of logits on the host, when a call's result is assembled: callers of one batch differ.

A caller chooses among three; a checkpoint of sentence-transformers may name any class of ``torch.nn``.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from millpond.tasks import Activation

Logits = npt.NDArray[np.float32]
Function = Callable[[Logits], Logits]  # float32 [n, d] -> [n, d]

_SELU_SCALE, _SELU_ALPHA = np.float32(1.0507009873554805), np.float32(1.6732632423543772)
_RRELU_SLOPE = (1 / 8 + 1 / 3) / 2  # of torch.nn.RReLU outside of training


def activate(logits: Logits, activation: str) -> Logits:  # [n, labels] -> [n, labels]
    """Apply ``activation`` to each row: ``identity``, ``sigmoid``, ``softmax`` or a name of :data:`TORCH`."""
    if activation == "identity":
        return logits
    if activation == "sigmoid":
        return sigmoid(logits).astype(np.float32)
    if logits.shape[-1] == 0:
        return logits
    function = softmax if activation == "softmax" else TORCH[activation]
    return function(logits).astype(np.float32)


def by_width(columns: int) -> Activation:
    """Default of a classifier whose checkpoint names none: sigmoid of one logit, softmax of several."""
    return "sigmoid" if columns == 1 else "softmax"


def identity(x: Logits) -> Logits:
    """``x``."""
    return x


def relu(x: Logits) -> Logits:
    """``max(x, 0)``."""
    return np.maximum(x, np.float32(0))


def sigmoid(x: Logits) -> Logits:
    """``1 / (1 + exp(-x))``."""
    small = np.exp(-np.abs(x))  # two forms: the exponential of a positive number could overflow
    return np.where(x >= 0, 1 / (1 + small), small / (1 + small))


def silu(x: Logits) -> Logits:
    """``x sigmoid(x)``."""
    return x * sigmoid(x)


def hardswish(x: Logits) -> Logits:
    """``x`` times the sigmoid's straight line."""
    return x * _hard_sigmoid(x)


def mish(x: Logits) -> Logits:
    """``x tanh(softplus(x))``."""
    out: Logits = x * np.tanh(_softplus(x))
    return out


def softmax(x: Logits) -> Logits:
    """The exponentials of a row, over their sum."""
    raised = np.exp(x - x.max(-1, keepdims=True))
    out: Logits = raised / raised.sum(-1, keepdims=True)
    return out


def leaky(slope: float) -> Function:
    """``x``, or ``slope x`` where it is negative."""
    return lambda x: np.where(x > 0, x, x * np.float32(slope))


def clip(low: float, high: float) -> Function:
    """``x`` between two bounds."""
    return lambda x: np.clip(x, np.float32(low), np.float32(high))


def _gelu(x: Logits) -> Logits:
    phi = [0.5 * math.erfc(-number / math.sqrt(2)) for number in x.ravel().tolist()]  # of logits, which are few
    return x * np.array(phi, dtype=np.float32).reshape(x.shape)


def _softplus(x: Logits) -> Logits:
    return np.maximum(x, np.float32(0)) + np.log1p(np.exp(-np.abs(x)))


def _elu(x: Logits) -> Logits:
    return np.where(x > 0, x, np.expm1(np.minimum(x, np.float32(0))))


def _hard_sigmoid(x: Logits) -> Logits:
    out: Logits = np.clip(x / np.float32(6) + np.float32(0.5), np.float32(0), np.float32(1))
    return out


def _log_softmax(x: Logits) -> Logits:
    below = x - x.max(-1, keepdims=True)
    out: Logits = below - np.log(np.exp(below).sum(-1, keepdims=True))
    return out


# The classes of torch.nn that need no arguments and give as many columns as they take.
TORCH: dict[str, Function] = {
    "CELU": _elu,
    "ELU": _elu,
    "GELU": _gelu,
    "Hardshrink": lambda x: np.where(np.abs(x) > np.float32(0.5), x, np.float32(0)),
    "Hardsigmoid": _hard_sigmoid,
    "Hardswish": hardswish,
    "Hardtanh": clip(-1, 1),
    "LeakyReLU": leaky(0.01),
    "LogSigmoid": lambda x: -_softplus(-x),
    "LogSoftmax": _log_softmax,
    "Mish": mish,
    "RReLU": leaky(_RRELU_SLOPE),
    "ReLU": relu,
    "ReLU6": clip(0, 6),
    "SELU": lambda x: _SELU_SCALE * np.where(x > 0, x, _SELU_ALPHA * np.expm1(np.minimum(x, np.float32(0)))),
    "SiLU": silu,
    "Sigmoid": sigmoid,
    "Softmax": softmax,
    "Softmin": lambda x: softmax(-x),
    "Softplus": _softplus,
    "Softshrink": lambda x: x - np.clip(x, np.float32(-0.5), np.float32(0.5)),
    "Softsign": lambda x: x / (1 + np.abs(x)),
    "Tanh": np.tanh,
    "Tanhshrink": lambda x: x - np.tanh(x),
    # What is left of these outside of training.
    **dict.fromkeys(("Identity", "Dropout", "AlphaDropout", "FeatureAlphaDropout"), identity),
}
