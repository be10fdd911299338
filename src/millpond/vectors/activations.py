"""Activations: logits to probabilities on the host, when a call's result is assembled: callers of one batch differ."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from millpond.tasks import Activation

Logits = npt.NDArray[np.float32]


def activate(logits: Logits, activation: Activation) -> Logits:  # [n, labels] -> [n, labels]
    """Apply ``activation`` to each row."""
    if activation == "identity":
        return logits
    if activation == "sigmoid":
        small = np.exp(-np.abs(logits))  # two forms: the exponential of a positive number could overflow
        return np.where(logits >= 0, 1 / (1 + small), small / (1 + small)).astype(np.float32)
    if logits.shape[-1] == 0:
        return logits
    raised = np.exp(logits - logits.max(-1, keepdims=True))
    out: Logits = (raised / raised.sum(-1, keepdims=True)).astype(np.float32)
    return out


def by_width(columns: int) -> Activation:
    """Default of a classifier whose checkpoint names none: sigmoid of one logit, softmax of several."""
    return "sigmoid" if columns == 1 else "softmax"
