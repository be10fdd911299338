"""GTE (``NewModel``): transformers' class, or one derived from its relative where transformers has none yet."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def backbone_class() -> type[Any]:
    """transformers' class; before 5.19, which introduced it, its base class with GTE's parts."""
    import transformers

    native: type[Any] | None = getattr(transformers, "GteModel", None)
    return _derived() if native is None else native


def _derived() -> type[Any]:
    from transformers import JinaEmbeddingsV3Config, JinaEmbeddingsV3Model

    class GteConfig(JinaEmbeddingsV3Config):
        model_type = "gte"

    class GteModel(JinaEmbeddingsV3Model):
        config_class = GteConfig

        def __init__(self, config: GteConfig) -> None:
            super().__init__(config, add_pooling_layer=False)
            for layer in self.layers:
                layer.mlp = _GatedMLP(config)
            if not config.type_vocab_size:
                self.embeddings.token_type_embeddings = _NoTypes()  # type: ignore[assignment]

    return GteModel


class _GatedMLP(nn.Module):
    def __init__(self, config: Any) -> None:
        from transformers.activations import ACT2FN

        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size)
        self.activate = ACT2FN[config.hidden_act]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(self.activate(self.gate_proj(hidden)) * self.up_proj(hidden))
        return out


class _NoTypes(nn.Module):
    """In place of the table of token types, for a checkpoint without one."""

    def forward(self, token_type_ids: torch.Tensor) -> torch.Tensor:
        return token_type_ids.new_zeros(())
