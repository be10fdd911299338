"""Renaming: from the names that a family's checkpoints on the hub have to those of transformers' class.

transformers has such tables of its own, but not for every prefix, nor in every version that millpond runs with.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

# The parts of one tensor, in their order.
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


@dataclass(frozen=True, kw_only=True)
class Renaming:
    """A family's names; tensors that already have the native ones pass unchanged.

    Attributes:
        prefixes: Names of the backbone inside a larger model, of which none, or one, leads the tensors' names.
        parts: Modules by the checkpoint's name and by the native one, somewhere between the dots.
        fused: Modules whose tensors hold several native ones of equal size, one behind the other.
    """

    prefixes: tuple[str, ...]
    parts: Mapping[str, str]
    fused: Mapping[str, tuple[str, ...]]

    def apply(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """``state`` under the native names."""
        lead, parts, fused = (
            re.compile(rf"^(?:{'|'.join(self.prefixes)})\."),
            _between_dots(self.parts),
            _between_dots(self.fused),
        )
        renamed: dict[str, torch.Tensor] = {}
        for original, tensor in state.items():
            name = parts.sub(lambda match: self.parts[match[0]], lead.sub("", original))
            whole = fused.search(name)
            if whole is None:
                renamed[name] = tensor
                continue
            targets = self.fused[whole[0]]
            for target, piece in zip(targets, tensor.chunk(len(targets)), strict=True):
                renamed[name.replace(whole[0], target)] = piece
        return renamed


def _between_dots(names: Mapping[str, object]) -> re.Pattern[str]:
    return re.compile(rf"(?<![^.])(?:{'|'.join(map(re.escape, names))})(?=\.)")
