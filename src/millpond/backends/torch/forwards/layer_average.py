"""WeightedLayerPooling: the weighted mean of several layers' states, by transformers' own class."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from millpond.checkpoints.modules import LayerMean
from millpond.checkpoints.token_tensors import layer_shares


class LayerAverage(nn.Module):
    """A backbone whose last hidden states are the mean of those of its layers."""

    def __init__(self, backbone: nn.Module, description: LayerMean) -> None:
        """``backbone`` is in evaluation mode, on its device."""
        super().__init__()
        self.backbone = backbone
        config: Any = backbone.config
        self._shares = layer_shares(description, config.num_hidden_layers)

    def forward(self, **inputs: Any) -> SimpleNamespace:
        """``last_hidden_state [1, tokens, width]``."""
        states = self.backbone(**inputs, output_hidden_states=True).hidden_states
        whole: torch.Tensor = torch.zeros_like(states[0], dtype=torch.float32)
        for share, of_layer in zip(self._shares, states, strict=True):
            if share:
                whole = whole.add(of_layer, alpha=share)
        return SimpleNamespace(last_hidden_state=whole)
