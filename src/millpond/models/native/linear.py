"""The weights of a packed forward's linear layers, as plans take them."""

from __future__ import annotations

from torch import nn

from millpond.models.linear import PlainLinear, ReorderedLinear
from millpond.models.native.plan import Unfit


def plain(part: nn.Module) -> PlainLinear:
    """The layer with its weight in torch's order.

    Raises:
        Unfit: It is of another kind.
    """
    if isinstance(part, ReorderedLinear):
        return part.plain()
    if not isinstance(part, PlainLinear):
        raise Unfit(f"layer {type(part).__name__}")
    return part
