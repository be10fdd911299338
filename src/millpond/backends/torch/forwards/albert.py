"""ALBERT, packed: BERT's layer, its weights shared by all layers of a group."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from millpond.backends.torch.attention.segments import Segments
from millpond.backends.torch.forwards.encoder import Output, PackedLayer
from millpond.backends.torch.forwards.linear import joined
from millpond.checkpoints.architecture import Architecture, EncoderNames

_NAMES = EncoderNames(
    prefix="albert",
    query="attention.query",
    key="attention.key",
    value="attention.value",
    attention_out="attention.dense",
    attention_norm="attention.LayerNorm",
    up="ffn",
    down="ffn_output",
    norm="full_layer_layer_norm",
)


class PackedAlbert(nn.Module):
    """A loaded ALBERT, run on one packed row."""

    def __init__(self, backbone: nn.Module, row: Architecture) -> None:
        super().__init__()
        parts: Any = backbone
        config, encoder = parts.config, parts.encoder
        self.embeddings: nn.Module = parts.embeddings
        self.widen = joined(encoder.embedding_hidden_mapping_in)
        groups = [
            [PackedLayer(layer, _NAMES, int(config.num_attention_heads), config.hidden_act) for layer in layers]
            for layers in (group.albert_layers for group in encoder.albert_layer_groups)
        ]
        per_group = config.num_hidden_layers / config.num_hidden_groups
        # A shared layer is listed once for every time that it runs.
        self.layers = nn.ModuleList(
            layer for i in range(config.num_hidden_layers) for layer in groups[int(i / per_group)]
        )

    def forward(
        self,
        *,
        input_ids: torch.Tensor,  # [1, tokens]
        position_ids: torch.Tensor,  # [1, tokens]
        segments: Segments,
        token_type_ids: torch.Tensor | None = None,  # [1, tokens]
    ) -> Output:
        """Hidden states of every token."""
        embedded = self.embeddings(input_ids=input_ids, position_ids=position_ids, token_type_ids=token_type_ids)
        hidden = self.widen(embedded[0])  # [tokens, hidden]
        for layer in self.layers:
            hidden = layer(hidden, segments, None)
        return Output(last_hidden_state=hidden[None])
