"""Activations: logits to probabilities, on the host in float32.

They are applied when a call's result is put together, since callers that share a batch may ask for different ones.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from millpond.tasks import Activation

Rows = npt.NDArray[np.float32]


def activate(logits: Rows, activation: Activation) -> Rows:  # [n, labels] -> [n, labels]
    """Apply ``activation`` to each row."""
    if activation == "identity":
        return logits
    return _sigmoid(logits) if activation == "sigmoid" else _softmax(logits)


def by_width(columns: int) -> Activation:
    """What classification applies where a checkpoint does not say: sigmoid to one logit, softmax to several."""
    return "sigmoid" if columns == 1 else "softmax"


def _sigmoid(logits: Rows) -> Rows:
    # Two forms, so that the exponential never overflows.
    small = np.exp(-np.abs(logits))
    out: Rows = np.where(logits >= 0, 1 / (1 + small), small / (1 + small)).astype(np.float32)
    return out


def _softmax(logits: Rows) -> Rows:
    if logits.shape[-1] == 0:
        return logits
    raised = np.exp(logits - logits.max(-1, keepdims=True))
    out: Rows = (raised / raised.sum(-1, keepdims=True)).astype(np.float32)
    return out
