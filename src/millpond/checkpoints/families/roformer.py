"""RoFormer: BERT whose queries and keys are rotated, neighbouring columns of a head being a pair."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from millpond.checkpoints.families.renaming import AnyTensor
from millpond.errors import UnsupportedArchitectureError, WeightMismatchError

_TURNED = re.compile(r"attention\.self\.(query|key)\.(weight|bias)$")


def translate(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """config.json unchanged; a text may not be longer than its table of sines and cosines."""
    if config.get("rotary_value"):
        raise UnsupportedArchitectureError(
            f"{name}: rotary_value true (values are rotated too), which millpond does not run for RoFormer"
        )
    return {**config, "positions_end": True}


def rename(tensors: Mapping[str, AnyTensor], config: Mapping[str, Any]) -> dict[str, AnyTensor]:
    """The checkpoint's tensors, with the rows of queries and keys in the order in which halves of a head are pairs."""
    heads = int(config.get("num_attention_heads", 12))
    return {
        name: tensor[_halves(tensor.shape[0], heads, name)] if _TURNED.search(name) else tensor
        for name, tensor in tensors.items()
    }


def _halves(rows: int, heads: int, name: str) -> list[int]:
    """Of each head the even columns, then the odd ones."""
    if rows % (2 * heads):
        raise WeightMismatchError(f"{name} has {rows} rows, which {heads} heads do not share")
    by_head = np.arange(rows).reshape(heads, -1, 2)
    order: list[int] = by_head.swapaxes(1, 2).ravel().tolist()
    return order
