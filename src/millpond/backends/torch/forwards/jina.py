"""jina-embeddings-v3: XLM-RoBERTa with rotary positions and adapters of every matrix; jina-colbert-v2 has none."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from millpond.backends.torch.attention.kernels import attend
from millpond.backends.torch.attention.segments import Segments
from millpond.backends.torch.attention.signature import Masking
from millpond.backends.torch.forwards.adapters import AdaptedEmbedding, AdaptedLinear, AdapterChoice, Adapters
from millpond.backends.torch.forwards.add_norm import AddNorm
from millpond.backends.torch.forwards.encoder import Output
from millpond.backends.torch.forwards.rotary import apply_rotary
from millpond.checkpoints.checkpoint import Checkpoint
from millpond.checkpoints.families.jina import PREFIX


def finish(backbone: nn.Module, checkpoint: Checkpoint) -> nn.Module:
    """The loaded weights in a forward that takes adapters."""
    like = next(backbone.parameters())
    return JinaEncoder(backbone, Adapters(checkpoint, prefix=PREFIX, like=like))


class JinaEncoder(nn.Module):
    """The loaded backbone, run on one packed row."""

    owners: torch.Tensor  # int64 [adapters rank]: the adapter of each column

    def __init__(self, backbone: nn.Module, adapters: Adapters) -> None:
        super().__init__()
        parts: Any = backbone
        tables = parts.embeddings
        self.words = AdaptedEmbedding(tables.word_embeddings, adapters, "embeddings.word_embeddings")
        self.types = AdaptedEmbedding(tables.token_type_embeddings, adapters, "embeddings.token_type_embeddings")
        self.norm: nn.Module = tables.LayerNorm
        self.rotary: nn.Module = parts.rotary_emb
        self.layers = nn.ModuleList(
            JinaLayer(layer, parts.config, adapters, f"encoder.layers.{i}") for i, layer in enumerate(parts.layers)
        )
        adapters.check_all_taken()
        owners = torch.arange(adapters.count, device=self.words.weight.device).repeat_interleave(adapters.rank)
        self.register_buffer("owners", owners, persistent=False)

    def forward(
        self,
        *,
        input_ids: torch.Tensor,  # [1, tokens]
        position_ids: torch.Tensor,  # [1, tokens]
        segments: Segments,
        token_type_ids: torch.Tensor | None = None,  # [1, tokens]
        adapter_ids: torch.Tensor | None = None,  # [1, tokens], -1: none
    ) -> Output:
        """Hidden states of every token; ``adapter_ids=None``: no adapters, at no cost."""
        words = input_ids[0]
        types = torch.zeros_like(words) if token_type_ids is None else token_type_ids[0]
        choice = None
        if adapter_ids is not None:
            chosen = adapter_ids[0]
            mask = (chosen[:, None] == self.owners).to(self.words.weight.dtype)
            choice = AdapterChoice(adapter_ids=chosen.clamp(min=0), mask=mask)
        hidden: torch.Tensor = self.norm(self.words(words, choice) + self.types(types, choice))  # [tokens, hidden]
        cos, sin = (part[0][:, None] for part in self.rotary(hidden, position_ids))  # [tokens, 1, dim]
        for layer in self.layers:
            hidden = layer(hidden, segments, cos, sin, choice)
        return Output(last_hidden_state=hidden[None])


class JinaLayer(nn.Module):
    """One post-norm layer."""

    def __init__(self, layer: Any, config: Any, adapters: Adapters, key: str) -> None:
        super().__init__()
        self.heads = int(config.num_attention_heads)
        attention, mlp = layer.self_attn, layer.mlp
        qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
        self.qkv = AdaptedLinear(qkv, adapters, f"{key}.mixer.Wqkv")
        self.attention_out = AdaptedLinear((attention.o_proj,), adapters, f"{key}.mixer.out_proj")
        self.attention_norm = AddNorm(layer.post_attention_layernorm)
        self.up = AdaptedLinear((mlp.fc1,), adapters, f"{key}.mlp.fc1", config.hidden_act)
        self.down = AdaptedLinear((mlp.fc2,), adapters, f"{key}.mlp.fc2")
        self.norm = AddNorm(layer.post_mlp_layernorm)

    def forward(
        self,
        hidden: torch.Tensor,
        segments: Segments,
        cos: torch.Tensor,
        sin: torch.Tensor,
        choice: AdapterChoice | None,
    ) -> torch.Tensor:
        """``[tokens, hidden]`` in and out."""
        qkv = self.qkv(hidden, choice).unflatten(-1, (3 * self.heads, -1))  # [tokens, 3 heads, dim]
        query, key = apply_rotary(qkv[:, : 2 * self.heads], cos, sin).chunk(2, 1)  # [tokens, heads, dim]
        value = qkv[:, 2 * self.heads :]
        masking = Masking(scale=query.shape[-1] ** -0.5, causal=False)
        mixed = attend(query, key, value, segments, masking).flatten(1)  # [tokens, hidden]
        hidden = self.attention_norm(self.attention_out(mixed, choice), hidden)
        return self.norm(self.down(self.up(hidden, choice), choice), hidden)  # type: ignore[no-any-return]
