"""NomicBert and GTE, packed: BERT with rotary positions and a gated feed forward, over transformers' weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from millpond.backends.torch.attention.kernels import attend
from millpond.backends.torch.attention.segments import Segments
from millpond.backends.torch.attention.signature import Masking
from millpond.backends.torch.forwards.add_norm import AddNorm
from millpond.backends.torch.forwards.encoder import Output
from millpond.backends.torch.forwards.linear import GatedProduct, joined
from millpond.backends.torch.forwards.rotary import apply_rotary
from millpond.checkpoints.architecture import Architecture


class PackedRotaryEncoder(nn.Module):
    """A loaded NomicBert or GTE, run on one packed row. Its layers are released one by one."""

    takes_rows = True

    def __init__(self, backbone: nn.Module, row: Architecture) -> None:
        super().__init__()
        parts: Any = backbone
        self.embeddings: nn.Module = parts.embeddings
        self.rotary: nn.Module = parts.rotary_emb
        self.layers = nn.ModuleList()
        for i in range(len(parts.layers)):
            self.layers.append(PackedLayer(parts.layers[i], parts.config))
            parts.layers[i] = nn.Identity()

    def forward(
        self,
        *,
        input_ids: torch.Tensor,  # [1, tokens]
        position_ids: torch.Tensor,  # [1, tokens]
        segments: Segments,
        token_type_ids: torch.Tensor | None = None,  # [1, tokens]
        rows: torch.Tensor | None = None,  # [n]
    ) -> Output:
        """Hidden states of every token, or only of the tokens ``rows``."""
        hidden = self.embeddings(input_ids=input_ids, token_type_ids=token_type_ids)[0]  # [tokens, hidden]
        cos, sin = (part[0][:, None] for part in self.rotary(hidden, position_ids))  # [tokens, 1, dim]
        for layer in self.layers:
            hidden = layer(hidden, segments, cos, sin, rows if layer is self.layers[-1] else None)
        return Output(last_hidden_state=hidden[None])


class PackedLayer(nn.Module):
    """One post-norm layer over the weights of the loaded one."""

    compiled_parts = ("_heads", "_feed")  # methods that run faster compiled

    def __init__(self, layer: Any, config: Any) -> None:
        super().__init__()
        self.heads = int(config.num_attention_heads)
        attention, mlp = layer.self_attn, layer.mlp
        self.qkv = joined(attention.q_proj, attention.k_proj, attention.v_proj)
        self.attention_out = joined(attention.o_proj)
        self.attention_norm = AddNorm(layer.post_attention_layernorm)
        self.gated = GatedProduct.of(mlp.gate_proj, mlp.up_proj, config.hidden_act)
        self.down_proj = joined(mlp.down_proj)
        self.norm = AddNorm(layer.post_mlp_layernorm)

    def forward(
        self,
        hidden: torch.Tensor,
        segments: Segments,
        cos: torch.Tensor,
        sin: torch.Tensor,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``[tokens, hidden]`` in and out; with ``rows [n]`` only these tokens out."""
        query, key, value = self._heads(hidden, cos, sin)
        masking = Masking(scale=query.shape[-1] ** -0.5, causal=False)
        mixed = attend(query, key, value, segments, masking).flatten(1)  # [tokens, hidden]
        return self._feed(hidden, mixed) if rows is None else self._feed(hidden[rows], mixed[rows])

    def _heads(
        self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values, ``[tokens, heads, dim]`` each."""
        qkv = self.qkv(hidden).unflatten(-1, (3 * self.heads, -1))  # [tokens, 3 heads, dim]
        query, key = apply_rotary(qkv[:, : 2 * self.heads], cos, sin).chunk(2, 1)  # [tokens, heads, dim]
        return query, key, qkv[:, 2 * self.heads :]

    def _feed(self, hidden: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        """The rest of the layer: ``hidden`` and the attention's output to the layer's states."""
        hidden = self.attention_norm(self.attention_out(mixed), hidden)
        return self.norm(self.down_proj(self.gated(hidden)), hidden)  # type: ignore[no-any-return]
