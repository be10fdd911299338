"""Heads: sentence-transformers' modules before and after the pooling, in float32."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from millpond.backends.torch.pooling.latent_attention import LatentAttentionHead
from millpond.backends.torch.weights import read_tensors
from millpond.checkpoints.modules import Codes, Dense, Head, LatentAttention, LayerNorm
from millpond.errors import ModelLoadError, WeightMismatchError


class DenseHead(nn.Module):
    """``activation(x W^T + b)``, plus the input if the checkpoint adds it."""

    def __init__(self, description: Dense) -> None:
        super().__init__()
        widths = description.in_features, description.out_features
        self.linear = nn.Linear(*widths, bias=description.bias)
        self.activation = _activation(description)
        self.residual: nn.Module | None = None
        if description.residual:
            self.residual = nn.Identity() if widths[0] == widths[1] else nn.Linear(*widths, bias=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:  # [n, in] -> [n, out]
        """Project the rows."""
        out: torch.Tensor = self.activation(self.linear(rows))
        return out if self.residual is None else out + self.residual(rows)


class NormalizeHead(nn.Module):
    """Division by the L2 norm before another head; the last normalization is the engine's."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:  # [n, d] -> [n, d]
        """Normalize the rows."""
        return nn.functional.normalize(rows, dim=-1)


class CodesHead(nn.Module):
    """Whole numbers from -127 to 127, by tanh."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:  # [n, d] -> [n, d]
        """Round the rows."""
        return torch.round(torch.tanh(rows) * 127)


def build_heads(descriptions: Sequence[Head], device: torch.device) -> nn.Sequential:
    """The heads in order, with their weights, in evaluation mode."""
    heads: list[nn.Module] = []
    for description in descriptions:
        if isinstance(description, Dense):
            heads.append(_with_weights(DenseHead(description), description.folder, description.weight))
        elif isinstance(description, LatentAttention):
            heads.append(LatentAttentionHead(description))
        elif isinstance(description, LayerNorm):
            norm = nn.Sequential(OrderedDict(norm=nn.LayerNorm(description.dimensions)))
            heads.append(_with_weights(norm, description.folder))
        else:
            heads.append(CodesHead() if isinstance(description, Codes) else NormalizeHead())
    return nn.Sequential(*heads).to(device=device, dtype=torch.float32).eval().requires_grad_(False)


def _activation(description: Dense) -> nn.Module:
    """An activation by its dotted path: only classes of torch.nn, and only those that need no arguments."""
    name = description.activation.rsplit(".", 1)[-1]
    module_class = getattr(nn, name, None)
    if not (isinstance(module_class, type) and issubclass(module_class, nn.Module)):
        raise ModelLoadError(
            f"{description.folder}: activation_function {description.activation!r} is no module of torch.nn"
        )
    try:
        return module_class()
    except TypeError as error:
        raise ModelLoadError(
            f"{description.folder}: activation_function {description.activation!r} cannot be built without arguments"
        ) from error


def _with_weights(head: nn.Module, folder: Path, weight: str | None = None) -> nn.Module:
    """``head`` with its tensors: all in ``folder``, or only ``weight``, which is stored with a backbone's."""
    try:
        if weight is None:
            head.load_state_dict(read_tensors(folder))
        else:
            head.load_state_dict({"linear.weight": read_tensors(folder, only=(weight,))[weight]})
    except RuntimeError as error:
        raise WeightMismatchError(f"{folder}: weights and config.json disagree: {error}") from error
    return head
