"""Renaming: tensor names of a family's checkpoints on the hub to those of transformers' class.

transformers has such tables too, but not for every prefix, nor in every version that millpond supports.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

# Parts of a fused tensor, in order.
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


@dataclass(frozen=True, kw_only=True)
class Renaming:
    """A family's names; tensors that already have native names pass unchanged."""

    # Names of the backbone inside a larger model; one of them, or none, precedes a tensor's name
    prefixes: tuple[str, ...]
    parts: Mapping[str, str]  # the checkpoint's name of a module to the native one; whole components of a path
    fused: Mapping[str, tuple[str, ...]]  # modules whose tensors hold several native ones of equal size, concatenated

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
            match = fused.search(name)
            if match is None:
                renamed[name] = tensor
                continue
            targets = self.fused[match[0]]
            for target, piece in zip(targets, tensor.chunk(len(targets)), strict=True):
                renamed[name.replace(match[0], target)] = piece
        return renamed


def _between_dots(names: Mapping[str, object]) -> re.Pattern[str]:
    return re.compile(rf"(?<![^.])(?:{'|'.join(map(re.escape, names))})(?=\.)")
